"""The tournament of nodes, and who is slow in it."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest

from mpistrat.tools.doctor import links
from mpistrat.tools.doctor.facts import JobFacts, Links
from mpistrat.tools.doctor.finding import OK, PROBLEM, WARNING, Finding

MakeJob = Callable[..., JobFacts]
FAST = 9.8e9


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 9, 16, 33])
def test_every_pair_meets_once(nodes: int) -> None:
    """And nobody plays two at a time; the least number of rounds that this takes."""
    met = []
    for turn in range(links.rounds(nodes)):
        partners = {node: links.partner(node, turn, nodes) for node in range(nodes)}
        resting = [node for node, other in partners.items() if other is None]
        assert len(resting) == nodes % 2
        for node, other in partners.items():
            if other is not None:
                assert partners[other] == node != other
                met.append((node, other))
    assert sorted(met) == sorted(itertools.permutations(range(nodes), 2))


@pytest.mark.parametrize(
    ("nodes", "played"), [(2, 1), (100, 99), (401, 400), (1000, 400), (65536, 400)]
)
def test_time_is_bounded(nodes: int, played: int) -> None:
    """Of more nodes than there is time for, some rounds: all different ones."""
    chosen = links.turns(nodes)
    assert len(chosen) == len(set(chosen)) == played
    assert set(chosen) <= set(range(links.rounds(nodes)))


def measured(
    make_job: MakeJob,
    nodes: int,
    slow: Mapping[tuple[int, int], float] = MappingProxyType({}),
    speeds: list[list[str]] | None = None,
) -> list[Finding]:
    rates = [
        [a, b, slow.get((a, b), FAST + a + b)] for a, b in itertools.combinations(range(nodes), 2)
    ]
    job = make_job(nodes=nodes, per_node=1)
    links_measured = Links(rates, speeds or [["100000 Mb/s"]] * nodes, len(rates))
    return list(links.check(dataclasses.replace(job, links=links_measured)))


def test_all_alike(make_job: MakeJob) -> None:
    (finding,) = measured(make_job, 4)
    assert finding.level == OK
    assert finding.text == "4 nodes exchange 9.8 GB/s with each other, the median is 9.8 GB/s."


@pytest.mark.parametrize(("rate", "level"), [(0.9e9, PROBLEM), (4e9, WARNING)])
def test_a_slow_link(make_job: MakeJob, rate: float, level: str) -> None:
    (finding,) = measured(make_job, 4, {(1, 3): rate})
    assert finding.level == level
    assert finding.text.startswith("The link n2 <-> n4 is slow: ")
    assert "of 9.8 GB/s (median of the others)" in finding.text
    assert "--exclude=n4" in finding.fix


def test_a_slow_node(make_job: MakeJob) -> None:
    """Named once, and not its links one by one; also of three nodes, where two of three links are slow."""
    for nodes in (3, 6):
        slow = {(0, other): 1e8 for other in range(1, nodes)}
        (finding,) = measured(make_job, nodes, slow)
        assert finding.level == PROBLEM
        assert finding.text.startswith("n1 is slow with every other node: 0.1 GB/s of ")


def test_many_slow_links(make_job: MakeJob) -> None:
    slow = {(a, a + 1): 1e8 * (a + 1) for a in range(0, 14, 2)}
    findings = measured(make_job, 16, slow)
    assert len(findings) == links.MOST_NAMED + 1
    assert findings[0].text.startswith("The link n1 <-> n2 is slow: 0.1 GB/s")
    assert findings[-1].text == "2 more pairs of nodes are slow."


class Rate(float):
    """Counts how often it is compared."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Rate.compared += 1
        return float(self) < float(other)

    def __eq__(self, other: object) -> bool:
        Rate.compared += 1
        return isinstance(other, float) and float(self) == float(other)

    __hash__ = float.__hash__


def test_pairs_of_many_nodes_are_not_searched_one_by_one() -> None:
    """1000 nodes have 200,000 pairs that are measured."""
    rates = {(0, node): Rate(node % 7 + 1.0) for node in range(1, 4097)}
    slow = links.slower_than_others(rates)
    assert {rates[pair] for pair in slow} == {1.0}
    assert Rate.compared < 40 * len(rates)


def test_a_network_that_mpi_does_not_use(make_job: MakeJob) -> None:
    """TCP over Ethernet where there is InfiniBand; of two nodes, too, which have no others to compare."""
    speeds = [["1000 Mb/s", "400 Gb/sec (4X NDR)"]] * 2
    warning, fine = measured(make_job, 2, {(0, 1): 1.1e8}, speeds)
    assert (warning.level, fine.level) == (WARNING, OK)
    assert (
        "more than 0.11 GB/s, and each has a link of 400 Gb/sec (4X NDR) (50.0 GB/s)"
        in warning.text
    )
    assert "UCX_NET_DEVICES" in warning.fix
    assert len(measured(make_job, 2, {(0, 1): 1.1e8}, [["1000 Mb/s"]] * 2)) == 1
    assert len(measured(make_job, 2, {(0, 1): 1.1e8}, [[], ["400 Gb/sec (4X NDR)"]])) == 1


def test_one_node(make_job: MakeJob) -> None:
    assert list(links.check(make_job())) == []
