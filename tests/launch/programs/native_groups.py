"""Collectives through torch's own group of an accelerator: how they end, start, hang and fail.

Usage: native_groups.py collectives | starts | stall | killed | losses. Rank 0 prints "done NAME" for each case that
went well. The accelerator is that of `support.accelerator`; `starts` and `losses` need the faults of the simulated one.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators import Communicator, Reduction, reducing
from mpistrat.communicators.transports.accelerator import gpu_transports
from mpistrat.machine import gpu_advice

sys.path.insert(0, str(Path(__file__).parents[2]))

from support import accelerator
from support.rank_errors import errors_of_ranks
from support.simulated_accelerator import process_group

SIM = accelerator.load()
WORLD = MPI.COMM_WORLD
RANK, SIZE, LAST = WORLD.rank, WORLD.size, WORLD.size - 1
FLOATS = ("float16", "bfloat16", "float32", "float64")
ON_THE_HOST = ("sum", "int16"), ("max", "int16"), ("prod", "complex64"), ("bor", "int32")


def on_sim(values: Any, dtype: str = "float32") -> torch.Tensor:
    return torch.as_tensor(values).to(getattr(torch, dtype)).to(accelerator.KIND)


def of(rank: int, length: int = 6) -> torch.Tensor:
    return torch.arange(length) % 4 + rank + 1


def everyone(length: int = 6) -> torch.Tensor:
    return torch.stack([of(rank, length) for rank in range(SIZE)])


class Expect:
    """Around collectives: they are in order, and the host waits for none of them."""

    def __init__(self, *, host_waits: bool = False) -> None:
        self._may_wait = host_waits

    def __enter__(self) -> None:
        SIM.host_waits()
        SIM.set_sync_debug_mode("default" if self._may_wait else "error")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        SIM.set_sync_debug_mode("default")
        if error is None:
            waits, violations = SIM.host_waits(), SIM.violations()
            assert not violations, violations[:3]
            assert self._may_wait or not waits, waits


def equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected.to(actual.dtype), rtol=0, atol=0)


# Collectives


def reductions(communicator: Communicator) -> None:
    combined: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda ranks: ranks.sum(0),
        "max": lambda ranks: ranks.amax(0),
        "min": lambda ranks: ranks.amin(0),
        "prod": lambda ranks: ranks.prod(0),
    }
    cases = [
        *((op, dtype) for op in combined for dtype in (*FLOATS, "uint8", "int32", "int64")),
        *(("sum", "complex64"), *ON_THE_HOST),
    ]
    for op, dtype in cases:
        buffer, is_by_host = on_sim(of(RANK), dtype), (op, dtype) in ON_THE_HOST
        with Expect(host_waits=is_by_host):
            communicator.all_reduce(buffer, op)
            doubled = buffer * 2
        bits = everyone()[0].clone()
        for row in everyone():
            bits |= row
        expected = bits if op == "bor" else combined[op](everyone())
        equal(buffer, expected)
        equal(doubled, expected * 2)


def rounding_scale_and_out(communicator: Communicator) -> None:
    once = on_sim([2048 if RANK == 0 else 1], "float16")
    short = on_sim([2048 if RANK == 0 else 1], "float16")
    buffer, out, nothing = on_sim(of(RANK)), on_sim([0.0] * 6), on_sim([])
    with Expect():
        communicator.all_reduce(once)
        communicator.all_reduce(short, Reduction(summed_in="float16"))
        communicator.all_reduce(buffer, reducing(scale=0.5), out=out)
        communicator.all_reduce(nothing)
    equal(once, torch.tensor([2048 + SIZE - 1]).half())
    equal(short, torch.tensor([2048.0]))  # 1 was lost each time
    equal(out, everyone().sum(0) / 2)
    equal(buffer, of(RANK))


def reduce_and_reduce_scatter(communicator: Communicator) -> None:
    for dtype in ("float32", "float16", "int16"):
        buffer = on_sim(of(RANK), dtype)
        rows, out = on_sim(of(RANK, 4 * SIZE).view(2 * SIZE, 2), dtype), on_sim([[0, 0]] * 2, dtype)
        with Expect(host_waits=dtype == "int16"):
            communicator.reduce(buffer, LAST)
            communicator.reduce_scatter(rows, out)
        equal(buffer, everyone().sum(0) if RANK == LAST else of(RANK))
        equal(out, everyone(4 * SIZE).sum(0).view(SIZE, 2, 2)[RANK])


def copies(communicator: Communicator) -> None:
    for dtype in ("float32", "bool", "complex128", "int16"):
        buffer, part = on_sim(of(RANK) % 3, dtype), on_sim(of(RANK) % 3, dtype)
        whole = on_sim([[0] * 6] * SIZE, dtype)
        with Expect():
            communicator.broadcast(buffer, LAST)
            parts = communicator.all_gather(part)
            communicator.all_gather_into(part, whole)
            scalars = communicator.all_gather(part[1].clone())
        equal(buffer, of(LAST) % 3)
        for gathered in (torch.stack([each.cpu() for each in parts]), whole):
            equal(gathered, everyone() % 3)
        equal(torch.stack([each.cpu() for each in scalars]), everyone()[:, 1] % 3)
    uneven, mine = on_sim([[RANK] * 3] * RANK), on_sim([RANK])
    in_place = on_sim(range(SIZE)) * (RANK + 1)
    rows = on_sim([[RANK, to] for to in range(SIZE) for _ in range(to)])
    received = on_sim([[0, 0]] * (SIZE * RANK)).view(-1, 2)
    with Expect():
        parts = communicator.all_gather(uneven.view(-1, 3))
        communicator.all_gather_into(in_place[RANK : RANK + 1], in_place)
        communicator.all_to_all(rows, received, [*range(SIZE)], [RANK] * SIZE)
        communicator.broadcast(mine)
    assert [tuple(part.shape) for part in parts] == [(rank, 3) for rank in range(SIZE)]
    assert all((part.cpu() == rank).all() for rank, part in enumerate(parts))
    equal(in_place, torch.tensor([rank * (rank + 1) for rank in range(SIZE)]))
    equal(received, torch.tensor([[f, RANK] for f in range(SIZE) for _ in range(RANK)]).view(-1, 2))


def side_streams(communicator: Communicator) -> None:
    """A collective is ordered with the stream that is current, whichever that is."""
    main, side, buffer = SIM.current_stream(), SIM.Stream(), on_sim(of(RANK))
    with Expect():
        side.wait_stream(main)
        with SIM.stream(side):
            buffer.mul_(2)
            communicator.all_reduce(buffer)
            buffer.add_(1)
        main.wait_stream(side)
        buffer.record_stream(side)
        buffer.mul_(3)
    equal(buffer, (everyone().sum(0) * 2 + 1) * 3)


def batch_norm(communicator: Communicator) -> None:
    """Once the ranks know that they are equal, a step with either kind of it lets the host wait for nothing."""
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    calls = strategy.extended.communicator.contract
    with strategy.scope():
        own = torch.nn.BatchNorm1d(3)
        synced = ms.convert_sync_batchnorm(torch.nn.BatchNorm1d(3))
    whole = torch.randn(4 * SIZE, 3, generator=torch.Generator().manual_seed(0))
    mine = whole[4 * RANK : 4 * RANK + 4].to(accelerator.KIND).requires_grad_()
    made: list[int] = []

    def step() -> None:
        before = calls.calls
        output = synced(mine)
        made.append(calls.calls - before)
        torch.autograd.grad(output.square().sum(), mine)
        made.append(calls.calls - before - made[-1])
        own(mine.detach()).square().sum().backward()

    for i in range(3):
        SIM.host_waits()
        with accelerator.no_host_waits(SIM, asked_for=i > 0):
            strategy.run(step)
        waits = [kind for kind in SIM.host_waits() if kind != "query"]  # which returns at once
        assert i == 0 or not waits, waits
    assert made == [1] * 6, made
    assert not SIM.violations()
    alone = torch.nn.BatchNorm1d(3)
    for _ in range(3):
        alone(whole)
    torch.testing.assert_close(synced.running_var.cpu(), alone.running_var)
    means = whole.view(SIZE, 4, 3).mean(1).mean(0) * (1 - 0.9**3)
    torch.testing.assert_close(own.running_mean.cpu(), means)
    assert own.num_batches_tracked == 3


def captures(communicator: Communicator) -> None:
    buffer = on_sim(of(RANK))
    with SIM.capture():
        errors = errors_of_ranks(lambda: communicator.all_reduce(buffer))
        assert {name for name, _, _ in errors} == {"RuntimeError"}, errors
        assert "all_reduce was called while the current stream captures a graph" in errors[RANK][1]
        assert "outside torch.cuda.graph" in errors[RANK][1]


def mismatches(communicator: Communicator) -> None:
    """Found on the host before anything is submitted."""
    errors = errors_of_ranks(lambda: communicator.all_reduce(on_sim([0.0] * (1 + RANK))))
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors


def many_calls(communicator: Communicator) -> None:
    """The host is ahead of the device, and what has ended is forgotten."""
    buffer = on_sim(of(RANK))
    with Expect():
        for _ in range(200):
            communicator.all_reduce(buffer, reducing(scale=1 / SIZE))
    torch.testing.assert_close(buffer.cpu(), everyone().float().mean(0))


def failures(communicator: Communicator) -> None:
    """On one rank, while the others have submitted theirs: their kernels end, and the next call is an error."""
    group_class = accelerator.group_class()
    buffer, allreduce = on_sim(of(RANK)), group_class.allreduce
    if RANK == LAST:

        def fail(*_: Any) -> None:
            raise RuntimeError("the link is down")

        group_class.allreduce = fail
    errors = errors_of_ranks(lambda: (communicator.all_reduce(buffer), SIM.synchronize()))
    group_class.allreduce = allreduce
    words = f"rank {LAST}: RuntimeError: the link is down"
    assert f"aborted on all ranks: {words}" in errors[LAST][1], errors
    errors = errors_of_ranks(lambda: communicator.all_reduce(buffer))
    assert all("cannot be used any more" in text for _, text, _ in errors), errors
    assert all(words in text for _, text, _ in errors), errors


def collectives() -> None:
    communicator = ms.MultiWorkerMirroredStrategy().extended.communicator
    assert communicator.ordered_by_streams
    backend = "simccl" if accelerator.SIMULATED else "nccl"
    assert f"buffers on GPUs: through {backend} " in communicator.explain()
    for case in (
        *(reductions, rounding_scale_and_out, reduce_and_reduce_scatter, copies, side_streams),
        *(batch_norm, captures, mismatches, many_calls, failures),
    ):
        case(communicator)
        done(case.__name__)
    why = "they need the faults of the simulated group, and a fault tolerant job"
    accelerator.left_out("starts, losses", why, says_so=RANK == 0)


# Starts that fail


def starts() -> None:
    gpu_transports.why_not_proven = lambda *_: "not tried"
    torch_backend, allreduce = torch.distributed.Backend, process_group.ProcessGroupSim.allreduce
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mpistrat").addHandler(handler)

    def one_more(group: Any, tensors: list[torch.Tensor], *rest: Any) -> Any:
        tensors[0].add_(1)
        return allreduce(group, tensors, *rest)

    def without(fault: str, expected: str, advice: str) -> None:
        gpu_advice.notices.clear()
        said.clear()
        if fault == "sum" and RANK == LAST:
            process_group.ProcessGroupSim.allreduce = one_more  # type: ignore[method-assign]
        elif fault == "missing" and RANK == LAST:
            known = torch_backend._plugins.pop(process_group.BACKEND.upper())
        elif fault == "hang" or RANK == LAST:
            process_group.faults.add(fault)
        started = time.monotonic()
        strategy = ms.MultiWorkerMirroredStrategy(comm=WORLD.Dup())
        seconds = time.monotonic() - started
        process_group.faults.clear()
        process_group.ProcessGroupSim.allreduce = allreduce  # type: ignore[method-assign]
        way = "values on GPUs go in chunks through pinned host memory, not through torch's own group, because "
        texts = [text for text in said if text.startswith(way)]
        assert len(texts) == (RANK == 0), said
        assert all(text[len(way) :].startswith(expected[:-1].lstrip("(")) for text in texts), texts
        assert all(text.count(advice) == 1 for text in texts), texts
        if fault == "missing" and RANK == LAST:
            torch_backend._plugins[process_group.BACKEND.upper()] = known
        text = strategy.extended.explain()
        assert expected in text, text
        assert "through pinned host memory" in text, text
        assert len(set(WORLD.allgather(text.splitlines()[0]))) == 1
        assert seconds < (5 if fault == "hang" else 2), seconds
        communicator = strategy.extended.communicator
        assert not communicator.ordered_by_streams
        buffer = on_sim(of(RANK))
        communicator.all_reduce(buffer)
        equal(buffer, everyone().sum(0))
        done(fault)

    where = f"(torch's group for 'sim' does not start on rank {LAST}: RuntimeError: simulated fault"
    start, ranks = "(torch's group for 'sim' does not start", ", ".join(map(str, range(SIZE)))
    shows_more = (
        ". Set NCCL_DEBUG=INFO, which shows more, and run `mpistrat doctor` in the same way."
    )
    in_wheels = ". Install NCCL: pip install nvidia-nccl-cu13 (or cu12, as torch's CUDA is), or a torch with NCCL or"
    without("missing", f"(rank {LAST} has none: ImportError: this torch", in_wheels)
    without("constructor", f"{where}: the constructor", shows_more)
    without("connect", f"{where}: this rank fails to connect", shows_more)
    compare = ". Look at nvidia-smi -q and dmesg, and compare with NCCL_P2P"
    without("sum", f"{start} on rank ", compare)  # a rank that hears of the others may be late
    assert RANK or any(f": its sum of {SIZE} ones is {SIZE + 1}.0" in text for text in said), said
    limit = ". Set NCCL_SOCKET_IFNAME, or raise MPISTRAT_START_SECONDS: half is the limit."
    without("hang", f"{start} in 2 s on ranks {ranks})", limit)
    after = ms.MultiWorkerMirroredStrategy(comm=WORLD.Dup()).extended.communicator
    assert after.ordered_by_streams


# Kernels that never end


def stall() -> None:
    communicator = ms.MultiWorkerMirroredStrategy().extended.communicator
    buffer = on_sim(of(RANK))
    if accelerator.SIMULATED or RANK == LAST:
        accelerator.hang()
    communicator.all_reduce(buffer, reducing(label="gradients of the model"))
    print("returned", flush=True)
    SIM.synchronize()
    print("released", flush=True)
    communicator.all_reduce(buffer)


# A rank is killed while its kernel hangs


def killed() -> None:
    if RANK == LAST:
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    stall()


# A rank is killed, and the others go on


def losses() -> None:
    def train(elastic: Any) -> int:
        strategy = elastic.strategy()
        communicator = strategy.extended.communicator
        assert communicator.ordered_by_streams, strategy.extended.explain()
        buffer = on_sim([1.0])
        if communicator.size == SIZE:
            process_group.faults.add("hang")
            communicator.all_reduce(buffer)
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            SIM.synchronize()  # the kernel waits for that of the killed rank
            process_group.faults.clear()
            communicator.all_reduce(buffer)
            raise AssertionError("a collective with a rank that is lost")
        communicator.all_reduce(buffer)
        return int(buffer.item())

    print("went on with", ms.fault_tolerance.run_elastic(train), flush=True)


def done(name: str) -> None:
    if RANK == 0:
        print("done", name, flush=True)


if __name__ == "__main__":
    for program in (collectives, starts, stall, killed, losses):
        if program.__name__ == sys.argv[1]:
            program()
