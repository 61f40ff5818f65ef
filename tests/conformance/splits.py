"""Which cases are replayed over several ranks, and what one rank of them must see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.replay_coordinator import RANKS, SERVER_TASK

Case = dict[str, Any]


def _always(program: dict[str, Any]) -> bool:
    return True


def _reduces(program: dict[str, Any]) -> bool:
    return program["merge"].startswith("reduce_")


def _lands_on_all(program: dict[str, Any]) -> bool:
    return program["destinations"] in ("per_replica", "variable")


def _assigned_value(program: dict[str, Any]) -> bool:
    return (
        program["where"] != "cross_per_replica"
    )  # with one replica per rank there is no such operand


def _policy_of_all(program: dict[str, Any]) -> bool:
    own_sum = "accumulation_fn" in program or program["class"] == "CrossDeviceOps"
    return program.get("destinations") == "same" and not own_sum


# Results that are reductions, gathers, collectives or variable state. The others (regrouping, identity,
# plain operands, one named device, what a merge function sees) stay in one process.
_SPLIT: dict[tuple[str, str], Callable[[dict[str, Any]], bool]] = {
    ("reduce", "reduce"): _always,
    ("reduce", "reduce_nested"): _always,
    ("reduce", "reduce_mirrored_variable"): _always,
    ("gather", "gather"): _always,
    ("gather", "gather_nested"): _always,
    ("merge_call", "merge_call"): _reduces,
    ("merge_call", "all_reduce_sequence"): _always,
    ("replica_collectives", "all_reduce"): _always,
    ("replica_collectives", "all_gather"): _always,
    ("replica_collectives", "grad_all_reduce"): _always,
    ("replica_collectives", "grad_all_gather"): _always,
    ("cross_device_ops", "cdo_reduce"): _policy_of_all,
    ("cross_device_ops", "cdo_batch_reduce"): _policy_of_all,
    ("distribute_dataset", "distribute_dataset"): _always,
    ("distribute_dataset", "iterate_and_reduce_in_function"): _always,
    ("distribute_dataset", "reduce_each_step_axis0"): _always,
    ("distribute_dataset", "dist_dataset.reduce"): _always,
    ("extended", "reduce_to"): _lands_on_all,
    ("extended", "batch_reduce_to"): _lands_on_all,
    ("extended", "read_var"): _always,
    ("extended", "extended.update called inside run"): _always,
    ("variables", "variable"): _assigned_value,
    ("variables", "variable_scatter"): _always,
    ("variables", "variable_create"): _always,
    ("variables", "variable_create_callable_initializer"): _always,
    ("variables", "variable_create_in_replica_fn"): _always,
    ("variables", "variable_use"): _always,
    ("variables", "variable_checkpoint"): _always,
    ("variables", "extended_update"): _always,
    ("variables", "colocate_vars_with"): _always,
}


def fits(case: Case, size: int) -> bool:
    """Whether `case` is replayed over `size` ranks."""
    program = case["program"]
    if case["area"] == "multi_worker":
        return program["workers"] == size
    if case["area"] == "coordinator" and case["replicas"]:
        return size == RANKS
    if size == 1:
        return True
    if case["replicas"] == 0 or case["replicas"] % size:
        return False
    if program.get("strategy", "mirrored") not in ("mirrored", "central_storage"):
        return False
    wanted = _SPLIT.get((case["area"], program["op"]))
    return wanted is not None and wanted(program)


# Fields that hold one entry per replica.
_PER_REPLICA = {
    "per_replica",
    "components",
    "restored_components",
    "returned",
    "replica",
    "replica_read",
    "result",
    "mirrored",
    "dist_variable",
}


def on_rank(case: Case, expect: Any, rank: int, size: int) -> Any:
    """What rank `rank` of `size` must see of `expect`: its own replicas' entries."""
    if case["area"] == "multi_worker":
        return expect["per_worker"][rank]
    if case["area"] == "coordinator" and rank > 0:
        return SERVER_TASK
    if size == 1:
        return expect
    n, k = case["replicas"], case["replicas"] // size
    if case["program"]["op"] == "distribute_dataset" and isinstance(expect.get("steps"), list):
        mine = slice(rank * k, (rank + 1) * k)
        expect = {**expect, "steps": [step[mine] for step in expect["steps"]]}
    return _View(n, rank * k, k, _reads_own_copy(case)).of(expect)


def _reads_own_copy(case: Case) -> bool:
    """Mirrored variables are read from the rank's first copy, which may differ from other ranks'."""
    return case["program"].get("synchronization") in ("AUTO", "ON_WRITE")


class _View:
    def __init__(self, n: int, first: int, k: int, reads_own_copy: bool) -> None:
        self._n, self._first, self._k = n, first, k
        self._reads_own_copy = reads_own_copy

    def of(self, expect: Any, field: str = "") -> Any:
        if isinstance(expect, list):
            parts = expect
            if field in _PER_REPLICA and len(expect) == self._n:
                parts = expect[self._first : self._first + self._k]
            return [self.of(part) for part in parts]
        if expect == self._n and field == "names":
            return self._k
        if self._k == 1 and expect == "Mirrored" and field in ("type", "result_type"):
            return "EagerTensor"  # one replica: a plain value, never wrapped
        if not isinstance(expect, dict):
            return expect
        seen = {
            name: self.of(child, field if name == "ok" else name) for name, child in expect.items()
        }
        if self._k == 1 and set(seen) == {"mirrored"}:
            return seen["mirrored"][0]
        if self._reads_own_copy and "cross_read" in seen and "ok" in seen["cross_read"]:
            seen["cross_read"] = {"ok": seen["components"][0]}
        return seen
