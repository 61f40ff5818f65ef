"""Which GPUs may this process use? Asked without loading any GPU library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

VISIBLE_DEVICES = (
    "CUDA_VISIBLE_DEVICES"  # "0,1" · "GPU-8932f937,MIG-GPU-8932f937/1/2" · "" and "-1" are none
)


def visible_gpus(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Ids of the GPUs that CUDA_VISIBLE_DEVICES allows, else of those that nvidia-smi lists, else none."""
    ids = _ids_of_variable(environ)
    return tuple(map(str, range(_number_by_nvidia_smi()))) if ids is None else ids


def _ids_of_variable(environ: Mapping[str, str] | None) -> tuple[str, ...] | None:
    """None where it is not set."""
    listed = (os.environ if environ is None else environ).get(VISIBLE_DEVICES)
    if listed is None:
        return None
    ids: list[str] = []
    for item in listed.split(","):
        if not item.strip() or item.strip().startswith("-"):
            break  # CUDA ignores what follows the first entry that is no device
        ids.append(item.strip())
    return tuple(ids)


def _number_by_nvidia_smi() -> int:
    import subprocess  # here, because it makes importing mpistrat slower and few need it

    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return 0  # a machine without NVIDIA's tools is a CPU-only machine
    if listing.returncode:
        return 0
    # "GPU 0: NVIDIA A100 (UUID: GPU-8932f937-…)"; the lines of its MIG slices are indented
    return len(re.findall(r"^GPU ", listing.stdout, re.MULTILINE))
