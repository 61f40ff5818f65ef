"""torch's own data parallelism around a module that a strategy mirrors, whose gradients would be reduced twice."""

from __future__ import annotations

import sys

import torch

# By module: the class that it defines. They are loaded by torch, or by the program.
_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
}


def wrapper_of(module: torch.nn.Module) -> str:
    """The name of the class of torch's by which `module` reduces gradients itself; "" if it does not."""
    for loaded, name in _WRAPPERS.items():
        cls = getattr(sys.modules.get(loaded), name, None)
        if cls is not None and isinstance(module, cls):
            return name
    return ""


def check_not_wrapped(root: torch.nn.Module, rank: int) -> None:
    """Raises: ValueError when `root`, which is to be mirrored, is or has a module that reduces gradients itself."""
    for module in root.modules():
        if wrapper := wrapper_of(module):
            refuse_wrapping(wrapper, next(module.children(), module), rank)


def refuse_wrapping(wrapper: str, module: torch.nn.Module, rank: int) -> None:
    """Raises: ValueError: a `wrapper`, the name of a class, is around `module`, which is mirrored, or is to be."""
    sharded = ""
    if wrapper != "DistributedDataParallel":
        sharded = ". To shard a model, use torch.distributed.fsdp.fully_shard, whose parameters a strategy leaves alone"
    raise ValueError(
        f"rank {rank}: {wrapper} is put around a {type(module).__name__} that the strategy mirrors: gradients would be "
        f"reduced twice, by it and by backward() of the strategy. Leave {wrapper} out, and call the module itself; "
        f"or keep the model out of prepare(), mirror(), scope() and run{sharded}"
    )
