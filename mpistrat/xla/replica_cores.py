"""Runs a replica on each core of a rank. All cores run one program; the function is traced once for all of them.

Inside `step`, tensors have the shapes of one replica, and each core has its own values. XLA sums over the cores.
Some tensors stay from step to step: parameters, an optimizer's state, running statistics. Between steps, XLA takes each
of these tensors for one tensor with equal copies on all cores. In fact each core continues with its own value, and XLA
exchanges no values. (This is GSPMD's manual sharding, as in JAX's shard_map; torch_xla 2.9 has the parts.)
"""

from __future__ import annotations

import contextlib
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
    """Records steps that run one replica on each core of this rank.

    A step is one call of the function that a program gives to `run`.
    Called by: the thread that runs the program.
    Args:
        runtime: the process's XLA runtime; one program runs on all of its devices (`spmd`).
        cores_of_ranks: for each rank, the numbers of its cores among all devices that XLA knows. Core i of a rank runs
            the rank's replica i. All ranks have equally many cores.
        rank: this rank's index in `cores_of_ranks`.

    Attributes:
        inside: whether a step is being recorded.
        values: spreads, sums and reads the values of this rank's cores.
    """

    def __init__(
        self, runtime: Runtime, cores_of_ranks: Sequence[Sequence[int]], rank: int = 0
    ) -> None:
        self._runtime = runtime
        groups = cores_of_ranks
        count = len(cores_of_ranks[rank])
        if len(set().union(*groups)) < count * len(groups):
            # XLA connects no ranks: every rank's cores have the same numbers.
            groups = [groups[rank]]
        self.values = CoreValues(runtime, groups, count, lambda: self.inside)
        self.inside = False
        self._taken: dict[int, _Taken] = {}  # by `id()` of each tensor that the step has taken in

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Return a context manager around one replica's work. At its end, all cores start the graph that was recorded.

        Args: name: the graph's name in torch_xla's reports.
        Raises: RuntimeError, with `EARLY_READ` in its text, if the block reads a tensor's value.
        """
        own_numbers = OwnRandomNumbers(self._runtime.num_all_devices, self.values.deal_out)
        seen = _Seen(self._take_in, self._runtime.random_state, own_numbers)
        self._runtime.around_cut = lambda wanted: self._cut(seen, wanted)
        self.inside = True
        try:
            with self._runtime.graphs.step(name):
                try:
                    with seen:
                        yield
                except BaseException:
                    with contextlib.suppress(Exception):  # the caller must see the step's own error
                        self._let_go(seen.alive())
                    raise
                alive = seen.alive()
                self._let_go(alive)
            self._settle(alive)
        finally:
            self._runtime.around_cut = contextlib.nullcontext
            self.inside = False
            self._taken.clear()

    @contextlib.contextmanager
    def _cut(self, seen: _Seen, wanted: Sequence[torch.Tensor]) -> Iterator[None]:
        """Return a context manager around a computation in the middle of a step, for `Runtime.around_cut`.

        It gives the tensors that the program holds to XLA as shared by all cores, and removes their layouts afterwards.
        Args:
            seen: the tensors of the step.
            wanted: the tensors whose values are read.
        """
        seen.cuts += 1
        alive = [*seen.alive(), *wanted]
        self._let_go(alive)
        yield
        self._settle(alive)

    def _take_in(self, values: Sequence[torch.Tensor]) -> None:
        """Turn, in place, each computed tensor that a step uses into one with each core's own value.

        Before, XLA took the tensor for shared by all cores. Tensors that are recorded and not computed do not change.
        """
        for tensor, is_pending in zip(values, self._runtime.are_pending(values), strict=True):
            if is_pending:
                continue
            with torch._C._DisableFuncTorch():  # vmap and grad must not transform these operations
                self._runtime.layouts.clear_layout(tensor)
                before = tensor.detach()
                tensor.data = self.values.each_its_own(before)
                self._taken[id(tensor)] = _Taken(before, *self._identity(tensor))

    def _let_go(self, alive: Sequence[torch.Tensor]) -> None:
        """Turn, in place, the tensors that the program still holds back into tensors that XLA takes for shared.

        A parameter that the step has only read gets back the data from before the step.
        """
        for tensor, is_pending in zip(alive, self._runtime.are_pending(alive), strict=True):
            if not is_pending:
                continue
            taken = self._taken.get(id(tensor))
            # Only for parameters: torch does not notice when batch norm writes its running statistics.
            is_parameter = tensor.is_leaf and tensor.requires_grad
            if taken and is_parameter and taken[1:] == self._identity(tensor):
                tensor.data = taken.before
            else:
                tensor.data = self.values.whole(tensor.detach(), tensor.shape)
        self._taken.clear()

    def _settle(self, values: Sequence[torch.Tensor]) -> None:
        """Remove the layouts of computed tensors among `values`, so that the next graph's inputs have none either."""
        for tensor, is_pending in zip(values, self._runtime.are_pending(values), strict=True):
            if not is_pending:
                self._runtime.layouts.clear_layout(tensor)

    def _identity(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return (XLA's tensor number, torch's version). The pair changes when torch writes the tensor."""
        return self._runtime.number_of(tensor), tensor._version


class _Taken(NamedTuple):
    """A tensor that a step has taken in: given, by `_take_in`, each core's own value.

    Attributes:
        before: the tensor's data from before, that XLA takes for shared by all cores.
        number, version: XLA's tensor number and torch's version right afterwards. If both are the same at the step's
            end, the step has only read the tensor.
    """

    before: torch.Tensor
    number: int
    version: int


class _Seen(TorchFunctionMode):
    """A torch function mode that remembers the XLA tensors of a step: arguments and results of torch's functions.

    Args:
        take_in: is called with a function's XLA tensors before the function runs.
        random_state: returns the state of XLA's random-number generator.
        own_numbers: a mode that is entered around functions that draw random numbers.
    Raises: NotImplementedError if a function outside `random_numbers.DRAWING` draws random numbers; RuntimeError inside
        torch.inference_mode().
    """

    def __init__(
        self,
        take_in: Callable[[list[torch.Tensor]], None],
        random_state: Callable[[], int],
        own_numbers: OwnRandomNumbers,
    ) -> None:
        super().__init__()
        self._take_in = take_in
        self._random_state = random_state
        self._own_numbers = own_numbers
        self._references: dict[int, TensorWeakRef] = {}
        self.cuts = 0  # how often something was computed in the middle of the step

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            raise RuntimeError(INFERENCE_MODE)  # with one core torch_xla raises this error
        if any(issubclass(kind, ReadsAsArray) for kind in types):
            with self:  # so that this mode sees the tensors of the call
                return call_with_tensors(func, args, kwargs)
        self._take_in(self._note((args, kwargs), 3))
        if func is torch.Tensor.backward:  # adds to gradients, and no torch function shows it
            self._take_in(self._gradients())
        if getattr(func, "__name__", "") in DRAWING:
            with self._own_numbers:
                result = func(*args, **kwargs)
        else:
            before = self._random_state()
            cuts = self.cuts
            result = func(*args, **kwargs)
            if self._random_state() != before and self.cuts == cuts:  # a cut also changes the state
                raise NotImplementedError(NOT_DRAWING.format(func=func))
        self._note(result, 2)
        return result

    def _note(self, value: Any, depth: int) -> list[torch.Tensor]:
        """Remember the XLA tensors in `value`, and return a list of them.

        Args: depth: how many nested dicts, lists and tuples are searched; deeper tensors are not found.
        """
        tensors: list[torch.Tensor] = []
        if isinstance(value, torch.Tensor):
            while torch._C._functorch.is_functorch_wrapped_tensor(value):
                value = torch._C._functorch.get_unwrapped(value)
            if value.device.type == "xla":
                tensors.append(value)
                known = self._references.get(id(value))
                if known is None or known() is not value:
                    # Another tensor had this id and is gone. Its entry is removed, so that the new tensor comes last in
                    # the dict: the tensors must have the same order in each step.
                    self._references.pop(id(value), None)
                    self._references[id(value)] = TensorWeakRef(value)
        elif depth and isinstance(value, (dict, list, tuple)):
            if isinstance(value, dict):
                value = value.values()
            for child in value:
                tensors += self._note(child, depth - 1)
        return tensors

    def alive(self) -> list[torch.Tensor]:
        """Return the remembered tensors that the program still holds, and the gradients of leaf tensors among them.

        Each tensor occurs once; the order is the same in each step.
        """
        tensors = self._held() + self._gradients()
        by_id = {id(tensor): tensor for tensor in tensors}
        return list(by_id.values())

    def _held(self) -> list[torch.Tensor]:
        return [t for reference in self._references.values() if (t := reference()) is not None]

    def _gradients(self) -> list[torch.Tensor]:
        return [leaf.grad for leaf in self._held() if leaf.is_leaf and leaf.grad is not None]
