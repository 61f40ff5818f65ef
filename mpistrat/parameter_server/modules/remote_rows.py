"""Embeddings with their rows on servers: a forward pulls the rows that it looks up, and no rank has all rows.

The weight remains the program's `Parameter`, without memory of its own. `functional.embedding` and `embedding_bag` get
a small tensor of the rows that they look up, and backward puts a sparse gradient into `.grad`, as
`nn.Embedding(sparse=True)` does. Every other computation with the weight pulls a copy of all rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.utils import _pytree as pytree

from mpistrat.parameter_server.modules.remote_tensors import RemoteTensor
from mpistrat.pytorch import hooks
from mpistrat.pytorch.gradients.values import as_sparse

_Operation = Callable[..., Any]
_LOOKUPS = (functional.embedding, functional.embedding_bag)
# Attributes and methods of a tensor that do not need its numbers.
_ABOUT = frozenset(
    (
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "__len__",
        "__hash__",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "get_device",
        "untyped_storage",
        "is_contiguous",
        "stride",
        "storage_offset",
        "requires_grad_",
        "backward",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
    )
)
_NUMBERS = tuple(getattr(Tensor, name) for name in ("data", "T", "mT", "H", "mH", "real", "imag"))


def looks_up(module: nn.Module) -> bool:
    """Whether the module is an embedding without `max_norm`, so that it reads only the rows that it looks up."""
    embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return embeds and module.max_norm is None


def leave_on_servers(parameter: Tensor, remote: RemoteTensor) -> None:
    """Free the parameter's memory and turn it into a `RemoteRows`, whose values are on the servers alone."""
    hooks.before_export(_refuse_rows)
    shape = parameter.shape
    zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    parameter.data = zero.expand(shape)
    parameter.__class__ = RemoteRows
    assert isinstance(parameter, RemoteRows)
    parameter.remote = remote
    remote.rows_only = True


class RemoteRows(Parameter):
    """A parameter without memory: a lookup pulls the rows that it needs from the servers, any other use all rows.

    Made by: `leave_on_servers`, which changes a parameter's class.
    """

    remote: RemoteTensor

    @classmethod
    def __torch_function__(
        cls, func: _Operation, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _LOOKUPS:
                return _look_up(func, args, kwargs)
            name = func.__name__
            if name in ("__get__", "__set__", "__delete__"):
                needs_rows = getattr(func, "__self__", None) in _NUMBERS
                if name == "__set__" and needs_rows:
                    raise RuntimeError(
                        "an embedding whose rows are on servers cannot be moved, or given other memory. Do that inside "
                        "strategy.scope()"
                    )
            else:
                needs_rows = name not in _ABOUT
            if needs_rows and name.endswith("_") and not name.endswith("__"):
                return _write(func, args, kwargs)
            if needs_rows:
                args, kwargs = pytree.tree_map_only(cls, _Whole.apply, (args, kwargs))
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """Return an ordinary parameter with a copy of all rows."""
        copy = Parameter(self.remote.pull(self), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)


def _refuse_rows(module: nn.Module) -> None:
    """Raise RuntimeError if a module to be exported or scripted has a `RemoteRows`, which has no memory."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, RemoteRows):
            raise RuntimeError(
                f"{name} of {type(module).__name__}: an embedding whose rows are on servers cannot be exported or "
                "scripted. Export copy.deepcopy(model), which has all rows"
            )


def _look_up(func: _Operation, args: Any, kwargs: Any) -> Any:
    """Call an embedding function, and return its result. The weight that it gets has only the rows that it looks up.

    Raises: RuntimeError with `max_norm`; TypeError if only the indices are a `RemoteRows`.
    """
    arguments = inspect.getcallargs(func, *args, **kwargs)
    weight = arguments["weight"]
    padding = arguments["padding_idx"]
    if arguments["max_norm"] is not None:
        raise RuntimeError("an embedding whose rows are on servers cannot have max_norm")
    if not isinstance(weight, RemoteRows):
        raise TypeError("the indices are an embedding with its rows on servers")
    indices, inverse = torch.unique(arguments["input"], return_inverse=True)
    arguments["input"] = inverse
    arguments["weight"] = _Rows.apply(weight, indices)
    if padding is not None:
        row = padding % len(weight)
        found = (indices == row).nonzero()
        arguments["padding_idx"] = int(found[0]) if len(found) else None
    arguments["sparse"] = False
    return func(**arguments)


class _Rows(torch.autograd.Function):
    """Pull a weight's rows at ascending indices, as a tensor [n, ...]; backward gives the weight a sparse gradient."""

    @staticmethod
    def forward(ctx: Any, weight: RemoteRows, indices: Tensor) -> Tensor:
        ctx.shape = weight.shape
        ctx.save_for_backward(indices)
        return weight.remote.pull_rows(indices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        return as_sparse(indices, gradient, ctx.shape, is_coalesced=True), None


class _Whole(torch.autograd.Function):
    """Pull all rows of a weight; backward gives the weight a dense gradient."""

    @staticmethod
    def forward(ctx: Any, weight: RemoteRows) -> Tensor:
        return weight.remote.pull(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def _write(func: _Operation, args: Any, kwargs: Any) -> Any:
    """Call `func`, an operation in place on its first tensor, and return its result.

    If the first tensor is a `RemoteRows`, `func` writes to a copy of all rows. The servers get the copy if this rank
    owns the parameter; otherwise it is lost. The result is then the `RemoteRows`.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    at = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    target = leaves[at]
    writes_rows = isinstance(target, RemoteRows)
    leaves = [_Whole.apply(leaf) if isinstance(leaf, RemoteRows) else leaf for leaf in leaves]
    if writes_rows:
        leaves[at] = target.remote.pull(target)
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    result = func(*args, **kwargs)
    if not writes_rows:
        return result
    target.remote.assign(leaves[at])
    return target
