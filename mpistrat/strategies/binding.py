"""Which devices a rank uses."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.communicators import Communicator
from mpistrat.machine.devices import accelerator, make_current, seen_accelerators, share_out
from mpistrat.topology import Topology


def bind(
    communicator: Communicator, topology: Topology, devices: Sequence[str] | None
) -> tuple[str, ...]:
    """This rank's devices: as given, else one of the node's accelerators, else the CPU.

    Called by: every rank of `communicator`.
    Which ranks see the same one is known by its name, not by its number in a process. The first of this rank's is
    the current one from now on; if all ranks use one, the communicator takes buffers on them.
    """
    seen = seen_accelerators()
    everyone = communicator.all_gather_object((topology.node, seen), label="accelerators seen")
    if devices is None:
        here = [rank for rank, (node, _) in enumerate(everyone) if node == topology.node]
        share = share_out([everyone[rank][1] for rank in here])[here.index(communicator.rank)]
        devices = ("cpu:0",) if share is None else (f"{accelerator()}:{share}",)
    kind, _, number = devices[0].partition(":")
    used = None
    if kind == accelerator():
        make_current(int(number))
        used = (topology.node, seen[int(number)])
    gpus = communicator.all_gather_object(used, label="accelerators used")
    if communicator.size > 1 and None not in gpus:
        from mpistrat.communicators.transports.accelerator.gpu_ways import Gpu, use_gpus

        use_gpus(communicator, [Gpu(*gpu) for gpu in gpus], int(number))
    return tuple(devices)
