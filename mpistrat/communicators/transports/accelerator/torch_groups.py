"""torch's own groups for tensors on accelerators: NCCL (also RCCL), XCCL, and backends that others register with torch.

They are made without `init_process_group`, so that the program's default group stays its own.

This file imports torch at its top. So it is imported only when torch is there.
"""

from __future__ import annotations

import ctypes
import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

# Backends of torch, and the names of their classes. RCCL uses NCCL's name.
_CLASSES = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}


def backend_of(kind: str) -> str:
    """Return the name of torch's backend for devices of `kind`: "nccl".

    Returns "" if this torch has no such backend.
    """
    if not dist.is_available():
        return ""
    name = str(dist.Backend.default_device_backend_map.get(kind, ""))
    here = hasattr(dist.distributed_c10d, _CLASSES[name]) if name in _CLASSES else _plugin(name)
    return name if here else ""


def version_of(kind: str) -> str:
    """Return the versions that ranks must share to form a group for devices of `kind`: "nccl 2.27.5 of torch 2.9.0".

    Raises: ImportError if this torch has no group for such devices.
    """
    backend = backend_of(kind)
    if not backend:
        raise ImportError(f"this torch ({torch.__version__}) has no group for devices of {kind!r}")
    version = ".".join(map(str, torch.cuda.nccl.version())) + " " if backend == "nccl" else ""
    return f"{backend} {version}of torch {torch.__version__}"


def make_group(
    kind: str, store: c10d.Store, rank: int, size: int, timeout: datetime.timedelta, name: str
) -> Any:
    """Make a group that moves tensors on devices of `kind`. Collective.

    Args:
        store: a store that only this group uses.
        timeout: how long a call may take; torch then ends this process.
        name: the group's name in torch's logs.
    Raises: RuntimeError if this torch has no group for such devices.
    """
    backend = backend_of(kind)
    if not backend:
        raise RuntimeError(
            f"rank {rank}: this torch has no group for tensors on devices of {kind!r}. Move the tensor to the CPU, or "
            "install a torch with NCCL (CUDA, ROCm) or XCCL (XPU)"
        )
    store = c10d.PrefixStore(f"{kind}/", store)
    if backend not in _CLASSES:
        return _by_plugin(backend, store, rank, size, timeout, name)
    cls = getattr(dist.distributed_c10d, _CLASSES[backend])
    options = cls.Options()
    options._timeout = timeout
    options.group_name = name
    return cls(store, rank, size, options)


def abort_group(group: Any) -> None:
    """Abort a group: its kernels end at once. Not collective; any thread may call it.

    The group's object is never freed: the destructor of an aborted group waits for NCCL's watchdog, which may not end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    group.abort()


def _plugin(name: str) -> Any:
    """Return the entry of a backend that another package has registered with torch.

    None for "mpistrat", and if there is no such entry.
    """
    return None if name == "mpistrat" else dist.Backend._plugins.get(name.upper())


def _by_plugin(
    backend: str, store: Any, rank: int, size: int, timeout: datetime.timedelta, name: str
) -> Any:
    plugin = _plugin(backend)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = timeout, name
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)
