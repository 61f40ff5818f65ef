"""torch.optim on the arrays that a server keeps: each array's optimizer state lives once, beside it.

Nothing here communicates. A worker describes its optimizer by an `OptimizerRecipe`, once, and sends the numbers of its
param group along with each gradient, since schedulers change them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from mpistrat.arrays import dtype_name
from mpistrat.communicators.host_views import view_of
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.pytorch.elementwise_optimizers import why_not_elementwise

State = dict[str, Any]  # by name: NumPy arrays, those of no dimension included, and Python numbers

# How steps are computed is the server's business: a worker's may be those of a GPU, where `fused` and `capturable`
# need the parameter to lie. Fused on the CPU is one pass over memory: Adam takes a ninth of its time.
_HOW: Mapping[str, Any] = {
    "foreach": False,
    "fused": True,
    "capturable": False,
    "differentiable": False,
}
# In torch 2.13 fused SGD on the CPU leaves bfloat16 and float16 unchanged (pytorch issue 191763).
_FUSED = (torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerRecipe:
    """A torch optimizer of one param group, as a worker describes it to the servers; it can be pickled.

    Attributes:
        keywords: what the constructor is called with besides the parameters.
    """

    cls: type[Optimizer]
    keywords: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer, group: Mapping[str, Any]) -> OptimizerRecipe:
        """That of `group`, one of the optimizer's param groups.

        Raises: TypeError when the servers cannot make another one like it, or cannot step it.
        """
        kind = type(optimizer)
        closure = inspect.signature(kind.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TypeError(
                f"{kind.__name__}.step needs a closure, which servers cannot call; choose an optimizer that steps with "
                "a gradient alone"
            )
        keywords = _keywords_of(kind)
        unknown = keywords - group.keys()
        if unknown:
            raise TypeError(
                f"{kind.__name__} cannot be made on the servers: its param groups do not tell its constructor's "
                f"{', '.join(sorted(unknown))}; let it give them to Optimizer.__init__ as defaults"
            )
        numbers = hyperparameters(group)
        return cls(kind, {name: numbers[name] for name in keywords})

    def make(self, parameter: torch.Tensor) -> Optimizer:
        known = _keywords_of(self.cls)
        how = {name: value for name, value in _HOW.items() if name in known}
        if "fused" in how:
            how["fused"] = parameter.dtype in _FUSED
        make: Callable[..., Optimizer] = self.cls
        return make([parameter], **{**self.keywords, **how})


def _keywords_of(cls: type[Optimizer]) -> set[str]:
    """The constructor's, but for the parameters and `**others`."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    return {p.name for p in parameters if p.kind not in several}


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a param group holds besides parameters: plain numbers, also where it has tensors of one element."""
    skipped = ("params", "param_names")
    return {name: _plain(value) for name, value in group.items() if name not in skipped}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(_plain(part) for part in value) if isinstance(value, (tuple, list)) else value


class ServerOptimizer:
    """The steps of one array on a server, updated in place, and their state.

    Args:
        array: C-contiguous and writable: the server's memory.
        dtype: of `array`, gradients and state if NumPy lacks it: "bfloat16", of which arrays are int16 (see
            `host_views`). The array's own otherwise.
        shard: `array` is a part of a variable.
    Raises: TypeError for a `shard` when the optimizer does not update element by element.
    """

    def __init__(
        self,
        array: np.ndarray,
        recipe: OptimizerRecipe,
        *,
        dtype: str | None = None,
        shard: bool = False,
    ) -> None:
        if not array.flags.c_contiguous:
            raise ValueError(f"expected a C-contiguous array, got strides {array.strides}")
        self._layout = array.dtype
        whole = torch.from_numpy(array)
        self._dtype = whole.dtype if dtype is None else getattr(torch, dtype)
        self._whole = whole.view(self._dtype)
        self._cls = recipe.cls
        why = _why_not_by_part(recipe.cls)
        if shard and why:
            raise TypeError(f"a variable in shards cannot be stepped: {why}")
        self._why_no_rows = _why_no_rows(recipe.cls)
        # It steps the whole array, rows gathered from it, and others by turns.
        self._optimizer = recipe.make(self._whole)
        self._group = self._optimizer.param_groups[0]
        self._state: dict[str, Any] = self._optimizer.state[self._whole]
        self._optimizer.state.clear()

    def step(
        self, gradient: np.ndarray | IndexedSlices, hyperparameters: Mapping[str, Any]
    ) -> None:
        """Update the array by `gradient`, of its shape, or of some of its rows.

        A step by rows, whose indices may repeat, reads and writes those rows of the array and of its state only. All
        others stay as they are: neither weights nor moments decay there, as with torch.optim.SparseAdam and TensorFlow
        Addons' LazyAdam, and unlike a dense gradient with rows of zeros. One with no rows counts as a step, too; shards
        that all get each step compute what the whole array would.

        Args:
            hyperparameters: those of the worker's param group now.
        Raises: ValueError, TypeError, IndexError: the gradient does not fit; nothing is changed.
        """
        self.check(gradient)
        for name, value in hyperparameters.items():
            if name not in _HOW:
                self._group[name] = value
        if self._cls is torch.optim.SGD and self._whole.dtype in _FUSED:
            # Without these the other way is one pass, too, and takes a tenth less time.
            self._group["fused"] = bool(self._group["momentum"] or self._group["weight_decay"])
        if isinstance(gradient, IndexedSlices):
            self._step_rows(gradient)
        else:
            self._state = self._take(self._whole, self._tensor(gradient), self._state)

    def check(self, gradient: np.ndarray | IndexedSlices) -> None:
        """Raises: what `step` would."""
        shape = tuple(self._whole.shape)
        by_row = isinstance(gradient, IndexedSlices)
        values = gradient.values if isinstance(gradient, IndexedSlices) else gradient
        if values.dtype != self._layout:
            what = "the gradient's rows are" if by_row else "the gradient is"
            raise TypeError(f"{what} {values.dtype}, the array {dtype_name(self._whole)}")
        if not isinstance(gradient, IndexedSlices):
            if values.shape != shape:
                raise ValueError(
                    f"a gradient of shape {list(values.shape)} for an array of shape {list(shape)}"
                )
            if issubclass(self._cls, torch.optim.SparseAdam):
                raise TypeError("SparseAdam takes gradients of some rows, got one of the whole")
            return
        if self._why_no_rows:
            raise TypeError(f"a gradient of some rows cannot be applied: {self._why_no_rows}")
        if not shape or values.shape[1:] != shape[1:]:
            raise ValueError(
                f"rows of shape {list(values.shape[1:])} for an array of shape {list(shape)}"
            )
        outside = gradient.indices[(gradient.indices < 0) | (gradient.indices >= shape[0])]
        if len(outside):
            raise IndexError(f"row {outside[0]} of an array of {shape[0]} rows")

    def _step_rows(self, slices: IndexedSlices) -> None:
        index, gradient = self._summed(slices)
        rows = self._whole.index_select(0, index)
        state = {
            name: value.index_select(0, index) if self._is_by_row(value) else value
            for name, value in self._state.items()
        }
        state = self._take(rows, gradient, state)
        new = {
            name
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == rows.shape
        }
        for name, fill in self._initial(new - self._state.keys()).items():
            self._state[name] = self._full(fill)
        self._whole.index_copy_(0, index, rows)
        for name, value in state.items():
            if name in new:
                self._state[name].index_copy_(0, index, value)
            else:
                self._state[name] = value

    def _summed(self, slices: IndexedSlices) -> tuple[torch.Tensor, torch.Tensor]:
        """Each index once, in ascending order, and the sums of their rows."""
        values = self._tensor(slices.values)
        index = torch.from_numpy(np.asarray(slices.indices).astype(np.int64))
        index, inverse = torch.unique(index, return_inverse=True)
        sums = values.new_zeros((len(index), *values.shape[1:]))
        return index, sums.index_add_(0, inverse, values)

    def _take(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Step `parameter`, whose state is `state`. Returns: its state then."""
        if issubclass(self._cls, torch.optim.SparseAdam) and parameter is not self._whole:
            every = torch.arange(len(gradient)).unsqueeze(0)
            gradient = torch.sparse_coo_tensor(
                every, gradient, gradient.shape, is_coalesced=True, check_invariants=False
            )
        self._group["params"] = [parameter]
        self._optimizer.state[parameter] = state
        parameter.grad = gradient
        try:
            self._optimizer.step()
            return self._optimizer.state[parameter]
        finally:
            parameter.grad = None  # the memory is the caller's
            self._group["params"] = []
            self._optimizer.state.clear()

    def _initial(self, names: set[str]) -> dict[str, torch.Tensor]:
        """What `names` of the state are in a row at first: as a step by zero leaves them in a row of zeros."""
        if not names:
            return {}
        row = self._whole.new_zeros((1, *self._whole.shape[1:]))
        state = self._take(row, torch.zeros_like(row), {})
        return {name: state[name] for name in names}

    def _full(self, row: torch.Tensor) -> torch.Tensor:
        if row.any():
            return row.expand(self._whole.shape).clone()
        # Pages of NumPy's zeros take memory when they are written.
        zeros = np.zeros(self._whole.numel() * row.element_size(), np.uint8)
        return torch.from_numpy(zeros).view(row.dtype).view(self._whole.shape)

    def _is_by_row(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self._whole.shape

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """The memory of `array`; a copy if it is read-only, which torch does not know, or not C-contiguous."""
        if not (array.flags.writeable and array.flags.c_contiguous):
            array = array.copy()
        return torch.from_numpy(array).view(self._dtype)

    def state_dict(self) -> State:
        """The state: empty before the first step. Its arrays are the server's memory, which the next step changes."""
        return {
            name: view_of(value) if isinstance(value, torch.Tensor) else value
            for name, value in self._state.items()
            if value is not None
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a copy of `state`, one that `state_dict` gave for an array of this shape.

        Raises: ValueError when it is of another shape; nothing is changed.
        """
        loaded = {}
        for name, value in state.items():
            if not isinstance(value, np.ndarray):
                loaded[name] = value
                continue
            by_part = not _why_not_by_part(self._cls)
            if by_part and value.ndim and value.shape != tuple(self._whole.shape):
                raise ValueError(
                    f"the optimizer's {name} has shape {list(value.shape)}, its array {list(self._whole.shape)}"
                )
            tensor = torch.from_numpy(value.copy())
            loaded[name] = tensor.view(self._dtype) if value.dtype == self._layout else tensor
        self._state = loaded


def join_states(states: Sequence[State]) -> State:
    """The state of a whole array, from those of its consecutive shards.

    Counts of steps are those of the shard that took most. Raises: ValueError when shards have state of other names.
    """
    if len({frozenset(state) for state in states}) > 1:
        raise ValueError(
            f"the shards' optimizers have different state: {[sorted(state) for state in states]}"
        )
    ahead = max(states, key=lambda state: float(state.get("step", 0)))
    return {
        name: np.concatenate([state[name] for state in states]) if _is_split(value) else value
        for name, value in ahead.items()
    }


def split_state(state: State, rows: Sequence[int]) -> list[State]:
    """The state of each shard of an array, of as many rows as `rows` says, that has `state`. Arrays are views."""
    ends = np.cumsum(rows)
    return [
        {
            name: value[end - count : end] if _is_split(value) else value
            for name, value in state.items()
        }
        for count, end in zip(rows, ends, strict=True)
    ]


def _is_split(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim > 0


def _why_not_by_part(cls: type[Optimizer]) -> str:
    # Not among those known, since it takes sparse gradients alone.
    return "" if issubclass(cls, torch.optim.SparseAdam) else why_not_elementwise(cls)


def _why_no_rows(cls: type[Optimizer]) -> str:
    if issubclass(cls, torch.optim.ASGD):
        return "ASGD averages all of a parameter at every step; choose SGD"
    return _why_not_by_part(cls)
