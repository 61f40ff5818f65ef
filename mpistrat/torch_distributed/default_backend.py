"""Under `mpistrat run`: gives a program the backend "mpistrat" when it asks torch for gloo, NCCL or no backend.

torch then answers with the name that the program asked for. torch's own tables keep the name "mpistrat", so groups that
torch makes by itself are ours, too.

It also prints the number of ranks when the program's default group is made, and a notice when an optimizer steps
without such a group.

Only this file replaces functions of torch.distributed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpistrat.machine.notices import tell
from mpistrat.topology import ranks_and_nodes
from mpistrat.torch_distributed import default_group
from mpistrat.torch_distributed.compilation import not_compiled
from mpistrat.torch_distributed.next_group import asked_name
from mpistrat.torch_distributed.process_group import NAME, MpistratProcessGroup
from mpistrat.torch_distributed.rendezvous import base

INIT_METHOD = "mpi://"
# Backends that our process group replaces. It moves tensors of accelerators by torch's own groups, as NCCL's.
REPLACED = frozenset(("gloo", "mpi", "nccl", "rccl", "xccl", NAME))
# Modules of torch that refuse a backend, or use CUDA, because of the name alone; and the name that they get.
_NAMES_FOR_TORCH = {
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook": NAME,
    "torch.distributed.c10d_logger": NAME,
    "torch.distributed.distributed_c10d": "gloo",
    "torch.distributed.nn.functional": "nccl",
    "torch.profiler.profiler": NAME,
}
# torch's own functions.
_torch_get_backend = dist.get_backend
_torch_new_group = dist.new_group


def is_replaced(backend: str | None) -> bool:
    """Whether our backend replaces all of the backends that `backend` names; True for None.

    Args: backend: the argument of `init_process_group`: "gloo", "cpu:gloo,cuda:nccl", or None.
    """
    if backend is None:
        return True
    parts = str(backend).lower().split(",")
    names = [part.rpartition(":")[2].strip() for part in parts]
    return REPLACED.issuperset(names)


def replace_functions(*, keeps_backend: bool) -> None:
    """Replace four functions of torch.distributed, so that the program's groups are on our backend.

    - `init_process_group` makes the default group on our backend if the program names a replaced backend or none.
      Another backend, such as "ucc", "fake" or "xla", is the program's own choice and stays. A store that the program
      gives, `timeout`, `device_id` and other arguments stay, too. Without a store the init method becomes "mpi://".
      The function raises ValueError if rank or world_size differ from MPI's. If the group has all ranks, its rank 0
      prints the number of ranks and nodes, and the backend.
    - `new_group` does the same for a further group, if the default group is on our backend.
    - `get_backend` returns the name that the program asked for, in place of "mpistrat". Some modules of torch get
      another name, because they refuse a backend, or use CUDA, by its name.
    - `get_backend_config` returns that name for each type of device: "cpu:gloo,cuda:gloo".

    In a job of several ranks, rank 0 also prints a notice once if an optimizer steps and torch has no default group;
    not under `mpistrat run --keep-backend`.

    Called by: every rank of `mpistrat run`, once, before the program runs.
    Args: keeps_backend: whether groups stay on the backends that the program names. Then only `init_process_group` is
        replaced, and it changes no argument; rank 0 still prints its line.
    """
    original = dist.init_process_group
    signature = inspect.signature(original)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        topology = base().topology
        backend = arguments.get("backend")
        if not keeps_backend and is_replaced(backend):
            _check(arguments)
            arguments["backend"] = NAME
            if arguments.get("store") is None:
                arguments["init_method"] = INIT_METHOD
        original(**arguments)
        world = dist.group.WORLD
        if isinstance(world, MpistratProcessGroup):
            world.asked_name = dist.Backend(backend or _backend_of_device())
        if (dist.get_rank(), dist.get_world_size()) == (0, topology.size):
            _tell_once(f"{ranks_and_nodes(topology)}, backend {_backend()}")

    _put_into_torch(init_process_group)
    if not keeps_backend:
        for replacement in (get_backend, get_backend_config, new_group):
            _put_into_torch(replacement)
    if base().rank == 0 and base().size > 1:
        register_optimizer_step_pre_hook(not_compiled(_before_step))


def get_backend(group: Any = None) -> str:
    """Return the name of the backend that the program asked for, in place of "mpistrat"."""
    backend = _torch_get_backend(group)  # raises if this rank is not in the group
    asked = asked_name(group)
    if not asked:
        return backend
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return _NAMES_FOR_TORCH.get(caller, asked)


def get_backend_config(group: Any = None) -> str:
    """Return the backend of each type of device, by the name that the program asked for, as "cpu:gloo,cuda:gloo"."""
    return str(dist.BackendConfig(dist.get_backend(group)))


for _answer in (get_backend, get_backend_config):
    if torch.__version__ >= "2.13":
        # torch.compile calls it while it compiles, as after `torch.compiler.assume_constant_result`.
        vars(_answer)["_dynamo_marked_constant"] = True
    else:
        not_compiled(_answer)  # earlier versions do not pass a group to such a function


def new_group(
    ranks: Any = None, timeout: Any = None, backend: Any = None, *others: Any, **options: Any
) -> Any:
    """Make a group on our backend, if the default group is on it, and `backend` is a replaced backend or None."""
    name = backend
    if asked_name() and is_replaced(backend):
        name = NAME
    group = _torch_new_group(ranks, timeout, name, *others, **options)
    if backend and isinstance(group, MpistratProcessGroup):
        group.asked_name = dist.Backend(backend)
    return group


def _put_into_torch(replacement: Any) -> None:
    """Put `replacement` into each loaded module that holds torch.distributed's function of the same name."""
    name = replacement.__name__
    original = getattr(dist, name)
    functools.update_wrapper(replacement, original)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)


def _before_step(*_: Any) -> None:
    if default_group.is_wanted():
        _tell_once(
            "an optimizer steps, and torch has no process group. If the program does not add up gradients in its own "
            f"way, each of the {base().size} ranks trains a model by itself, on all of the data. Use "
            "DistributedDataParallel, or a strategy of several ranks: docs/existing_programs.md has diffs",
            "WARNING",
        )


def _backend_of_device() -> str:
    """Return the name of the backend that torch takes if a program names none."""
    device = torch._C._get_accelerator().type
    return dist.Backend.default_device_backend_map.get(device, "gloo")


def _backend() -> str:
    """Return the backend of the default group; "cpu:gloo,cuda:nccl" if torch has chosen one for each device."""
    name = _torch_get_backend()
    return dist.get_backend_config() if name == "undefined" else name


@functools.cache
def _tell_once(text: str, level: Literal["INFO", "WARNING"] = "INFO") -> None:
    tell(text, level)


def _check(arguments: dict[str, Any]) -> None:
    """Check `rank` and `world_size` in the arguments of `init_process_group`.

    Raises: ValueError if either is not MPI's, and not -1 or None.
    """
    rank = base().rank
    size = base().size
    for name, of_mpi in (("rank", rank), ("world_size", size)):
        value = arguments.get(name)
        if value not in (None, -1, of_mpi):
            raise ValueError(
                f"rank {rank} of {size}: init_process_group got {name}={value}, but MPI has {name}={of_mpi} here. "
                f"Leave {name} out, or take it from {name.upper()} in the environment, which `mpistrat run` sets; or "
                "start the program with `mpistrat run --keep-backend`, which leaves its groups to torch"
            )
