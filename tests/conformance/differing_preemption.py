"""Expectations about preemption that differences.toml names, computed from a case; encoded as in the recording."""

from __future__ import annotations

from typing import Any


def saved_after_the_step(case: dict[str, Any]) -> Any:
    """The checkpoint holds the steps up to the one that the signal came before, and is written after the last, too."""
    expect = case["expect"]
    term_at, total = case["inputs"]["term_at"], case["inputs"]["total"]
    if "returns" not in expect or term_at is None or term_at >= total:
        return expect  # of a grace period no single step is recorded; no signal comes after the end
    steps = term_at + 1
    left = steps < total or case["program"]["via"] != "run"
    return {
        "steps_executed": steps,
        "events": ["exit"] if left else [],
        "total_run_calls": steps,
        "num_checkpoints": 1,
        "returns": list(range(1, steps + 1)),
        "restored_v": steps,
        "restored_total_run_calls": steps,
    }
