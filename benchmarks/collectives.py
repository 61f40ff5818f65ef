"""all_reduce over the ranks of one node, of 4 KB to 64 MB, beside MPI, gloo and a plain copy.

    mpiexec -n 2 python benchmarks/collectives.py

*In the window*: the buffer lies in the memory that the ranks share, as gradients do. *Copy*: all ranks at once copy as
many bytes, which is a limit of the machine.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measurement import compare, gloo, report, world
from mpi4py import MPI

from mpistrat.communicators.construction import communicator_for

SIZES = [1 << power for power in range(12, 27, 2)]


def all_reduce(nbytes: int) -> dict[str, Any]:
    """Microseconds for `nbytes` of float32."""
    raw, ours = MPI.COMM_WORLD, communicator_for(world())
    # Of zeros: sums in place must not grow with each call.
    given, result = (np.zeros(nbytes // 4, np.float32) for _ in range(2))
    in_place, other = given.copy(), given.copy()
    memory = ours.window_buffer(nbytes)
    window = given.copy() if memory is None else memory.view(np.float32)
    window[:] = 0
    tensor = torch.zeros(nbytes // 4)
    medians = compare(
        {
            "MPI": lambda: raw.Allreduce(given, result),
            "MPI, in place": lambda: raw.Allreduce(MPI.IN_PLACE, in_place),
            "ordinary": lambda: ours.all_reduce(given, out=result),
            "ordinary, in place": lambda: ours.all_reduce(in_place),
            "in the window": lambda: ours.all_reduce(window),
            "gloo": lambda: dist.all_reduce(tensor),
            "copy": lambda: np.copyto(other, given),
        },
        repeat=max(1, min(100, (1 << 23) // nbytes)),
        num_rounds=15,
    )
    return {
        "bytes": nbytes,
        **{f"{name} us": us for name, us in medians.items()},
        "MPI / ordinary": medians["MPI"] / medians["ordinary"],
        "in place": medians["MPI, in place"] / medians["ordinary, in place"],
        "MPI / window": medians["MPI, in place"] / medians["in the window"],
        "gloo / window": medians["gloo"] / medians["in the window"],
        "window / copy": medians["in the window"] / medians["copy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", help="prefix of the file to write, e.g. benchmarks/results/mpich-2-ranks-"
    )
    prefix = parser.parse_args().json
    torch.set_num_threads(1)
    with gloo():
        rows = [all_reduce(nbytes) for nbytes in SIZES]
    report("all_reduce over one node", rows, prefix and f"{prefix}collectives.json")
    large = [row for row in rows if row["bytes"] >= 1 << 20]
    if world().rank == 0:
        for name in ("MPI / ordinary", "in place", "MPI / window"):
            mean = math.exp(sum(math.log(row[name]) for row in large) / len(large))
            print(f"{name}, 1 MB and more: {mean:.2f} (geometric mean)")


if __name__ == "__main__":
    main()
