"""Advice for ranks that cannot combine values on GPUs by NCCL. Notices and `mpistrat doctor` give the same advice."""

from __future__ import annotations

from mpistrat.machine.notices import tell

ONE_RANK_PER_GPU = "start one rank per GPU (--gpus-per-task=1, or CUDA_VISIBLE_DEVICES by rank)"
ONE_ENVIRONMENT = "start all ranks with one environment, and the same modules on all nodes"
INSTALL_NCCL = "install NCCL: pip install nvidia-nccl-cu13 (or cu12, as torch's CUDA is)"
# Pairs: a piece of a reason, and the advice. The first pair with its piece in the reason counts; "" is in every reason.
_FIXES = (
    ("share a GPU", ONE_RANK_PER_GPU),
    ("Duplicate GPU", ONE_RANK_PER_GPU),
    ("sees no GPU", f"{ONE_RANK_PER_GPU}; and import torch before the strategy is built"),
    (" has none: ", f"{INSTALL_NCCL}, or a torch with NCCL or XCCL, on all nodes"),
    ("rank 0 has ", ONE_ENVIRONMENT),
    ("cannot connect to", "let the nodes open TCP connections to each other"),
    (" s on ranks ", "set NCCL_SOCKET_IFNAME, or raise MPISTRAT_START_SECONDS: half is the limit"),
    ("its sum of ", "look at nvidia-smi -q and dmesg, and compare with NCCL_P2P_DISABLE=1"),
    ("", "set NCCL_DEBUG=INFO, which shows more, and run `mpistrat doctor` in the same way"),
)
notices: list[str] = []  # the notices that this process has given: one at most


def tell_of_way(way: str, reason: str) -> None:
    """Tell the user how values on GPUs travel, why not by NCCL, and how to change that.

    Called by: rank 0, when it chooses how values on GPUs travel. Later calls of a process do nothing.
    Args:
        way: how they travel: "through host memory".
        reason: why NCCL is not used; only its first line is told.
    """
    fix = next(fix for part, fix in _FIXES if part in reason)
    first_line = reason.splitlines()[0].rstrip(".")
    text = f"values on GPUs go {way}, because {first_line}"
    if not notices:
        notices.append(text)
        advice = fix[0].upper() + fix[1:]
        tell(f"{text}. {advice}.")
