"""Under `mpistrat run`: gives a program the backend "mpistrat" when it asks torch for gloo, NCCL or no backend.

It also prints the number of ranks when the program's default group is made, and a notice when an optimizer steps
without such a group.

Only this file replaces a function of torch.distributed, `init_process_group`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, Literal

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpistrat.machine.notices import tell
from mpistrat.topology import ranks_and_nodes
from mpistrat.torch_distributed import default_group
from mpistrat.torch_distributed.compilation import not_compiled
from mpistrat.torch_distributed.process_group import NAME
from mpistrat.torch_distributed.rendezvous import base

INIT_METHOD = "mpi://"
# Backends that our process group replaces. It moves tensors of accelerators by torch's own groups, as NCCL's.
REPLACED = frozenset(("gloo", "mpi", "nccl", "rccl", "xccl", NAME))


def is_replaced(backend: str | None) -> bool:
    """Whether our backend replaces all of the backends that `backend` names; True for None.

    Args: backend: the argument of `init_process_group`: "gloo", "cpu:gloo,cuda:nccl", or None.
    """
    if backend is None:
        return True
    names = (part.rpartition(":")[2].strip().lower() for part in str(backend).split(","))
    return REPLACED.issuperset(names)


def replace_init_process_group(*, keeps_backend: bool) -> None:
    """Have `init_process_group` make the default group on our backend, if it names a replaced backend or none.

    Rank 0 then prints the number of ranks and nodes, and the group's backend. It prints a notice if an optimizer steps
    and torch has no default group; not with `keeps_backend`, because a strategy then makes no group.

    Another backend, such as "ucc", "fake" or "xla", is the program's own choice and stays. A store that the program
    gives, `timeout`, `device_id` and other arguments stay, too. Without a store the init method becomes "mpi://".
    `new_group` is not replaced. The replacement raises ValueError if rank or world_size differ from MPI's.

    Called by: every rank of `mpistrat run`, once, before the program runs.
    Args: keeps_backend: whether the group stays on the backend that the program names; rank 0 still prints its line.
    """
    original = dist.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        topology = base().topology
        if not keeps_backend and is_replaced(arguments.get("backend")):
            _check(arguments)
            arguments["backend"] = NAME
            if arguments.get("store") is None:
                arguments["init_method"] = INIT_METHOD
        original(*bound.args, **bound.kwargs)
        if (dist.get_rank(), dist.get_world_size()) == (0, topology.size):
            _tell_once(f"{ranks_and_nodes(topology)}, backend {_backend()}")

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(original.__name__) is original:
            setattr(module, original.__name__, init_process_group)
    if base().rank == 0 and base().size > 1:
        register_optimizer_step_pre_hook(not_compiled(_before_step))


def _before_step(*_: Any) -> None:
    if default_group.is_wanted():
        _tell_once(
            "an optimizer steps, and torch has no process group. If the program does not add up gradients in its own "
            f"way, each of the {base().size} ranks trains a model by itself, on all of the data. Use "
            "DistributedDataParallel, or a strategy of several ranks: docs/existing_programs.md has diffs",
            "WARNING",
        )


def _backend() -> str:
    """Return the backend of the default group; "cpu:gloo,cuda:nccl" if torch has chosen one for each device."""
    name = dist.get_backend()
    return dist.get_backend_config() if name == "undefined" else name


@functools.cache
def _tell_once(text: str, level: Literal["INFO", "WARNING"] = "INFO") -> None:
    tell(text, level)


def _check(arguments: dict[str, Any]) -> None:
    """Check `rank` and `world_size` in the arguments of `init_process_group`.

    Raises: ValueError if either is not MPI's, and not -1 or None.
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
