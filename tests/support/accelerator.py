"""The accelerator that programs of tests/launch use: the simulated one, or the one that scripts/test-gpu asks for.

`load()` returns `torch.sim`, or what has the same names for CUDA. A program leaves out by `left_out` what only the
simulated accelerator can show. Ranks that share one GPU use the real NCCL by `support/shared_gpu`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

DEVICE_VARIABLE = "MPISTRAT_TEST_DEVICE"
KIND = os.environ.get(DEVICE_VARIABLE, "sim")
SIMULATED = KIND == "sim"
LEFT_OUT = "left out "  # how the lines of `left_out` begin
SECONDS_OF_A_HANG = 10
_CYCLES_PER_SECOND = 1.7e9


def load() -> Any:
    """The module of the device kind `KIND`."""
    if SIMULATED:
        from support.simulated_accelerator import load

        return load()
    from support.cuda_accelerator import CudaAccelerator

    return CudaAccelerator()


def group_class() -> Any:
    """Torch's own process group for `KIND`."""
    from torch.distributed import distributed_c10d

    return load().ProcessGroupSim if SIMULATED else distributed_c10d.ProcessGroupNCCL


def hang() -> None:
    """From now on no collective of this rank ends; on CUDA for `SECONDS_OF_A_HANG`."""
    import torch

    if SIMULATED:
        load().faults.add("hang")
    else:
        torch.cuda._sleep(int(SECONDS_OF_A_HANG * _CYCLES_PER_SECOND))


def left_out(name: str, why: str, *, says_so: bool) -> bool:
    """Whether `name` is left out here, because the simulated accelerator alone can show it.

    Args: says_so: whether this rank prints that, for the report.
    """
    if not SIMULATED and says_so:
        print(f"{LEFT_OUT}{name}: {why}", flush=True)
    return not SIMULATED


@contextlib.contextmanager
def no_host_waits(accelerator: Any, asked_for: bool = True) -> Iterator[None]:
    """Inside, what has the host wait for the device raises."""
    accelerator.set_sync_debug_mode("error" if asked_for else "default")
    try:
        yield
    finally:
        accelerator.set_sync_debug_mode("default")
