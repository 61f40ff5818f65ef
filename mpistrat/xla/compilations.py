"""Counts the XLA compilations of each step, by the shapes of its arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from mpistrat import arrays, nest
from mpistrat.machine.notices import tell
from mpistrat.values import select_replica

# The first call of a step creates the optimizer's state, and the second call has it as an input, so each compiles a
# graph. A third graph is also normal: a tensor that the program moved or read between two calls is another kind of
# input.
_EXPECTED_CALLS = 3

_Shapes = tuple[str, ...]  # of the leaves of a step's arguments


@dataclasses.dataclass
class Compiled:
    """The compilations of one step for one set of argument shapes.

    Attributes:
        step: the function's name.
        code: the function's code object, or a callable object's class; distinguishes functions of one name.
        shapes: for each leaf of the arguments, an array's dtype and shape, such as "float32[64,1,8,8]", or the name of
            any other leaf's type.
        graphs: number of graphs that XLA compiled for these shapes; 0 if another strategy's steps had compiled them.
        calls: number of calls that compiled a graph.
    """

    step: str
    code: object
    shapes: _Shapes
    graphs: int = 0
    calls: int = 0


def name_of(fn: Callable[..., Any]) -> str:
    """Return a step's name for messages: the function's `__qualname__`, or the class name of a callable object.

    For a `functools.partial`, it is the name of the function inside.
    """
    fn = _unwrapped(fn)
    return getattr(fn, "__qualname__", type(fn).__name__)


def _code_of(fn: Callable[..., Any]) -> object:
    """Return the function's code object, so that a lambda that is made anew is the same step.

    For a callable object, return its class.
    """
    fn = _unwrapped(fn)
    return getattr(fn, "__code__", type(fn))


def _unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


class Compilations:
    """Counts the XLA compilations of one strategy's steps on this rank.

    Prints a line when a known step compiles for new shapes, and when a step has compiled in a fourth call for the same
    shapes.

    Attributes:
        all: an entry for each step and set of argument shapes, in the order of their first calls.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.all: list[Compiled] = []
        self._of_step: dict[object, dict[_Shapes, Compiled]] = {}  # by (step, code)
        # (code, kind of each argument) of the calls so far
        self._known: set[tuple[object, ...]] = set()

    def note(self, fn: Callable[..., Any], arguments: Any, graphs: int) -> None:
        """Count one call of a step, and print a line if the call compiled for new shapes or in a fourth call.

        Called by: `RecordedSteps`, after each call of a step.
        Args:
            fn: the step: the function that the program gave to `run`.
            arguments: the function's arguments, a nest; leaves may be distributed values.
            graphs: number of graphs that XLA compiled in this call; 0 if none.
        """
        code = _code_of(fn)
        call = (code, *map(_kind_of, nest.flatten(arguments)))
        if not graphs and call in self._known:
            return  # nearly every call ends here, so the lines above must be fast
        self._known.add(call)
        leaves = nest.flatten(select_replica(0, arguments))
        shapes = tuple(_shape(leaf) for leaf in leaves)
        compiled = self._with_shapes(name_of(fn), code, shapes, tells=graphs > 0)
        if graphs:
            compiled.graphs += graphs
            compiled.calls += 1
            if compiled.calls == _EXPECTED_CALLS + 1:
                tell(
                    f"rank {self._rank}: {compiled.step} was compiled in {compiled.calls} calls though no argument "
                    "changed its shape. Pass tensors whose shapes change as arguments, and replace branches on "
                    "Python values that change from call to call (torch.where)"
                )

    def _with_shapes(self, step: str, code: object, shapes: _Shapes, tells: bool) -> Compiled:
        """Return the entry of a step for these shapes; make and keep a new entry if there is none.

        Args:
            step, code: the step's name, and its code object or class.
            tells: whether to print a line if the entry is new and the step has entries for other shapes.
        """
        known = self._of_step.setdefault((step, code), {})
        if shapes not in known:
            if known and tells:
                tell(self._new_shape(step, next(reversed(known)), shapes))
            known[shapes] = Compiled(step, code, shapes)
            self.all.append(known[shapes])
        return known[shapes]

    def _new_shape(self, step: str, before: _Shapes, shapes: _Shapes) -> str:
        changes = [
            f"argument array {i} is {new}, and was {old}"
            for i, (old, new) in enumerate(zip(before, shapes, strict=False))
            if old != new
        ]
        if len(before) != len(shapes):
            changes = [f"it got {len(shapes)} arrays, and had got {len(before)}"]
        return (
            f"rank {self._rank}: {step} was compiled again: {'; '.join(changes)}. Each new shape is compiled once; to "
            "leave out a smaller last batch, use DataLoader(drop_last=True)"
        )

    def explain(self) -> str:
        """Return a line of text for each step and set of shapes: the step's name, number of graphs, and the shapes.

        Returns: "" if no step was called.
        """
        few = {0: "no graph that was not compiled before", 1: "1 graph"}
        lines = []
        for compiled in self.all:
            graphs = few.get(compiled.graphs, f"{compiled.graphs} graphs")
            shapes = ", ".join(compiled.shapes) or "no arrays"
            lines.append(f"{compiled.step}: {graphs} for {shapes}")
        return "\n".join(lines)


def _kind_of(leaf: Any) -> object:
    """Return an array's (shape, dtype), because XLA compiles a graph for each; return the type of any other `leaf`.

    Of a distributed value, the first replica's component counts.
    """
    leaf = select_replica(0, leaf)
    if arrays.is_array(leaf):
        return leaf.shape, leaf.dtype
    return type(leaf)


def _shape(leaf: Any) -> str:
    if arrays.is_array(leaf):
        return arrays.described(leaf)
    return type(leaf).__name__
