"""A replica on each core of a rank, by one program that all cores run: traced once, for any of them.

Inside `step` tensors have the shapes that one replica sees, and each core its own values; the sums over cores are
XLA's. What the program keeps from one step to the next (parameters, an optimizer's state, statistics) goes to XLA as
values that all cores share, though each core goes on with its own: nothing is exchanged of them. (GSPMD's manual
sharding, as of JAX's shard_map; torch_xla 2.9 has the parts.)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from mpistrat.values import ReadsAsArray, call_with_tensors
from mpistrat.xla.core_values import CoreValues
from mpistrat.xla.random_numbers import DRAWING, NOT_DRAWING, OwnRandomNumbers
from mpistrat.xla.runtime import INFERENCE_MODE, Runtime


class ReplicaCores:
    """Called by: the thread that runs the program.

    Args:
        runtime: with `spmd`.
        cores_of_ranks: the numbers, among all devices that XLA knows, of each rank's; as many of each, which are the
            replicas of a rank in their order.
        rank: this one, of those.

    Attributes:
        inside: whether a step is being recorded.
        values: of its cores.
    """

    def __init__(
        self, runtime: Runtime, cores_of_ranks: Sequence[Sequence[int]], rank: int = 0
    ) -> None:
        self._runtime = runtime
        groups, count = cores_of_ranks, len(cores_of_ranks[rank])
        if len(set().union(*groups)) < count * len(groups):
            # XLA knows of no other rank: all have the same numbers.
            groups = [groups[rank]]
        self.values = CoreValues(runtime, groups, count, lambda: self.inside)
        self._seen: _Seen | None = None
        self._taken: dict[int, _Taken] = {}  # by id of a tensor that the step was given

    @property
    def inside(self) -> bool:
        return self._seen is not None

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """`Runtime.step` around one replica's work, which all of them do."""
        own_numbers = OwnRandomNumbers(self._runtime.num_all_devices, self.values.deal_out)
        self._seen = seen = _Seen(self._take_in, self._runtime.random_state, own_numbers)
        self._runtime.around_cut = functools.partial(self._cut, seen)
        try:
            with self._runtime.graphs.step(name):
                try:
                    with seen:
                        yield
                except BaseException:
                    with contextlib.suppress(Exception):  # it is the step's own error that counts
                        self._let_go(seen.alive())
                    raise
                alive = seen.alive()
                self._let_go(alive)
            self._settle(alive)
        finally:
            self._runtime.around_cut = contextlib.nullcontext
            self._seen = None
            self._taken.clear()

    @contextlib.contextmanager
    def _cut(self, seen: _Seen, wanted: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around what computes all that was recorded, in the middle of a step."""
        seen.cuts += 1
        alive = [*seen.alive(), *wanted]
        self._let_go(alive)
        yield
        self._settle(alive)

    def _take_in(self, values: Sequence[torch.Tensor]) -> None:
        """Make the values that the step finds each core's own. Until here all cores are said to share them."""
        for tensor, is_pending in zip(values, self._runtime.are_pending(values), strict=True):
            if is_pending:
                continue
            with torch._C._DisableFuncTorch():  # vmap and grad transform what the program computes
                self._runtime.layouts.clear_layout(tensor)
                before = tensor.detach()
                tensor.data = self.values.each_its_own(before)
                self._taken[id(tensor)] = _Taken(before, *self._identity(tensor))

    def _let_go(self, alive: Sequence[torch.Tensor]) -> None:
        """Have values that the program still holds outlive the step's graph. What it only read is as before."""
        for tensor in itertools.compress(alive, self._runtime.are_pending(alive)):
            taken = self._taken.get(id(tensor))
            # Of what is no parameter, batch norm writes without a trace.
            is_parameter = tensor.is_leaf and tensor.requires_grad
            if taken and is_parameter and taken[1:] == self._identity(tensor):
                tensor.data = taken.before
            else:
                tensor.data = self.values.whole(tensor.detach(), tensor.shape)
        self._taken.clear()

    def _settle(self, values: Sequence[torch.Tensor]) -> None:
        """Computed, they are said to be nobody's: the next graph is to find them as the last one did."""
        for tensor, is_pending in zip(values, self._runtime.are_pending(values), strict=True):
            if not is_pending:
                self._runtime.layouts.clear_layout(tensor)

    def _identity(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Another one once a parameter has been written."""
        return self._runtime.number_of(tensor), tensor._version


class _Taken(NamedTuple):
    """A tensor that a step was given: as it was, and its identity (`ReplicaCores._identity`) since it was taken in."""

    before: torch.Tensor
    number: int
    version: int


class _Seen(TorchFunctionMode):
    """Which tensors torch's functions were given, and made.

    Args:
        take_in: gets them before each use.
        random_state: of the device.
        own_numbers: around functions that draw random numbers.
    """

    def __init__(
        self,
        take_in: Callable[[list[torch.Tensor]], None],
        random_state: Callable[[], int],
        own_numbers: OwnRandomNumbers,
    ) -> None:
        super().__init__()
        self._take_in, self._random_state = take_in, random_state
        self._own_numbers = own_numbers
        self._references: dict[int, TensorWeakRef] = {}
        self.cuts = 0  # how often something was computed in the middle of the step

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            raise RuntimeError(INFERENCE_MODE)  # as on one core, where torch_xla does
        if any(issubclass(kind, ReadsAsArray) for kind in types):
            with self:  # which sees the tensors then
                return call_with_tensors(func, args, kwargs)
        self._take_in(self._note((args, kwargs), 3))
        if func is torch.Tensor.backward:  # it adds to them, unseen
            self._take_in(self._gradients())
        if getattr(func, "__name__", "") in DRAWING:
            with self._own_numbers:
                result = func(*args, **kwargs)
        else:
            before, cuts = self._random_state(), self.cuts
            result = func(*args, **kwargs)
            if self._random_state() != before and self.cuts == cuts:  # a cut changes it, too
                raise NotImplementedError(NOT_DRAWING.format(func=func))
        self._note(result, 2)
        return result

    def _note(self, value: Any, depth: int) -> list[torch.Tensor]:
        """Returns: the tensors among `value`."""
        tensors: list[torch.Tensor] = []
        if isinstance(value, torch.Tensor):
            while torch._C._functorch.is_functorch_wrapped_tensor(value):
                value = torch._C._functorch.get_unwrapped(value)
            if value.device.type == "xla":
                tensors.append(value)
                known = self._references.get(id(value))
                if known is None or known() is not value:
                    # The place of a dead one goes, too: the order must be the same in each step, as it is in the graph.
                    self._references.pop(id(value), None)
                    self._references[id(value)] = TensorWeakRef(value)
        elif depth and isinstance(value, (dict, list, tuple)):
            for child in value.values() if isinstance(value, dict) else value:
                tensors += self._note(child, depth - 1)
        return tensors

    def alive(self) -> list[torch.Tensor]:
        """Those that the program still has, and their gradients."""
        return list({id(t): t for t in (*self._held(), *self._gradients())}.values())

    def _held(self) -> list[torch.Tensor]:
        return [t for reference in self._references.values() if (t := reference()) is not None]

    def _gradients(self) -> list[torch.Tensor]:
        return [t.grad for t in self._held() if t.is_leaf and t.grad is not None]
