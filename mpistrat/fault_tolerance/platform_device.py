"""On what kind of machine this is, as far as it matters for how its end is announced."""

from __future__ import annotations

import contextlib
import enum

from mpistrat.cluster_resolver.slurm.job import slurm_job
from mpistrat.machine.gpus import visible_gpus

_PRODUCT = "/sys/class/dmi/id/product_name"  # "Google Compute Engine"


class PlatformDevice(enum.Enum):
    """Whose machine, and what it computes with; INTERNAL is anybody's but Google Compute Engine's."""

    INTERNAL_CPU = "internal_CPU"
    INTERNAL_GPU = "internal_GPU"
    INTERNAL_TPU = "internal_TPU"
    GCE_CPU = "GCE_CPU"
    GCE_GPU = "GCE_GPU"
    GCE_TPU = "GCE_TPU"


def detect_platform() -> PlatformDevice:
    """The platform of this process. A job of Slurm's is ended by Slurm, wherever its machines stand: INTERNAL."""
    product = ""
    with contextlib.suppress(OSError), open(_PRODUCT, errors="replace") as file:
        product = file.read()
    if slurm_job() is not None or "Google Compute Engine" not in product:
        return PlatformDevice.INTERNAL_CPU  # with GPUs it would be the same
    return PlatformDevice.GCE_GPU if visible_gpus() else PlatformDevice.GCE_CPU
