"""torch.optim on a server's arrays: the server keeps one optimizer state for each array.

This file does not communicate. A worker describes its optimizer by an `OptimizerDefinition`, once. With each gradient
it sends the hyperparameters of its param group, because schedulers change them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Optimizer, SparseAdam

from mpistrat.arrays import Array, as_tensor, dtype_name, to_host
from mpistrat.communicators.host_views import as_buffer_of, view_of
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.pytorch.elementwise_optimizers import why_not_elementwise
from mpistrat.pytorch.gradients.values import as_sparse

Hyperparameters = Mapping[str, Any]  # by name
State = dict[str, Any]  # by name: NumPy arrays, also arrays without dimensions, and Python numbers

# The server chooses how to compute a step, because a worker's choice of `fused` and `capturable` may be for a GPU. On
# the CPU, fused is one pass over memory, and Adam takes a ninth of the time.
_HOW = {"foreach": False, "fused": True, "capturable": False, "differentiable": False}
# In torch 2.13 fused SGD on the CPU leaves bfloat16 and float16 unchanged (pytorch issue 191763).
_FUSED = (torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerDefinition:
    """A torch optimizer with one param group, as a worker describes it to the servers. It can be pickled.

    Attributes: keywords: the constructor's arguments besides the parameters.
    """

    cls: type[Optimizer]
    keywords: Hyperparameters

    @classmethod
    def of(cls, optimizer: Optimizer, group: Hyperparameters) -> OptimizerDefinition:
        """Return the definition of an optimizer of this class, with the arguments in `group`, one of its param groups.

        Raises: TypeError if `step` requires a closure, or the param group lacks an argument of the constructor.
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

    def make(self, parameter: Tensor) -> Optimizer:
        how = {**_HOW, "fused": parameter.dtype in _FUSED}
        known = _keywords_of(self.cls)
        chosen = {name: how[name] for name in how.keys() & known}
        make: Callable[..., Optimizer] = self.cls
        return make([parameter], **{**self.keywords, **chosen})


def _keywords_of(cls: type[Optimizer]) -> set[str]:
    """Return the names of the constructor's arguments, without the parameters, `*args` and `**kwargs`."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    return {p.name for p in parameters if p.kind not in several}


def hyperparameters(group: Hyperparameters) -> dict[str, Any]:
    """Return the values of a param group without its parameters and their names. Tensors become plain numbers."""
    skipped = ("params", "param_names")
    return {name: _plain(value) for name, value in group.items() if name not in skipped}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    return value


class ServerOptimizer:
    """Steps one array on a server in place, and keeps the optimizer state of the array.

    Args:
        array: C-contiguous and writable memory of the server.
        shard: whether `array` is one part of a split variable.
    Raises: ValueError if the array is not C-contiguous; TypeError for a shard if the optimizer does not update element
        by element.
    """

    def __init__(
        self, array: Array, definition: OptimizerDefinition, *, shard: bool = False
    ) -> None:
        self._whole = as_tensor(array)
        if not self._whole.is_contiguous():
            raise ValueError(f"expected a C-contiguous array, got strides {self._whole.stride()}")
        self._cls = definition.cls
        why = _why_not_by_part(definition.cls)
        if shard and why:
            raise TypeError(f"a variable in shards cannot be stepped: {why}")
        self._why_no_rows = _why_no_rows(definition.cls)
        # The optimizer steps different tensors in turn: the whole array, rows gathered from it, and a row of zeros.
        self._optimizer = definition.make(self._whole)
        self._group = self._optimizer.param_groups[0]
        self._state: State = self._optimizer.state[self._whole]
        self._optimizer.state.clear()

    def step(self, gradient: Array | IndexedSlices, hyperparameters: Hyperparameters) -> None:
        """Update the array in place by a gradient: of the whole array, or (`IndexedSlices`) of some of its rows.

        A step by rows reads and writes only these rows of the array and of its state; the indices may repeat. All other
        rows stay as they are: neither weights nor moments decay there, as with torch.optim.SparseAdam and TensorFlow
        Addons' LazyAdam, and unlike with a dense gradient that has rows of zeros. A gradient without rows counts as a
        step, too. If all shards of a variable get each step, they compute the same values as the whole array would.

        Raises: ValueError, TypeError or IndexError if the gradient does not fit; nothing is changed then.
        """
        self.check(gradient)
        group = self._group
        for name, value in hyperparameters.items():
            if name not in _HOW:
                group[name] = value
        if self._cls is SGD and self._whole.dtype in _FUSED:
            # Without momentum and weight decay, unfused SGD is one pass, too, and takes a tenth less time.
            group["fused"] = bool(group["momentum"] or group["weight_decay"])
        if isinstance(gradient, IndexedSlices):
            self._step_rows(gradient)
        else:
            whole = _tensor(gradient)
            self._state = self._take(self._whole, whole, self._state)

    def check(self, gradient: Array | IndexedSlices) -> None:
        """Check a gradient without using it.

        Raises: TypeError for another dtype, or a kind (rows or whole) that the optimizer cannot use; ValueError for
            another shape; IndexError for a row that does not exist.
        """
        if isinstance(gradient, IndexedSlices):
            self._check_rows(gradient)
            return
        self._check_dtype(gradient, "the gradient is")
        if gradient.shape != self._whole.shape:
            raise ValueError(
                f"a gradient of shape {list(gradient.shape)} for an array of shape {list(self._whole.shape)}"
            )
        if issubclass(self._cls, SparseAdam):
            raise TypeError("SparseAdam takes gradients of some rows, got one of the whole")

    def _check_rows(self, slices: IndexedSlices) -> None:
        values: Any = slices.values
        self._check_dtype(values, "the gradient's rows are")
        if self._why_no_rows:
            raise TypeError(f"a gradient of some rows cannot be applied: {self._why_no_rows}")
        shape = tuple(self._whole.shape)
        of_row = values.shape[1:]
        if not shape or of_row != shape[1:]:
            raise ValueError(f"rows of shape {list(of_row)} for an array of shape {list(shape)}")
        indices = slices.indices
        rows = shape[0]
        is_outside = (indices < 0) | (indices >= rows)
        outside = indices[is_outside]
        if len(outside):
            first = int(outside[0])
            raise IndexError(f"row {first} of an array of {rows} rows")

    def _check_dtype(self, values: Array, subject: str) -> None:
        got = dtype_name(values)
        expected = dtype_name(self._whole)
        if got != expected:
            raise TypeError(f"{subject} {got}, the array {expected}")

    def _step_rows(self, slices: IndexedSlices) -> None:
        values = _tensor(slices.values)
        index = torch.from_numpy(np.asarray(slices.indices).astype(np.int64))
        # Each index once, in ascending order, with the sum of its rows
        index, inverse = torch.unique(index, return_inverse=True)
        gradient = values.new_zeros((len(index), *values.shape[1:]))
        gradient.index_add_(0, inverse, values)
        rows = self._whole.index_select(0, index)
        before = {
            name: value.index_select(0, index) if _has_shape(value, self._whole) else value
            for name, value in self._state.items()
        }
        state = self._take(rows, gradient, before)
        by_row = {name: value for name, value in state.items() if _has_shape(value, rows)}
        new = by_row.keys() - self._state.keys()
        for name, fill in self._initial(new).items():
            self._state[name] = self._full(fill)
        self._whole.index_copy_(0, index, rows)
        for name, value in by_row.items():
            state[name] = self._state[name].index_copy_(0, index, value)
        self._state = state

    def _take(self, parameter: Tensor, gradient: Tensor, state: State) -> State:
        """Step `parameter` in place, with the optimizer state `state`. Returns: the state after the step."""
        if issubclass(self._cls, SparseAdam) and parameter is not self._whole:
            every = torch.arange(len(gradient), device=gradient.device)
            gradient = as_sparse(every, gradient, gradient.shape, is_coalesced=True)
        optimizer = self._optimizer
        self._group["params"] = [parameter]
        optimizer.state[parameter] = state
        parameter.grad = gradient
        try:
            optimizer.step()
            return optimizer.state[parameter]
        finally:
            parameter.grad = None  # the memory is the caller's
            self._group["params"] = []
            optimizer.state.clear()

    def _initial(self, names: set[str]) -> dict[str, Tensor]:
        """Return the values that rows without a step have in these state tensors, by name, in shape [1, ...].

        They are the state after a row of zeros was stepped with a gradient of zeros. {} for no names.
        """
        if not names:
            return {}
        row = self._whole.new_zeros((1, *self._whole.shape[1:]))
        state = self._take(row, torch.zeros_like(row), {})
        return {name: state[name] for name in names}

    def _full(self, row: Tensor) -> Tensor:
        if row.any():
            return row.expand(self._whole.shape).clone()
        # Pages of NumPy's zeros take no memory until a step writes them.
        nbytes = self._whole.numel() * row.element_size()
        zeros = np.zeros(nbytes, np.uint8)
        return torch.from_numpy(zeros).view(row.dtype).view(self._whole.shape)

    def state_dict(self) -> State:
        """Return the state, by name; {} before the first step.

        Its arrays are the server's own memory, and the next step changes them.
        """
        state = {}
        for name, value in self._state.items():
            if isinstance(value, Tensor):
                state[name] = view_of(to_host(value))
            elif value is not None:
                state[name] = value
        return state

    def load_state_dict(self, state: State) -> None:
        """Replace the state by a copy of `state`, a `state_dict()` of an array of the same shape.

        Raises: ValueError if an array of `state` has another shape; nothing is changed then.
        """
        loaded = dict(state)
        by_part = not _why_not_by_part(self._cls)
        shape = tuple(self._whole.shape)
        for name, value in state.items():
            if not isinstance(value, np.ndarray):
                continue
            if by_part and value.ndim and value.shape != shape:
                raise ValueError(
                    f"the optimizer's {name} has shape {list(value.shape)}, its array {list(shape)}"
                )
            like = self._whole
            if value.dtype != view_of(like).dtype:
                like = torch.from_numpy(value)
            loaded[name] = as_buffer_of(like, value.copy())
        self._state = loaded


def _tensor(array: Array) -> Tensor:
    """Return `array` as a tensor in the same memory, or a copy if it is not C-contiguous or read-only.

    Torch has no read-only tensors.
    """
    if isinstance(array, np.ndarray) and not array.flags.carray:
        array = array.copy()
    return as_tensor(array).contiguous()


def _has_shape(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape


def join_states(states: Sequence[State]) -> State:
    """Join the states of an array's consecutive shards to the state of the whole array.

    Numbers, such as the count of steps, come from the shard with the most steps.

    Raises: ValueError if the shards' states have different names.
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
    """Split the state of a whole array into the states of its shards, in views: the inverse of `join_states`.

    Args: rows: the number of rows of each shard.
    """
    shards = []
    first = 0
    for count in rows:
        end = first + count
        shard = {}
        for name, value in state.items():
            if _is_split(value):
                shard[name] = value[first:end]
            else:
                shard[name] = value
        shards.append(shard)
        first = end
    return shards


def _is_split(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim > 0


def _why_not_by_part(cls: type[Optimizer]) -> str:
    # SparseAdam takes only sparse gradients, so `why_not_elementwise` does not know it.
    if issubclass(cls, SparseAdam):
        return ""
    return why_not_elementwise(cls)


def _why_no_rows(cls: type[Optimizer]) -> str:
    if issubclass(cls, ASGD):
        return "ASGD averages all of a parameter at every step; choose SGD"
    return _why_not_by_part(cls)
