"""What a call of mpistrat costs beside the bare one.

python benchmarks/overheads.py                 # strategy.run of an empty function
mpiexec -n 2 python benchmarks/overheads.py    # and all_reduce beside mpi4py's Allreduce; many tensors beside one
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from program import program, report

import mpistrat as ms
from mpistrat.communicators.construction import communicator_for, transports_of
from mpistrat.communicators.contract.contract import Contract
from mpistrat.communicators.node.slots import LARGEST
from mpistrat.communicators.router import Router
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.liveness.records.record import RankRecord, text_of
from mpistrat.tools.bench.comparison import ALONE, compare_training, training_contestants
from mpistrat.tools.bench.models import Model, mlp
from mpistrat.tools.bench.rounds import compare, medians
from mpistrat.tools.bench.work import Work
from mpistrat.trace.timeline import Timeline, host_clock

TENSORS = 200


def empty() -> None:
    pass


def calls_of(contestants: Any, repeat: int, num_rounds: int) -> dict[str, list[float]]:
    """As `compare`; a single round only shows that all run, which few calls do."""
    return compare(contestants, repeat if num_rounds > 1 else min(repeat, 20), num_rounds)


def run_of_nothing(num_rounds: int) -> list[dict[str, Any]]:
    on_device = ms.OneDeviceStrategy("cpu:0")
    ranks = ms.MultiWorkerMirroredStrategy()
    two = ms.MirroredStrategy(["cpu:0", "cpu:1"], comm=MPI.COMM_SELF)
    rounds = calls_of(
        {
            "one replica, OneDevice": lambda: on_device.run(empty),
            "one replica, MultiWorkerMirrored": lambda: ranks.run(empty),
            "two replicas in one rank": lambda: two.run(empty),
        },
        repeat=1000,
        num_rounds=num_rounds,
    )
    limits = {"two replicas in one rank": 100.0}
    return [
        {
            "strategy.run of an empty function": name,
            "us": us,
            "limit us": limits.get(name, 10.0),
            "samples": rounds[name],
        }
        for name, us in medians(rounds).items()
    ]


def all_reduce(num_rounds: int) -> list[dict[str, Any]]:
    """The communicator's call and `ReplicaContext.all_reduce`, checks on, beside Allreduce on NumPy buffers.

    *More* and *difference* are over Allreduce's time.
    """
    strategy = ms.MultiWorkerMirroredStrategy()
    communicator = strategy.extended.communicator
    rows = []

    def measure(elements: int, repeat: int) -> None:
        context: Any = ms.get_replica_context()
        send = np.ones(elements, np.float32)
        receive = np.empty_like(send)
        tensor = torch.ones(elements)
        rounds = calls_of(
            {
                "raw": lambda: MPI.COMM_WORLD.Allreduce(send, receive),
                "communicator": lambda: communicator.all_reduce(send, out=receive),
                "mpistrat": lambda: context.all_reduce("sum", send),
                "tensor": lambda: context.all_reduce("sum", tensor),
            },
            repeat,
            num_rounds,
        )
        raw, of_communicator, ours, of_tensor = medians(rounds).values()
        small = send.nbytes <= LARGEST
        rows.append(
            {
                "all_reduce, bytes": send.nbytes,
                "raw us": raw,
                "communicator us": of_communicator,
                "more us": of_communicator - raw,
                "limit": 5.0 if small else "",
                "mpistrat us": ours,
                "difference us": ours - raw,
                "tensor us": of_tensor,
                "tensor's difference us": of_tensor - raw,
                "limit us": 8.0 if small else "",
                "ratio": ours / raw,
                "samples": rounds,
            }
        )

    repeats = {2: 2000, 64: 2000, 1024: 2000, 4096: 500, 1 << 18: 50, 1 << 22: 10}
    for elements, repeat in repeats.items():
        strategy.run(measure, (elements, repeat))
    return rows


def structures(num_rounds: int) -> list[dict[str, Any]]:
    """`ReplicaContext.all_reduce` of 200 matrices beside one tensor of as many bytes."""
    strategy = ms.MultiWorkerMirroredStrategy()
    rows = []

    def measure(elements: int, limit: float) -> None:
        context: Any = ms.get_replica_context()
        parts = [torch.ones(2, elements // 2) for _ in range(TENSORS)]
        named = {f"layer {i}": part for i, part in enumerate(parts)}
        whole = torch.ones(TENSORS * elements)
        rounds = calls_of(
            {
                "one": lambda: context.all_reduce("sum", whole),
                "list": lambda: context.all_reduce("sum", parts),
                "dictionary": lambda: context.all_reduce("sum", named),
            },
            20,
            num_rounds,
        )
        times = medians(rounds)
        rows.append(
            {
                f"{TENSORS} tensors of, bytes": parts[0].nbytes,
                **{f"{name} us": us for name, us in times.items()},
                "list / one": times["list"] / times["one"],
                "limit": limit,
                "dictionary / one": times["dictionary"] / times["one"],
                "samples": rounds,
            }
        )

    for elements, limit in ((64, 15.0), (256, 9.0), (1024, 5.0), (4096, 2.2)):
        strategy.run(measure, (elements, limit))
    return rows


def small_parameters(num_rounds: int) -> list[dict[str, Any]]:
    """A training step of 200 parameters of 8 or 64 elements, beside that of one process alone."""
    layers = TENSORS // 2 - 1
    model = Model(lambda: mlp(8, layers), (8,), 10, examples_per_rank=1)
    contestants, _ = training_contestants(Work(model, 1, MPI.COMM_WORLD.rank))
    # FSDP2 takes a hundred times as long.
    contestants = {name: step for name, step in contestants.items() if "FSDP2" not in name}
    rows = compare_training(contestants, num_rounds)
    (alone,) = (row["ms"] for row in rows if row["training step"] == ALONE)
    return [
        {
            **row,
            "more ms": row["ms"] - alone,
            "limit ms": 0.7 if row["training step"] == "mpistrat" else "",
        }
        for row in rows
    ]


def agreement(num_rounds: int) -> list[dict[str, Any]]:
    """What recording a collective, agreeing on it and tracing it add to a scalar all_reduce."""
    checked, unchecked = (communicator_for(MPI.COMM_WORLD, check) for check in ("always", "never"))
    inside = Router(checked.transports)  # type: ignore[attr-defined]
    send = np.ones((), np.float32)
    receive = np.empty_like(send)
    folder = tempfile.TemporaryDirectory()
    world = MPI.COMM_WORLD
    timeline = Timeline(folder.name, world.rank, world.size, "", host_clock())
    mpi = MpiTransport(world.Dup())
    ways, watch = transports_of(mpi, "traced")
    traced = Router(ways, Contract(mpi, "traced", watch, timeline=timeline))
    rounds = calls_of(
        {
            "neither": lambda: inside.all_reduce(send, out=receive),
            "recorded": lambda: unchecked.all_reduce(send, out=receive),
            "recorded and agreed on": lambda: checked.all_reduce(send, out=receive),
            "recorded, agreed on and traced": lambda: traced.all_reduce(send, out=receive),
        },
        repeat=3000,
        num_rounds=num_rounds,
    )
    record = RankRecord(None)
    call = text_of("all_reduce(sum, float32, ())", "train.py:33 in step")
    board: Any = record.new_slot(0, 2)
    rounds |= calls_of(
        {"the ring entry alone": lambda: record.enter(board, 1, *call)},
        repeat=10000,
        num_rounds=num_rounds,
    )
    timeline.close()
    folder.cleanup()
    times = medians(rounds)
    limits = {"recorded and agreed on": times["neither"] + 6.0, "the ring entry alone": 1.0}
    return [
        {
            "scalar all_reduce": name,
            "us": us,
            "limit us": limits.get(name, ""),
            "samples": rounds[name],
        }
        for name, us in times.items()
    ]


def main() -> None:
    arguments = program(__doc__).parse_args()
    report("strategy.run", run_of_nothing(arguments.rounds), arguments.json("run"))
    if MPI.COMM_WORLD.size > 1:
        for measured in (all_reduce, structures, small_parameters, agreement):
            name = measured.__name__
            report(name, measured(arguments.rounds), arguments.json(name))


if __name__ == "__main__":
    main()
