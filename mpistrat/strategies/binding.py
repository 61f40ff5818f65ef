"""Decides the devices that a rank uses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpistrat.communicators import Communicator
from mpistrat.machine.devices import (
    accelerator,
    make_current,
    seen_accelerators,
    share_all,
    share_out,
)
from mpistrat.machine.gpu_advice import tell_of_way
from mpistrat.machine.notices import tell
from mpistrat.topology import Topology

_has_told = False
_DeviceNames = tuple[str, ...]  # of accelerators, or of devices


def bind(
    communicator: Communicator,
    topology: Topology,
    devices: Sequence[str] | None,
    quiet: bool = False,
) -> _DeviceNames:
    """Return this rank's devices: `devices` if given, else one of the node's accelerators, else the CPU.

    It also makes the rank's accelerator current, the first of `devices`. If every rank uses a GPU, the communicator
    takes buffers on GPUs from then on. If it cannot send them by NCCL, rank 0 says so.

    Called by: every rank of `communicator`, in the constructor of a strategy.
    Args:
        devices: this rank's devices, if the program has chosen them, else None. The other ranks of the node then share
            all its accelerators out.
        quiet: whether rank 0 says nothing about NCCL and host memory.
    Returns: names such as "cuda:1", with the number of this process; ("cpu:0",) without an accelerator.
    """
    seen = seen_accelerators()
    # Accelerators are compared by name, because their numbers may differ between processes.
    free = seen if devices is None else ()
    ranks, of_ranks = _of_node(communicator, topology, free)
    used: tuple[object, ...] | None = None
    if devices is None:
        used = ()
        shares = share_out(of_ranks)
        share = shares[ranks.index(communicator.rank)]
        devices = ("cpu:0",) if share is None else (f"{accelerator()}:{share}",)
        if topology.rank == 0:
            _tell_of_unused(of_ranks, shares, topology.num_nodes)
    kind, _, number = devices[0].partition(":")
    if kind == accelerator():
        index = int(number)
        make_current(index)
        used = (topology.node, seen[index])
    gpus = communicator.all_gather_object(used, label="accelerators used")
    if communicator.size > 1:
        _use_gpus(communicator, gpus, number, quiet)
    return tuple(devices)


def _use_gpus(communicator: Communicator, gpus: Sequence[Any], number: str, quiet: bool) -> None:
    """Let `communicator` take buffers on GPUs, if every rank uses a GPU. Called by: every rank.

    Otherwise buffers go through host memory. Rank 0 then names a rank that sees no GPU, if another rank uses one.

    Args:
        gpus: the node and the name of each rank's GPU, in rank order; () for a rank that sees none; None for a rank
            where the program chose the host.
        number: number of this rank's GPU in this process.
        quiet: whether rank 0 says nothing about NCCL and host memory.
    """
    if all(gpus):
        from mpistrat.communicators.transports.accelerator.gpu_transports import Gpu, use_gpus

        use_gpus(communicator, [Gpu(*gpu) for gpu in gpus], int(number), quiet=quiet)
    elif any(gpus) and () in gpus and communicator.rank == 0 and not quiet:
        tell_of_way("through host memory", f"rank {gpus.index(())} sees no GPU")


def bind_all(communicator: Communicator, topology: Topology) -> _DeviceNames:
    """Return this rank's share of all accelerators of its node, or the CPU if its share is empty.

    Every rank of the node gets equally many. Called by: every rank of `communicator`.
    Returns: names such as ("cuda:0", "cuda:1"); ("cpu:0",) without accelerators.
    """
    ranks, of_ranks = _of_node(communicator, topology, seen_accelerators())
    share = share_all(of_ranks)[ranks.index(communicator.rank)]
    return tuple(f"{accelerator()}:{i}" for i in share) or ("cpu:0",)


def _of_node(
    communicator: Communicator, topology: Topology, seen: _DeviceNames
) -> tuple[list[int], list[_DeviceNames]]:
    """Return the ranks of this node, in order, and for each of these ranks its argument `seen`.

    Called by: every rank.
    Args: seen: the names of the accelerators that this rank may take.
    """
    seen_by_ranks = communicator.all_gather_object((topology.node, seen), label="accelerators seen")
    ranks = [rank for rank, (node, _) in enumerate(seen_by_ranks) if node == topology.node]
    return ranks, [seen_by_ranks[rank][1] for rank in ranks]


def _tell_of_unused(
    of_ranks: Sequence[_DeviceNames], shares: Sequence[int | None], num_nodes: int
) -> None:
    """Say, once per process, how to use all accelerators of the node, if some are unused. Called by: rank 0.

    Args:
        of_ranks: for each rank of the node, the names of the accelerators that it may take.
        shares: for each rank of the node, the index in these names of the accelerator that it takes; None for no
            accelerator.
    """
    global _has_told
    by_rank = zip(of_ranks, shares, strict=True)
    used = len({names[share] for names, share in by_rank if share is not None})
    present = len(set().union(*of_ranks))
    if used < present and not _has_told:
        _has_told = True
        kind = accelerator()
        program = f"python {Path(sys.argv[0]).name or 'train.py'}"
        tell(
            f"this job uses {used} of the {present} {kind} devices of its node. To use all, start one rank for each: "
            f"mpirun -n {present * num_nodes} {program}, or srun --ntasks-per-node={present} {program}. In a program "
            f"without torch modules, you can instead give one rank several: devices=['{kind}:0', '{kind}:1', …]",
            "INFO",
        )
