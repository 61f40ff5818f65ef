"""Lets ranks that share a GPU use NCCL. Python imports this file at its start, where PYTHONPATH names its folder.

NCCL refuses two ranks of one host on one GPU. It takes NCCL_HOSTID for the name of the host. So here each rank is a
host of its own, and NCCL goes through sockets on loopback. It does what it does elsewhere, but for its speed.

mpistrat does not try NCCL there, and its benchmarks leave NCCL's programs out. Both ask `gpu_transports.shared_gpu`,
which is replaced when it is imported.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_GPU_TRANSPORTS = "mpistrat.communicators.transports.accelerator.gpu_transports"
_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")

for _name in _RANKS:
    if _name in os.environ:
        os.environ["NCCL_HOSTID"] = f"rank-{os.environ[_name]}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _GPU_TRANSPORTS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            assert callable(module.shared_gpu)
            module.shared_gpu = lambda gpus: ""  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
