"""Replays cases that TensorFlow recorded: `pytest tests/conformance`, or under mpiexec with --with-mpi.

At s ranks every case whose n replicas can be split over them is replayed with n / s replicas per rank.
MPISTRAT_GOLDEN=FOLDER replays other recorded cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mpistrat as ms
from conformance import cases, differences, replay_preemption, splits
from conformance.comparison import check
from conformance.outcomes import attempt
from conformance.stage import Stage
from mpistrat.fault_tolerance import TerminationConfig

# All ranks read the iterables here, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:each of the .* ranks reads all:UserWarning")
TESTS = Path(__file__).parents[1]
RULES = differences.load()
BY_CASES = [rule for rule in RULES if not rule.test]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stage" not in metafunc.fixturenames:
        return
    rank, size = _place(metafunc.config)
    marks = [pytest.mark.mpi(min_size=size)] if size > 1 else []
    metafunc.parametrize(
        "stage",
        [
            pytest.param(stage, id=stage.name, marks=marks)
            for case in cases.load(cases.folder())
            if splits.fits(case, size)
            for stage in cases.stages(case, rank, size)
        ],
    )


def _place(config: pytest.Config) -> tuple[int, int]:
    if not config.option.with_mpi:
        return 0, 1
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def _expectation(case: dict[str, Any]) -> Any:
    rule = differences.find(RULES, case)
    return case["expect"] if rule is None else rule.expectation(case)


def test_case(stage: Stage) -> None:
    expect = splits.on_rank(stage.case, _expectation(stage.case), stage.rank, stage.size)
    check(expect, attempt(lambda: cases.replay(stage)))


@pytest.mark.parametrize("rule", BY_CASES, ids=lambda rule: rule.reason[:40])
def test_difference_is_needed(rule: differences.Difference, pytestconfig: pytest.Config) -> None:
    """Each rule applies to a recorded case, and one of them does not come to what was recorded."""
    rank, size = _place(pytestconfig)
    ruled = [case for case in cases.load(cases.RECORDED) if differences.find(RULES, case) is rule]
    assert ruled, f"no recorded case for the rule {rule.match}"
    here = [
        stage
        for case in ruled
        if splits.fits(case, size)
        for stage in cases.stages(case, rank, size)
    ]
    if size == 1 and here:
        assert not all(_as_recorded(stage) for stage in here), "the library does as TensorFlow does"


def test_other_differences_have_a_test() -> None:
    """A difference without a recorded case names the test that shows it."""
    for rule in RULES:
        if rule.test:
            file, _, name = rule.test.partition("::")
            assert f"\ndef {name}(" in (TESTS / file).read_text(), rule.test
            assert not rule.match
            assert not rule.instead


def _as_recorded(stage: Stage) -> bool:
    outcome = attempt(lambda: cases.replay(stage))
    try:
        check(stage.case["expect"], outcome)
    except AssertionError:
        return False
    return True


def test_all_recorded_cases_are_there() -> None:
    """Those that are replayed here, and those that REPLAYED_ELSEWHERE has other tests for."""
    recorded = list(cases.read(cases.RECORDED))
    assert len(recorded) == len({case["id"] for case in recorded}) == 1835
    here = [case for case in cases.load(cases.RECORDED) if splits.fits(case, 1)]
    over_ranks = [case for case in cases.load(cases.RECORDED) if not splits.fits(case, 1)]
    elsewhere = [case for case in recorded if case not in (here + over_ranks)]
    assert (len(here), len(over_ranks), len(elsewhere)) == (1733, 96, 6)
    assert all(any(splits.fits(case, size) for size in (2, 3, 4)) for case in over_ranks)


@pytest.mark.parametrize("function", ["save_fn", "termination_watcher_fn"])
def test_functions_of_a_termination_config_are_tried(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded loop with such a function comes to the same end, and to none if the library ignores it."""
    recorded = (case for case in cases.load(cases.RECORDED) if case["area"] == "preemption")
    loop = next(case for case in recorded if case["program"].get("via") == "run")
    case = {**loop, "program": {**loop["program"], function: "is given"}}
    check(_expectation(case), attempt(lambda: cases.replay(Stage(case, "numpy"))))

    def ignores_it(**config: Any) -> Any:
        return TerminationConfig(**{name: config[name] for name in config if name != function})

    monkeypatch.setattr(ms.experimental, "TerminationConfig", ignores_it)
    monkeypatch.setattr(replay_preemption, "SECONDS_TO_BE_ASKED", 2.0)
    with pytest.raises(AssertionError, match="was not"):
        cases.replay(Stage(case, "numpy"))


def test_what_is_replayed_elsewhere_is_not_replayed_here() -> None:
    for area, op in cases.REPLAYED_ELSEWHERE:
        assert op not in cases.HANDLERS[area], f"{op} of {area} can be replayed: list it no longer"
