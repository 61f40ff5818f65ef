"""Refuses torch's own data parallelism around mirrored modules, because gradients would be reduced twice."""

from __future__ import annotations

import sys

import torch

# The classes by the modules that define them. Only torch or the program imports these modules.
_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
}


def wrapper_of(module: torch.nn.Module) -> str:
    """Return the class name if `module` is torch's `DistributedDataParallel` or `FullyShardedDataParallel`; else ""."""
    for loaded, name in _WRAPPERS.items():
        cls = getattr(sys.modules.get(loaded), name, ())  # nothing is an instance of ()
        if isinstance(module, cls):
            return name
    return ""


def check_not_wrapped(root: torch.nn.Module, rank: int) -> None:
    """Check that a module that is to be mirrored contains no wrapper of torch that reduces gradients itself.

    Args: rank: this rank, for the message.
    Raises: ValueError if `root` is, or contains, a `DistributedDataParallel` or `FullyShardedDataParallel`.
    """
    for module in root.modules():
        if wrapper := wrapper_of(module):
            refuse_wrapping(wrapper, next(module.children(), module), rank)


def refuse_wrapping(wrapper: str, module: torch.nn.Module, rank: int) -> None:
    """Raise ValueError. The caller has found that `wrapper` is around a module that is, or is to be, mirrored.

    Args:
        wrapper: the class name of the wrapper.
        module: the wrapped module.
        rank: this rank, for the message.
    """
    sharded = ""
    if wrapper != "DistributedDataParallel":
        sharded = ". To shard a model, use torch.distributed.fsdp.fully_shard: a strategy leaves its parameters alone"
    raise ValueError(
        f"rank {rank}: {wrapper} is put around a {type(module).__name__} that the strategy mirrors: gradients would be "
        f"reduced twice, by it and by backward() of the strategy. Leave {wrapper} out, and call the module itself; "
        f"or keep the model out of prepare(), mirror(), scope() and run{sharded}"
    )
