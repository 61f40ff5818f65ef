"""The runs that pictures of docs/ are drawn from, recorded again: what does not depend on time is the same."""

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from support.harness.mpi_launcher import Launcher

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.fixture
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs of the recording in docs/, and of one that is made now."""
    environment = Launcher.named("MPICH").environment()
    monkeypatch.setattr(os, "environ", environment)
    record = runpy.run_path(str(FOLDER / "record.py"))["record"]
    text = (FOLDER / "recorded" / f"{request.param}.json").read_text(encoding="utf-8")
    return [json.loads(text)["jobs"], record(request.param)["jobs"]]


def again(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("both", [name], indirect=True)


@again("ranks_and_nodes")
def test_places_of_replicas(both: list[Any]) -> None:
    ((before,), (now,)) = both
    assert now["lines"] == before["lines"]


@pytest.mark.slow
@again("hosts_of_variables")
def test_hosts_of_variables(both: list[Any]) -> None:
    ((before,), (now,)) = both
    assert now["lines"] == before["lines"]


@again("values_of_a_step")
def test_values_of_a_step(both: list[Any]) -> None:
    ((before,), (now,)) = both
    for old, new in zip(before["lines"], now["lines"], strict=True):
        assert new.keys() == old.keys()
        for name, value in new.items():
            numbers = name in ("gradient", "sum", "bias")
            assert value == (pytest.approx(old[name], abs=2e-4) if numbers else old[name])
    first, second = now["lines"]
    assert first["bias"] == second["bias"]
    parts = zip(first["gradient"], second["gradient"], strict=True)
    assert first["sum"] == pytest.approx([a + b for a, b in parts], abs=2e-4)
    assert sums_of(now) == sums_of(before)


def sums_of(job: Any) -> list[tuple[str, int]]:
    calls = [event for event in job["trace"] if event["name"] == "all_reduce"]
    return [(event["args"]["call"], event["args"]["bytes"]) for event in calls]


@pytest.mark.slow
@again("restart")
def test_losses_after_a_restart(both: list[Any]) -> None:
    for old, new in zip(*both, strict=True):
        assert [line.keys() for line in new["lines"]] == [line.keys() for line in old["lines"]]
        for before, now in zip(old["lines"], new["lines"], strict=True):
            assert now == pytest.approx(before, rel=0.02)


@pytest.mark.slow
@again("stall")
def test_report_of_the_observer(both: list[Any]) -> None:
    ((before,), (now,)) = both
    assert now["report"][0] == before["report"][0]
    assert now["exit code"] == before["exit code"] != 0


@pytest.mark.slow
@again("straggler")
def test_others_wait_for_the_straggler(both: list[Any]) -> None:
    for (job,) in both:
        waits = [event for event in job["trace"] if event["name"] == "all_reduce"]
        longest = max(waits, key=lambda event: event["dur"])
        assert longest["args"]["last to enter"] == "rank 1"
        assert longest["pid"] != 1
