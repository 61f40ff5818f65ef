"""`all_reduce` of float32 in device memory, beside a plain copy through the host and gloo.

    mpiexec -n 2 python benchmarks/gpu_collectives.py

The way is the one that the ranks have agreed on, which is printed: ranks that share a GPU go through pinned memory.
"""

from __future__ import annotations

from typing import Any

import torch

import mpistrat as ms
from mpistrat.tools.bench.arguments import program
from mpistrat.tools.bench.peers import torch_gloo
from mpistrat.tools.bench.report import report
from mpistrat.tools.bench.rounds import all_ranks, compare, medians

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)


def main() -> None:
    parser = program(__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: only tries the program")
    arguments = parser.parse_args()
    kind = arguments.device
    devices = ["cpu:0"] if kind == "cpu" else None
    strategy = ms.MultiWorkerMirroredStrategy(devices=devices)
    communicator = strategy.extended.communicator
    device = strategy.extended.worker_devices[0]
    if all_ranks().rank == 0:
        print(strategy.extended.explain())

    def wait() -> None:
        if kind == "cuda":
            torch.cuda.synchronize(device)

    rows: list[dict[str, Any]] = []
    torch_gloo.start()
    for nbytes in SIZES if kind == "cuda" else SIZES[:4]:
        buffer = torch.ones(nbytes // 4, device=device) / all_ranks().size

        def ours(buffer: torch.Tensor = buffer) -> None:
            communicator.all_reduce(buffer)
            wait()

        def through_host(buffer: torch.Tensor = buffer) -> None:
            host = buffer.cpu()
            communicator.all_reduce(host)
            buffer.copy_(host)
            wait()

        def by_gloo(buffer: torch.Tensor = buffer) -> None:
            torch.distributed.all_reduce(buffer)
            wait()

        contestants = {"mpistrat": ours, "plain copies": through_host, "gloo": by_gloo}
        repeat = max(2, min(50, (1 << 26) // nbytes))
        rounds = compare(contestants, repeat, arguments.rounds)
        times = medians(rounds)
        rows += [
            {
                "bytes": nbytes,
                "all_reduce": who,
                "us": us,
                "GB/s": nbytes / us / 1000,
                "mpistrat / this": times["mpistrat"] / us,
            }
            for who, us in times.items()
        ]
    report(f"all_reduce on {kind}", rows, arguments.json("gpu_collectives"))


if __name__ == "__main__":
    main()
