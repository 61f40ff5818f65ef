"""Draws different random numbers on each core, in a program that several cores run.

XLA's partitioner ends the process if a random-number operation works on a value that differs between cores. So one
operation draws the numbers of all cores, a row for each core, and each core takes its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# `from` is a keyword of Python, so getattr is needed.
_RANDOM_FROM = getattr(aten.random, "from")
_RANDOM_FROM_ = getattr(aten.random_, "from")

# Names of the torch functions that draw their numbers for all cores at once.
DRAWING = frozenset(
    {
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "randint_like",
        "random_",
        "normal",
        "normal_",
        "uniform_",
        "exponential_",
        "bernoulli",
        "bernoulli_",
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
        "gumbel_softmax",
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
        "kaiming_uniform_",
        "kaiming_normal_",
    }
)
NOT_DRAWING = (
    "{func} draws random numbers in a way that a rank with several cores cannot: draw them with rand, randn, randint, "
    "uniform_, normal_, exponential_, bernoulli or dropout, or start one rank per core"
)
_FILLING = (
    aten.bernoulli_.float,
    aten.uniform_.default,
    aten.normal_.default,
    aten.exponential_.default,
    aten.random_.default,
    aten.random_.to,
    _RANDOM_FROM_,
)


_Fill = Callable[..., Tensor]  # a method that fills a tensor with random numbers


def _of_size(
    fill: _Fill, usual: torch.dtype | None, *args: Any, device: Any, **kwargs: Any
) -> Tensor:
    """Return a new tensor that `fill` has filled with random numbers.

    Args:
        usual: the tensor's dtype if `kwargs` has none; None is torch's default dtype.
        args: first arguments of `fill`, such as the range of the numbers; last the size of the tensor.
    """
    *limits, size = args
    kwargs["dtype"] = kwargs.get("dtype") or usual
    return fill(torch.empty(size, device=device, **kwargs), *limits)


def _bernoulli(like: Tensor, **_: Any) -> Tensor:
    return (_empty(like).uniform_() < like).to(like.dtype)


def _normal(mean: Any, std: Any = 1.0, **_: Any) -> Tensor:
    return mean + std * _empty(mean + std).normal_()


def _empty(like: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)


# For an operation that returns a tensor like its first argument: the method that fills this tensor.
_FILLED_LIKE: dict[Any, _Fill] = {
    aten.bernoulli.p: Tensor.bernoulli_,
    aten.rand_like.default: Tensor.uniform_,
    aten.randn_like.default: Tensor.normal_,
    aten.randint_like.default: Tensor.random_,
    aten.randint_like.low_dtype: Tensor.random_,
    aten.exponential.default: Tensor.exponential_,
    aten.uniform.default: Tensor.uniform_,
    aten.normal_functional.default: Tensor.normal_,
    aten.random.default: Tensor.random_,
    aten.random.to: Tensor.random_,
    _RANDOM_FROM: Tensor.random_,
}
# For an operation that returns a tensor of a size: the method that fills the tensor, and the dtype of a call that names
# none; None is torch's default dtype.
_FILLED_OF_SIZE: dict[Any, tuple[_Fill, torch.dtype | None]] = {
    aten.rand.default: (Tensor.uniform_, None),
    aten.randn.default: (Tensor.normal_, None),
    aten.randint.default: (Tensor.random_, torch.int64),
    aten.randint.low: (Tensor.random_, torch.int64),
    aten.normal.float_float: (Tensor.normal_, None),
}
# For any other operation that returns a new tensor of random numbers: the function to call instead.
_MAKING: dict[Any, Callable[..., Tensor]] = {
    aten.bernoulli.default: _bernoulli,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
}


class OwnRandomNumbers(TorchDispatchMode):
    """A torch dispatch mode that is entered around one torch function, so that each core draws its own random numbers.

    Each drawing operation on XLA tensors draws the numbers of all cores, and each core takes its row. The torch
    function must not write through views of tensors that it makes inside.

    Args:
        count: number of cores of all ranks.
        deal_out: takes a tensor of shape [count, …]; returns a tensor of one row that has, on each core, the core's
            row.
    Raises: NotImplementedError if an operation draws numbers in a way that this module does not know.
    """

    def __init__(self, count: int, deal_out: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._count = count
        self._deal_out = deal_out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _is_on_xla(args, kwargs):
            return func(*args, **kwargs)
        if func in _FILLING:
            filled, *others = args
            all_cores = torch.empty(
                (self._count, *filled.shape), dtype=filled.dtype, device=filled.device
            )
            return filled.copy_(self._deal_out(func(all_cores, *others, **kwargs)))
        with self:  # so that the new tensor is filled by an operation of `_FILLING`
            if func in _FILLED_LIKE:
                like, *limits = args
                return _FILLED_LIKE[func](_empty(like, **kwargs), *limits)
            if func in _FILLED_OF_SIZE:
                fill, usual = _FILLED_OF_SIZE[func]
                return _of_size(fill, usual, *args, **kwargs)
            if func in _MAKING:
                return _MAKING[func](*args, **kwargs)
        raise NotImplementedError(NOT_DRAWING.format(func=func))


def _is_on_xla(args: Any, kwargs: Any) -> bool:
    devices = [argument.device for argument in args if isinstance(argument, Tensor)]
    device = devices[0] if devices else kwargs.get("device")
    return str(device).startswith("xla")
