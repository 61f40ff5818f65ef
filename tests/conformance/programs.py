"""The named programs of `run` and `merge_call`: the tables of golden/README.md, in this project's terms."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NoReturn

import mpistrat as ms
from conformance.stage import Stage, ctx, replica_id, type_name

_NT = collections.namedtuple("_NT", ["x", "y"])


def _throw(error: Exception) -> NoReturn:
    raise error


def run_programs(stage: Stage) -> dict[str, Callable[[], Any]]:
    t, rid = stage.array, replica_id

    def on_last(error: Exception) -> Any:
        if rid() == ctx().num_replicas_in_sync - 1:
            raise error
        return t(1.0)

    def scope_inside() -> int:
        with ms.get_strategy().scope():
            return 1

    def flags() -> dict[str, bool]:
        return {
            "in_cross": ms.in_cross_replica_context(),
            "has_strategy": ms.has_strategy(),
            "ctx_is_none": ctx() is None,
        }

    return {
        "return_none": lambda: None,
        "return_same_py_int": lambda: 7,
        "return_replica_py_int": rid,
        "return_replica_big_py_int": lambda: 100000 + rid(),
        "return_same_str": lambda: "a",
        "return_equal_fresh_tensors": lambda: t(1.0),
        "return_replica_tensor": lambda: t(1.0 + rid()),
        "return_replica_id_in_sync_group": lambda: ctx().replica_id_in_sync_group,
        "return_num_replicas": lambda: ctx().num_replicas_in_sync,
        "return_tuple": lambda: (t(1.0 + rid()), 3),
        "return_list": lambda: [t(1.0 + rid()), t([2.0])],
        "return_dict": lambda: {"b": t(1.0 + rid()), "a": rid()},
        "return_namedtuple": lambda: _NT(t(1.0 + rid()), 5),
        "return_nested": lambda: {"a": [t(rid(), "int32"), (None, 4)]},
        "return_empty_list": lambda: [],
        "return_empty_tuple": lambda: (),
        "return_ragged": lambda: t([0.0] * (rid() + 1)),
        "return_replica_dependent_list_len": lambda: [t(1.0)] * (rid() + 1),
        "return_replica_dependent_tuple_len": lambda: (t(1.0),) * (rid() + 1),
        "return_replica_dependent_keys": lambda: {f"k{rid()}": t(1.0)},
        "return_list_on_0_tensor_on_others": lambda: [t(1.0)] if rid() == 0 else t(1.0),
        "return_tensor_on_0_list_on_others": lambda: t(1.0) if rid() == 0 else [t(1.0)],
        "return_none_on_0": lambda: None if rid() == 0 else t(1.0),
        "raise_value_error_everywhere": lambda: _throw(ValueError("x")),
        "raise_on_last_replica": lambda: on_last(KeyError("x")),
        "return_flags": flags,
        "call_run_inside_run": lambda: ms.get_strategy().run(lambda: t(1.0)),
        "enter_scope_inside_run": scope_inside,
    }


Merge = tuple[Callable[[Any, Any], Any], Callable[[], Any]]


def merge_programs(stage: Stage) -> dict[str, Merge]:
    """The merge function, and what each replica passes to it."""
    t, rid = stage.array, replica_id

    def flags(strategy: Any, _: Any) -> dict[str, bool]:
        return {
            "in_cross": ms.in_cross_replica_context(),
            "ctx_none": ctx() is None,
            "same_strategy": strategy is ms.get_strategy(),
        }

    def same_on_all() -> Any:
        return t(1)

    def its_own() -> Any:
        return t(1 + rid())

    return {
        "reduce_sum": (lambda s, v: s.reduce("SUM", v, axis=None), its_own),
        "reduce_mean": (lambda s, v: s.reduce("MEAN", v, axis=None), its_own),
        "return_constant": (lambda s, v: 11, same_on_all),
        "return_none": (lambda s, v: None, same_on_all),
        "return_operand": (lambda s, v: v, its_own),
        "return_local_results_tuple": (lambda s, v: s.experimental_local_results(v), its_own),
        "return_arg_type_name": (lambda s, v: type_name(v), its_own),
        "arg_type_same_py_int": (lambda s, v: type_name(v), lambda: 3),
        "arg_type_diff_py_int": (lambda s, v: type_name(v), rid),
        "arg_type_nested": (
            lambda s, v: [type_name(v["a"]), type_name(v["b"][0])],
            lambda: {"a": t(rid()), "b": (5,)},
        ),
        "flags": (flags, same_on_all),
        "run_inside_merge": (lambda s, v: s.run(lambda: t(5 + rid())), same_on_all),
        "merge_call_inside_merge": (lambda s, v: ctx().merge_call(lambda s2: 1), same_on_all),
        "raise_in_merge": (lambda s, v: _throw(KeyError("m")), same_on_all),
        # Of the runs with several workers:
        "len(local_results(v))": (
            lambda s, v: len(s.experimental_local_results(v)),
            its_own,
        ),
    }
