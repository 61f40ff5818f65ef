"""Random numbers in a program that several cores run: each draws its own.

XLA's partitioner ends the process where what makes random numbers is a core's own. So they are drawn for all cores
at once, outside of what is each one's own, and dealt out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Called as a word of Python's syntax.
_RANDOM_FROM, _RANDOM_FROM_ = (getattr(op, "from") for op in (aten.random, aten.random_))

# What makes a tensor of random numbers, as what fills one: (shape and dtype as of the first argument, how to fill it).
_LIKE: dict[Any, Callable[..., torch.Tensor]] = {
    aten.bernoulli.p: lambda like, p, **_: _empty(like).bernoulli_(p),
    aten.bernoulli.default: lambda like, **_: (_empty(like).uniform_() < like).to(like.dtype),
    aten.rand_like.default: lambda like, **kwargs: _empty(like, **kwargs).uniform_(),
    aten.randn_like.default: lambda like, **kwargs: _empty(like, **kwargs).normal_(),
    aten.exponential.default: lambda like, rate=1.0, **_: _empty(like).exponential_(rate),
    aten.uniform.default: lambda like, *limits, **_: _empty(like).uniform_(*limits),
    aten.normal_functional.default: lambda like, *of, **_: _empty(like).normal_(*of),
    aten.random.default: lambda like, **_: _empty(like).random_(),
    aten.random.to: lambda like, high, **_: _empty(like).random_(high),
    _RANDOM_FROM: lambda like, low, high, **_: _empty(like).random_(low, high),
    aten.rand.default: lambda size, **kwargs: _new(size, **kwargs).uniform_(),
    aten.randn.default: lambda size, **kwargs: _new(size, **kwargs).normal_(),
    aten.randint.default: lambda high, size, **kwargs: _integers(size, 0, high, **kwargs),
    aten.randint.low: lambda low, high, size, **kwargs: _integers(size, low, high, **kwargs),
    aten.randint_like.default: lambda like, high, **kwargs: _empty(like, **kwargs).random_(0, high),
    aten.randint_like.low_dtype: lambda like, low, high, **kwargs: _empty(like, **kwargs).random_(
        low, high
    ),
    aten.normal.Tensor_Tensor: lambda mean, std, **_: mean + std * _empty(mean + std).normal_(),
    aten.normal.Tensor_float: lambda mean, std=1.0, **_: mean + std * _empty(mean).normal_(),
    aten.normal.float_Tensor: lambda mean, std, **_: mean + std * _empty(std).normal_(),
    aten.normal.float_float: lambda mean, std, size, **kwargs: _new(size, **kwargs).normal_(
        mean, std
    ),
}
# The functions of torch, by name, inside which that is done.
DRAWING = frozenset(
    {
        *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "random_"),
        *("normal", "normal_", "uniform_", "exponential_", "bernoulli", "bernoulli_"),
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d"),
        *("alpha_dropout", "feature_alpha_dropout", "gumbel_softmax"),
        *("scaled_dot_product_attention", "multi_head_attention_forward"),
        *("kaiming_uniform_", "kaiming_normal_"),
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


def _empty(like: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)


def _new(size: Any, *, device: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty(size, device=device, **kwargs)


def _integers(
    size: Any, low: int, high: int, dtype: torch.dtype | None = None, **kwargs: Any
) -> torch.Tensor:
    return _new(size, dtype=dtype or torch.int64, **kwargs).random_(low, high)


class OwnRandomNumbers(TorchDispatchMode):
    """Around a function of torch that draws random numbers; what it makes inside has no views that write into it.

    Args:
        count: of cores.
        deal_out: of a tensor with a row for each core, its own to each: without the first dimension.
    """

    def __init__(self, count: int, deal_out: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._count, self._deal_out = count, deal_out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _is_on_xla(args, kwargs):
            return func(*args, **kwargs)
        if func in _LIKE:
            with self:
                return _LIKE[func](*args, **kwargs)
        if func not in _FILLING:
            raise NotImplementedError(NOT_DRAWING.format(func=func))
        filled, *others = args
        all_cores = torch.empty(
            (self._count, *filled.shape), dtype=filled.dtype, device=filled.device
        )
        return filled.copy_(self._deal_out(func(all_cores, *others, **kwargs)))


def _is_on_xla(args: Any, kwargs: Any) -> bool:
    devices = [a.device for a in args if isinstance(a, torch.Tensor)] or [kwargs.get("device")]
    return devices[0] is not None and torch.device(devices[0]).type == "xla"
