"""Gives a program the backend "mpistrat" over MPI when it asks torch for gloo or NCCL, and an address.

This happens only under `mpistrat run`. Only this file replaces a function of torch.distributed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch.distributed as dist

from mpistrat.torch_distributed.process_group import NAME
from mpistrat.torch_distributed.rendezvous import base

INIT_METHOD = "mpi://"
# Backends that our process group replaces. It leaves tensors of accelerators to torch's own groups.
REPLACED = frozenset(("gloo", "mpi", "nccl", "rccl", "xccl", NAME))


def is_replaced(backend: str | None) -> bool:
    """Whether our backend replaces all of the backends in `backend`.

    Args: backend: as in `init_process_group`: "gloo", "cpu:gloo,cuda:nccl", or None.
    """
    if backend is None:
        return True
    names = (part.rpartition(":")[2].strip().lower() for part in str(backend).split(","))
    return REPLACED.issuperset(names)


def replace_default_backend() -> None:
    """Have `init_process_group` make the default group on our backend, if it names a replaced backend or none.

    Another backend (such as "ucc", "fake" or "xla") is the program's own choice, and stays. A store that the program
    gives, `timeout`, `device_id` and other arguments stay, too, and `new_group` is left alone.

    Called by: every rank, once, before the program imports `init_process_group`.
    """
    original = dist.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        if is_replaced(arguments.get("backend")):
            _check(arguments)
            arguments["backend"] = NAME
            if arguments.get("store") is None:
                arguments["init_method"] = INIT_METHOD
        original(*bound.args, **bound.kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(original.__name__) is original:
            setattr(module, original.__name__, init_process_group)


def _check(arguments: dict[str, Any]) -> None:
    """Check the program's rank and number of ranks against MPI's. -1 and None are accepted.

    Raises: ValueError if either differs.
    """
    rank, size = base().rank, base().size
    for name, of_mpi in (("rank", rank), ("world_size", size)):
        value = arguments.get(name)
        if value not in (None, -1, of_mpi):
            raise ValueError(
                f"rank {rank} of {size}: init_process_group got {name}={value}, but MPI has {name}={of_mpi} here. "
                f"Leave {name} out, or take it from {name.upper()} in the environment, which `mpistrat run` sets; or "
                "start the program with `mpistrat run --keep-backend`, which leaves its groups to torch"
            )
