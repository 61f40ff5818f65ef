"""Find out which GPUs this process may use, without loading a GPU library."""

from __future__ import annotations

import os
import re

from mpistrat.settings import Environment

# "0,1" · "GPU-8932f937,MIG-GPU-8932f937/1/2" · "" and "-1" are none
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Environment = os.environ) -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES before the first that is no device: ("0", "1").

    If the variable is not set, return the numbers of the GPUs that nvidia-smi lists. An empty tuple if there are no
    GPUs, or no nvidia-smi.
    """
    listed = environ.get(VISIBLE_DEVICES)
    if listed is None:
        return tuple(str(number) for number in range(_number_by_nvidia_smi()))
    visible = []
    for entry in listed.split(","):
        gpu = entry.strip()
        # CUDA ignores the first entry that is no device, and all entries after it.
        if not gpu or gpu.startswith("-"):
            break
        visible.append(gpu)
    return tuple(visible)


def _number_by_nvidia_smi() -> int:
    import subprocess  # imported here, so that `import mpistrat` stays fast

    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, check=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return 0  # a machine without NVIDIA's tools is a CPU-only machine
    # "GPU 0: NVIDIA A100 (UUID: GPU-8932f937-…)"; the lines of its MIG slices are indented
    return len(re.findall(r"^GPU ", listing.stdout, re.MULTILINE))
