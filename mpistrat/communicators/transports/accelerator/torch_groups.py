"""torch's own groups for tensors on accelerators: NCCL (also RCCL), XCCL, and backends that others register with torch.

The groups are made without `init_process_group`, so that the program can still make its own default group.

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
    """Return the name of torch's backend for devices of `kind`: "nccl" for "cuda"; "" if this torch has none."""
    if not dist.is_available():
        return ""
    name = str(dist.Backend.default_device_backend_map.get(kind, ""))
    if name in _CLASSES:
        return name if hasattr(dist.distributed_c10d, _CLASSES[name]) else ""
    return name if _plugin(name) else ""


def version_of(kind: str) -> str:
    """Return a text that must be equal on all ranks that form a group: "nccl 2.27.5 of torch 2.9.0" for "cuda".

    Raises: ImportError if this torch has no group for devices of `kind`.
    """
    backend = backend_of(kind)
    if not backend:
        raise ImportError(f"this torch ({torch.__version__}) has no group for devices of {kind!r}")
    of_torch = f"of torch {torch.__version__}"
    if backend != "nccl":
        return f"{backend} {of_torch}"
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    return f"{backend} {version} {of_torch}"


def make_group(
    kind: str, store: c10d.Store, rank: int, size: int, timeout: datetime.timedelta, name: str
) -> Any:
    """Make a group that moves tensors on devices of `kind`. Collective: all `size` ranks call it.

    Args:
        store: a key-value store of torch's where the ranks meet; no other group may use it.
        timeout: how long a collective may take; after that torch ends this process.
        name: the group's name in torch's logs.
    Returns: a process group of torch's, such as `ProcessGroupNCCL`.
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

    The group's object is never freed, because its destructor would wait for NCCL's watchdog, a thread that may not end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    group.abort()


def _plugin(name: str) -> Any:
    """Return torch's entry of the backend `name`, if another package than mpistrat has registered it; else None."""
    if name == "mpistrat":
        return None
    return dist.Backend._plugins.get(name.upper())


def _by_plugin(
    backend: str, store: Any, rank: int, size: int, timeout: datetime.timedelta, name: str
) -> Any:
    plugin = _plugin(backend)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = c10d._DistributedBackendOptions()
    options.store = store
    options.group_rank = rank
    options.group_size = size
    options.timeout = timeout
    options.group_id = name
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)
