"""Detects the platform, because it decides how the end of a job is announced."""

from __future__ import annotations

import enum

from mpistrat.cluster_resolver.slurm.job import slurm_job
from mpistrat.liveness.processes import text_in
from mpistrat.machine.gpus import visible_gpus

_PRODUCT = "/sys/class/dmi/id/product_name"  # "Google Compute Engine"


class PlatformDevice(enum.Enum):
    """A kind of machine, and the device that computes: GCE is Google Compute Engine, INTERNAL any other machine."""

    INTERNAL_CPU = "internal_CPU"
    INTERNAL_GPU = "internal_GPU"
    INTERNAL_TPU = "internal_TPU"
    GCE_CPU = "GCE_CPU"
    GCE_GPU = "GCE_GPU"
    GCE_TPU = "GCE_TPU"


def detect_platform() -> PlatformDevice:
    """Return GCE_GPU or GCE_CPU on Google Compute Engine, INTERNAL_CPU on any other machine; TPUs are not detected.

    A Slurm job is INTERNAL_CPU on Google's machines, too, because Slurm ends it.
    """
    if slurm_job() is not None or "Google Compute Engine" not in text_in(_PRODUCT):
        return PlatformDevice.INTERNAL_CPU  # the defaults of INTERNAL_GPU are the same
    return PlatformDevice.GCE_GPU if visible_gpus() else PlatformDevice.GCE_CPU
