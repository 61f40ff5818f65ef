"""What is judged, printed and returned."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpistrat.__main__ import main
from mpistrat.tools.doctor import command
from mpistrat.tools.doctor.command import Outcome
from mpistrat.tools.doctor.facts import (
    Driver,
    Gpus,
    JobFacts,
    JobFailure,
    Launch,
    as_json,
    from_json,
)
from mpistrat.tools.doctor.finding import (
    OK,
    PROBLEM,
    WARNING,
    Finding,
    as_text,
    bytes_in_words,
    said_once,
    to_json,
)

MakeJob = Callable[..., JobFacts]


def test_what_is_not_ok_has_a_fix() -> None:
    for level, fix, heading in (
        (PROBLEM, "", ""),
        (PROBLEM, "do it", ""),
        (WARNING, "", "Bus error"),
        (OK, "do it", "Bus error"),
        ("bad", "do it", "Bus error"),
    ):
        with pytest.raises(ValueError, match=r"fix|level"):
            Finding("cores", level, "text", fix, heading)


def test_what_is_true_of_several_nodes_is_said_once() -> None:
    findings = [
        Finding("cores", WARNING, "few", "more", "Few", (node,)) for node in ("n1", "n2", "n3")
    ]
    findings.insert(1, Finding("MPI", OK, "well"))
    once = said_once(findings)
    assert once == [
        Finding("cores", WARNING, "few", "more", "Few", ("n1", "n2", "n3")),
        Finding("MPI", OK, "well"),
    ]
    assert "warning  cores on all 3 nodes: few" in as_text(once, nodes=3)
    assert "warning  cores on n1, n2, n3: few" in as_text(once, nodes=9)


def test_text() -> None:
    findings = [
        Finding("MPI", OK, "It runs."),
        Finding("memory", WARNING, "Little.", "more", "Bus error"),
        Finding("cores", PROBLEM, "None.", "some", "Ranks take turns"),
    ]
    assert as_text(findings, nodes=1).splitlines() == [
        "PROBLEM  cores: None.",
        "    fix: some (docs/troubleshooting.md: Ranks take turns)",
        "warning  memory: Little.",
        "    fix: more (docs/troubleshooting.md: Bus error)",
        "ok       MPI: It runs.",
        "1 problem, 1 warning.",
    ]
    assert as_text(findings[:1], nodes=1).endswith("Nothing to fix.")


def test_facts_survive_json(make_job: MakeJob) -> None:
    job = JobFacts(make_job(nodes=2).ranks, JobFailure("MPI_Init", "late", "..."))
    assert from_json(JobFacts, json.loads(json.dumps(as_json(job)))) == job


def test_json(make_job: MakeJob) -> None:
    job = make_job()
    content = json.loads(to_json(command.judge(job), job))
    assert {finding["check"] for finding in content["findings"]} >= {"MPI", "software", "cores"}
    assert content["facts"]["ranks"][0]["host"] == "n1"


def test_a_check_that_fails_itself_does_not_silence_the_others(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(job: JobFacts) -> Iterator[Finding]:
        yield Finding("x", OK, "so far")
        raise KeyError("oh")

    monkeypatch.setattr(command, "CHECKS", (broken, *command.CHECKS))
    first, failed, *others = command.judge(make_job())
    assert first.text == "so far"
    assert "KeyError: 'oh'" in failed.text
    assert others


def test_each_rank_looks_which_gpus_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first rank of a node what can be done with them."""
    monkeypatch.setattr(command.nodes, "look", lambda: Launch(rank=1, first_on_node=False))
    monkeypatch.setattr(command.cuda_driver, "look", lambda: Driver(True, ["1f"]))
    here = command.look()
    assert (here.driver.gpus, here.gpus) == (["1f"], None)


def test_the_first_rank_of_a_node_asks_no_more_where_the_driver_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hung = Driver(True, error="no end within 20 s", hangs=True)
    monkeypatch.setattr(command.nodes, "look", lambda: Launch(rank=0))
    monkeypatch.setattr(command.cuda_driver, "look", lambda: hung)
    here = command.look()
    assert (here.driver, here.gpus) == (hung, Gpus(torch_error="not asked: CUDA's driver hangs"))


def outcome_of(make_job: MakeJob, **kind: Any) -> Outcome:
    if "job" in kind:
        return Outcome(job=make_job(**kind["job"]))
    return Outcome(failure=JobFailure("MPI_Init", **kind)) if kind else Outcome()


@pytest.mark.parametrize(
    ("rank", "kind", "code", "speaks"),
    [
        (0, {"job": {}}, 0, True),
        (0, {"job": {"memory": {"files": 1024}}}, 0, True),  # a warning
        (0, {"job": {"memory": {"shared": None}}}, 1, True),
        (1, {}, 0, False),
        (0, {"kind": "topology", "text": "2 ranks"}, 1, True),
        (1, {"kind": "topology", "text": "2 ranks"}, 0, False),  # as rank 0 says
        (1, {"kind": "library", "text": "none"}, 0, False),
    ],
)
def test_who_speaks_and_what_is_returned(
    make_job: MakeJob,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    kind: dict[str, Any],
    code: int,
    speaks: bool,
) -> None:
    here = make_job().ranks[rank]
    monkeypatch.setattr(command, "look", lambda: here)
    monkeypatch.setattr(command, "run_rank", lambda arguments: outcome_of(make_job, **kind))
    assert main(["doctor"]) == code
    assert bool(capsys.readouterr().out) == speaks


def test_a_rank_that_failed_alone_tells_it_in_a_line(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 waits for it, and knows nothing of it."""
    here = make_job().ranks[1]
    failure = {"kind": "ended", "text": "killed by SIGSEGV", "words": "no device"}
    monkeypatch.setattr(command, "SECONDS_FOR_RANK_0", 0)
    monkeypatch.setattr(command, "look", lambda: here)
    monkeypatch.setattr(command, "run_rank", lambda arguments: outcome_of(make_job, **failure))
    assert main(["doctor"]) == 1
    output = capsys.readouterr()
    assert not output.out
    assert output.err == "mpistrat doctor: rank 1 on n1, MPI_Init: killed by SIGSEGV (no device)\n"


def test_a_node_without_an_mpi_library_is_named(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once for all its ranks. Rank 0 has a library, waits in vain, and thinks of firewalls."""
    failure = {"kind": "library", "text": "cannot load MPI library"}
    monkeypatch.setattr(command, "SECONDS_FOR_RANK_0", 0)
    monkeypatch.setattr(command, "run_rank", lambda arguments: outcome_of(make_job, **failure))
    for here in make_job(nodes=2).ranks[2:]:
        monkeypatch.setattr(command, "look", lambda here=here: here)
        assert main(["doctor"]) == 0
    output = capsys.readouterr()
    assert not output.out
    assert output.err == "mpistrat doctor: rank 2 on n2, MPI_Init: cannot load MPI library\n"


@pytest.mark.parametrize("arguments", [[], ["fly"], ["doctor", "--yaml"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: mpistrat" in capsys.readouterr().err


def test_words() -> None:
    assert [bytes_in_words(n) for n in (12, 64e6, 30.4e9, 2e12)] == [
        "12 bytes",
        "64 MB",
        "30.4 GB",
        "2 TB",
    ]
