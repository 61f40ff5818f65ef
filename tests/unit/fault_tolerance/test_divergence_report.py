"""In what words copies that differ are told."""

from mpistrat.pytorch.watch.divergence_report import Copies, Digested
from mpistrat.pytorch.watch.mirrored_state import MirroredThing


def copies_of(*by_rank: list[object]) -> Copies:
    return Copies([Digested.of(MirroredThing("lr", copies)) for copies in by_rank])


def test_replicas_that_ranks_have_in_different_numbers() -> None:
    copies = copies_of([1.0] * 3, [1.0] * 3, [1.0, 2.0])
    assert copies.descriptions()[-1] == "replica 7 (rank 2): 2.0"
    assert copies.suspects == (2,)


def test_long_values_that_differ_late() -> None:
    """Of what they share only the end is told."""
    lines = copies_of([[0.5] * 100], [[0.5] * 99 + [0.75]]).descriptions()
    assert [line[: len("rank 0: …")] for line in lines] == ["rank 0: …", "rank 1: …"]
    assert [line.split(", ")[-1] for line in lines] == ["0.5]", "0.75]"]
    assert max(map(len, lines)) < 100


def test_short_values_are_told_whole() -> None:
    assert copies_of([1.0], [2.0]).descriptions() == ["rank 0: 1.0", "rank 1: 2.0"]
