"""How often steps were compiled, and for which shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from mpistrat import arrays, nest
from mpistrat.machine.notices import tell
from mpistrat.values import select_replica

# The first call makes an optimizer's state, which the second finds: each is a graph of its own. What was brought to the
# device, or was read, between two calls may be another kind of input to one more.
_EXPECTED_CALLS = 3


@dataclasses.dataclass
class Compiled:
    """
    Attributes:
        step: the function's name.
        code: which function of that name, or which class of callable objects.
        shapes: of the arrays among its arguments, such as "float32[64,1,8,8]".
        graphs: compiled for them, in `calls` calls; 0 where XLA had them all, of another strategy's steps.
    """

    step: str
    code: object
    shapes: tuple[str, ...]
    graphs: int = 0
    calls: int = 0


def name_of(fn: Callable[..., Any]) -> str:
    """The name of a step, for people."""
    fn = _unwrapped(fn)
    return getattr(fn, "__qualname__", type(fn).__name__)


def _code_of(fn: Callable[..., Any]) -> object:
    """The same object in each call, though a lambda or a partial is made anew; of a callable object its class."""
    fn = _unwrapped(fn)
    return getattr(fn, "__code__", type(fn))


def _unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


class Compilations:
    """Those of one strategy on this rank. A new shape is told of, and a step that is compiled without one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.all: list[Compiled] = []
        self._of_step: dict[tuple[str, object], dict[tuple[str, ...], Compiled]] = {}
        self._known: set[tuple[object, ...]] = set()  # what steps were called with

    def note(self, fn: Callable[..., Any], arguments: Any, graphs: int) -> None:
        """A call of `fn` with `arguments`, which may hold distributed values, has compiled `graphs` graphs, or none."""
        code = _code_of(fn)
        call = (code, *map(_kind_of, nest.flatten(arguments)))
        if not graphs and call in self._known:
            return  # as nearly all calls, each of which pays for what is done up to here
        self._known.add(call)
        shapes = tuple(map(_shape, nest.flatten(select_replica(0, arguments))))
        compiled = self._with_shapes(name_of(fn), code, shapes, tells=graphs > 0)
        if graphs:
            compiled.graphs += graphs
            compiled.calls += 1
            if compiled.calls == _EXPECTED_CALLS + 1:
                tell(
                    f"rank {self._rank}: {compiled.step} was compiled in {compiled.calls} calls though no argument "
                    "changed its shape: something in it is not the same in each call, such as a branch on a Python "
                    "value, or a tensor whose shape it does not get as an argument"
                )

    def _with_shapes(
        self, step: str, code: object, shapes: tuple[str, ...], tells: bool
    ) -> Compiled:
        """The entry for these shapes. Args: tells: whether a new entry of a known step is told of."""
        known = self._of_step.setdefault((step, code), {})
        if shapes not in known:
            if known and tells:
                tell(self._new_shape(step, next(reversed(known)), shapes))
            known[shapes] = Compiled(step, code, shapes)
            self.all.append(known[shapes])
        return known[shapes]

    def _new_shape(self, step: str, before: tuple[str, ...], shapes: tuple[str, ...]) -> str:
        changes = [
            f"argument array {i} is {new}, and was {old}"
            for i, (old, new) in enumerate(zip(before, shapes, strict=False))
            if old != new
        ]
        if len(before) != len(shapes):
            changes = [f"it got {len(shapes)} arrays, and had got {len(before)}"]
        return (
            f"rank {self._rank}: {step} was compiled again: {'; '.join(changes)}. Each new shape is compiled once; a "
            "smaller last batch is left out with DataLoader(drop_last=True)"
        )

    def explain(self) -> str:
        """A line for each step and its shapes, for people."""
        return "\n".join(
            f"{compiled.step}: {_number_of(compiled.graphs)} for "
            f"{', '.join(compiled.shapes) or 'no arrays'}"
            for compiled in self.all
        )


def _number_of(graphs: int) -> str:
    few = {0: "no graph that was not compiled before", 1: "1 graph"}
    return few.get(graphs, f"{graphs} graphs")


def _kind_of(leaf: Any) -> object:
    """What a graph depends on: of a number, its type."""
    leaf = select_replica(0, leaf)
    return (leaf.shape, leaf.dtype) if arrays.is_array(leaf) else type(leaf)


def _shape(leaf: Any) -> str:
    return arrays.described(leaf) if arrays.is_array(leaf) else type(leaf).__name__
