"""`all_reduce` of float32 in a device's memory, beside torch's own backend and plain copies through the host.

    mpiexec -n 4 python benchmarks/gpu_collectives.py

`us` is from idle devices to idle devices, of calls in a row; `host us` is how long a call keeps the host: not
long where the way is ordered by streams. The way is the one that the ranks have agreed on, which is printed.
`mpistrat-bench compare all_reduce` has more peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from program import program, report

from mpistrat.tools.bench.command import device_named
from mpistrat.tools.bench.comparison import all_reduce_contestants
from mpistrat.tools.bench.device import Device
from mpistrat.tools.bench.rounds import all_ranks, compare, medians, take_turns

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)


def host_us(call: Callable[[], object], device: Device) -> float:
    """How long one call keeps the host, when the device has nothing else to do."""
    device.wait()
    all_ranks().barrier()
    started = time.perf_counter()
    call()
    seconds = time.perf_counter() - started
    return max(all_ranks().all_gather_object(seconds)) * 1e6


def main() -> None:
    parser = program(__doc__)
    parser.add_argument("--device", default="auto", help="as of mpistrat-bench (auto)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    arguments = parser.parse_args()
    device = device_named(arguments.device)
    communicator = all_ranks()
    if communicator.rank == 0:
        print(communicator.explain())
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for nbytes in arguments.sizes:
        contestants, left_out = all_reduce_contestants(nbytes, device)
        repeat = max(2, min(50, (1 << 26) // nbytes))
        times = medians(compare(contestants, repeat, arguments.rounds, device.wait))
        turns = {name: partial(host_us, call, device) for name, call in contestants.items()}
        kept = medians(take_turns(turns, arguments.rounds))
        rows += [
            {
                "bytes": nbytes,
                "all_reduce": name,
                "us": us,
                "host us": kept[name],
                "GB/s": nbytes / us / 1000,
                "mpistrat / this": times["ordinary, in place"] / us,
            }
            for name, us in times.items()
        ]
    title = f"all_reduce on {device.kind}"
    report(title, rows, arguments.json("gpu_collectives"), left_out, device)


if __name__ == "__main__":
    main()
