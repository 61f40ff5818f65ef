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
            raise ValueError(_message(wrapper, type(root).__name__, "is to be mirrored", rank))


def refuse_wrapping(wrapper: str, module: torch.nn.Module, rank: int) -> None:
    """Raises: ValueError: `wrapper`, the name of a class, was put around `module`, which is mirrored, or will be."""
    raise ValueError(_message(wrapper, type(module).__name__, "belongs to a strategy", rank))


def _message(wrapper: str, module: str, what: str, rank: int) -> str:
    sharded = (
        ""
        if wrapper == "DistributedDataParallel"
        else ". To shard a model, use torch.distributed.fsdp.fully_shard, whose parameters a strategy leaves alone"
    )
    return (
        f"rank {rank}: {wrapper} reduces the gradients of a {module} that {what}, which backward() inside strategy.run "
        f"reduces already: they would be reduced twice. Leave {wrapper} out, and call the module itself; or leave the "
        f"strategy's scope(), mirror() and run out for this model{sharded}"
    )
