"""`mpistrat-bench compare`: mpistrat and its peers (raw MPI, torch.distributed, …) do the same work in one run."""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.tools.bench.device import HOST, Device
from mpistrat.tools.bench.report import Row
from mpistrat.tools.bench.rounds import (
    CannotTakePart,
    Contestants,
    all_ranks,
    compare,
    first_reason,
    medians,
)

LeftOut = dict[str, str]  # for each peer that takes no part, the reason
OURS = "mpistrat"
ALONE = "one rank alone"
COPY = "copy"
# The file in `peers`, the package to import, and the peer's name in reports.
PEERS = (
    ("raw_mpi", "mpi4py", "raw MPI"),
    ("torch_distributed", "torch", "torch.distributed"),
    ("horovod", "horovod", "Horovod"),
    ("tensorflow", "tensorflow", "TensorFlow"),
)


def contestants_of_peers(what: str, *work: Any) -> tuple[Contestants, LeftOut]:
    """Return the contestants of all peers by name, and for each peer that is left out the reason.

    Called by: every rank. A peer that one rank cannot use is left out on all ranks, with the lowest such rank's reason.
    Args: what: the function of each peer's file to call: "training_steps" or "all_reduces".   work: its arguments.
    """
    present: Contestants = {}
    left_out: LeftOut = {}
    for file, package, name in PEERS:
        found: Contestants = {}
        missing = "" if importlib.util.find_spec(package) else "not installed"
        reason = first_reason(missing)
        if not reason:
            try:
                peer = importlib.import_module(f"mpistrat.tools.bench.peers.{file}")
                found = getattr(peer, what)(*work)
            except (CannotTakePart, ImportError) as error:
                reason = str(error)
            reason = first_reason(reason)
        if reason:
            left_out[name] = reason
        else:
            present |= found
    return present, left_out


def training_contestants(work: Any, options: Any = None) -> tuple[Contestants, LeftOut]:
    """Return the step functions of all contestants by name, and for each peer that is left out the reason.

    The contestants are one rank alone, all peers, DDP and FSDP2 on mpistrat's process group, and mpistrat. A step
    function takes no arguments, and returns this rank's loss.

    Called by: every rank.
    Args:
        work: this rank's part of the step, a `Work`.
        options: communication options for mpistrat; None: the defaults.
    """
    from mpistrat.tools.bench.peers import torch_distributed
    from mpistrat.tools.bench.training import with_mpistrat
    from mpistrat.tools.bench.work import alone

    of_peers, left_out = contestants_of_peers("training_steps", work)
    contestants = {ALONE: alone(work), **of_peers}
    try:
        # On a device, mpistrat's process group also uses this backend.
        torch_distributed.backend_of_torch(work.device)
        contestants |= torch_distributed.training_steps(work, OURS)
    except CannotTakePart as reason:
        left_out["torch, mpistrat"] = str(reason)
    return {**contestants, OURS: with_mpistrat(work, options)}, left_out


def compare_training(contestants: Contestants, num_rounds: int, device: Device = HOST) -> list[Row]:
    """Time the steps of all contestants, in turns. Called by: every rank.

    Returns: a row for each contestant. "ms" is the median over the rounds of the slowest rank's mean time of a step;
        "samples" has the time of each round. "loss" is the mean of all ranks in one more step. "wrong" is True if it
        differs from mpistrat's by more than 0.01 %: then the contestant did other work (never for one rank alone).
    """
    rounds = compare(contestants, num_rounds=num_rounds, wait=device.wait)
    times = medians(rounds)
    losses = {
        name: statistics.fmean(all_ranks().all_gather_object(float(step())))
        for name, step in contestants.items()
    }
    rows = []
    for name, us in times.items():
        did_same_work = math.isclose(losses[name], losses[OURS], rel_tol=1e-4)
        row = {
            "training step": name,
            "ms": us / 1000,
            "mpistrat / this": times[OURS] / us,
            **_over_own_backend(name, times),
            "loss": losses[name],
            "wrong": name != ALONE and not did_same_work,
            "samples": [sample / 1000 for sample in rounds[name]],
        }
        rows.append(row)
    return rows


def _over_own_backend(name: str, times: Mapping[str, float]) -> Row:
    """Return a ratio for a row: the time of DDP or FSDP2 on mpistrat's group, divided by its time on torch's backend.

    Args: name: the contestant: "DDP, mpistrat".   times: microseconds of each contestant.
    Returns: a dict such as {"this / gloo": 0.9}; empty if `name` is no wrapper on mpistrat's group, or torch's own
        backend takes no part.
    """
    wrapper, _, backend = name.partition(", ")
    if backend != OURS:
        return {}
    return {
        f"this / {peer.partition(', ')[2]}": times[name] / us
        for peer, us in times.items()
        if peer.startswith(wrapper) and peer != name
    }


def all_reduce_contestants(nbytes: int, device: Device = HOST) -> tuple[Contestants, LeftOut]:
    """Return the functions that sum `nbytes` bytes of float32 over the ranks, by name, and the peers left out, with
    reasons.

    A function takes no arguments and returns the array with the sum; the function COPY only copies `nbytes` bytes.
    Called by: every rank.
    """
    ours = all_ranks()
    count = max(1, nbytes // 4)
    values = device.array(operand(count, ours.rank, ours.size))
    result = arrays.copy(values)
    in_place = arrays.copy(values)
    other = arrays.copy(values)

    def into_another() -> Array:
        ours.all_reduce(values, out=result)
        return result

    def in_place_of(buffer: Array) -> Callable[[], Array]:
        def reduce() -> Array:
            ours.all_reduce(buffer)
            return buffer

        return reduce

    def by_plain_copies() -> Array:
        host = arrays.to_host(in_place)
        ours.all_reduce(host)
        in_place[:] = arrays.to_device_of(host, in_place)
        return in_place

    def copy() -> None:
        other[:] = values

    of_peers, left_out = contestants_of_peers("all_reduces", values)
    contestants: Contestants = {
        **of_peers,
        "ordinary": into_another,
        "ordinary, in place": in_place_of(in_place),
        COPY: copy,
    }
    if not device.is_host:
        contestants["copies to the host"] = by_plain_copies
    elif (memory := ours.memory.window_buffer(values.nbytes)) is not None:
        window = memory.view(np.float32)
        window[:] = values
        contestants["in the window"] = in_place_of(window)
    return contestants, left_out


def compare_all_reduces(
    sizes: Iterable[int], num_rounds: int, device: Device = HOST
) -> tuple[list[Row], LeftOut]:
    """Compare sums over the ranks of buffers of `sizes` bytes. Called by: every rank.

    Returns: a row of `compare_all_reduce` for each size, and the peers that are left out at the last size, with
        reasons.
    """
    rows: list[Row] = []
    left_out: LeftOut = {}
    for nbytes in sizes:
        contestants, left_out = all_reduce_contestants(nbytes, device)
        rows.append(compare_all_reduce(nbytes, contestants, num_rounds, device))
    return rows, left_out


def operand(count: int, rank: int, ranks: int) -> np.ndarray:
    """Return the float32 operand of `rank` for an all-reduce of `count` elements over `ranks` ranks.

    Rank 0 has 1, 2, 3, 1, 2, 3, …, the last rank the negative of these, and every other rank zeros. So the sum is 0,
    and repeated sums in place do not grow. A single rank has 1, 2, 3, ….
    """
    sign = {ranks - 1: -1, 0: 1}.get(rank, 0)
    return (np.arange(count) % 3 + 1).astype(np.float32) * sign


_RATIOS = {
    "MPI / ordinary": ("MPI", "ordinary"),
    "in place": ("MPI, in place", "ordinary, in place"),
    "MPI / window": ("MPI, in place", "in the window"),
    "gloo / window": ("gloo", "in the window"),
    "ring / window": ("TensorFlow, ring", "in the window"),
    "window / copy": ("in the window", COPY),
    "nccl / in place": ("nccl", "ordinary, in place"),
    "xccl / in place": ("xccl", "ordinary, in place"),
    "host / in place": ("copies to the host", "ordinary, in place"),
}


def compare_all_reduce(
    nbytes: int, contestants: Contestants, num_rounds: int, device: Device = HOST
) -> Row:
    """Time the contestants at one size, in turns, and check one sum of each. Called by: every rank.

    Returns: the row. A column "… us" is the median over the rounds of the slowest rank's mean microseconds per call;
        "wrong" counts the wrong elements on all ranks; "samples" has each round's time; the others are ratios of
        medians.
    """
    count = max(1, nbytes // 4)
    expected = operand(count, 0, 1) if all_ranks().size == 1 else 0
    wrong = sum(
        int((arrays.to_numpy(call()) != expected).sum())
        for name, call in contestants.items()
        if name != COPY
    )
    repeat = max(1, min(100, (1 << 23) // nbytes))
    rounds = compare(contestants, repeat, num_rounds, device.wait)
    times = medians(rounds)
    return {
        "bytes": nbytes,
        **{f"{name} us": us for name, us in times.items()},
        **{
            name: times[upper] / times[lower]
            for name, (upper, lower) in _RATIOS.items()
            if upper in times and lower in times
        },
        "wrong": sum(all_ranks().all_gather_object(wrong)),
        "samples": rounds,
    }
