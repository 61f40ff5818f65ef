"""`mpistrat-bench train`: times the steps of a training loop, and the same computation without communication."""

from __future__ import annotations

import argparse
import copy
import hashlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mpistrat.communicators import Communicator
from mpistrat.options import CommunicationOptions
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.strategy import Strategy
from mpistrat.tools.bench import examples
from mpistrat.tools.bench.device import Device
from mpistrat.tools.bench.models import MODELS
from mpistrat.tools.bench.report import Row, surroundings
from mpistrat.tools.bench.rounds import Results, UsageError, all_ranks, medians
from mpistrat.tools.bench.work import Step, Work, alone, step_of

# In this many first steps a strategy tries how gradients travel fastest (`CommunicationOptions.overlap`).
STEPS_OF_TRIALS = 20
WARM_UP = 3  # steps before the measurement if there are no trials
# Five steps with communication, five without, and so on: so a machine that gets slower slows both down.
STEPS_PER_BLOCK = 5


def with_strategy(work: Work, strategy: Strategy) -> tuple[Step, torch.nn.Module]:
    with strategy.scope():
        module, optimizer = work.build()
    step = step_of(work, module, optimizer)

    def step_of_strategy() -> Any:
        return strategy.run(step)

    return step_of_strategy, module


def with_mpistrat(work: Work, options: Any = None, **more: Any) -> Step:
    """Return a training step under a new `MultiWorkerMirroredStrategy`, as `past_trials` does.

    Called by: every rank.
    Args:
        options: communication options; None: the defaults.
        more: further arguments of the strategy.
    """
    return past_trials(
        work,
        MultiWorkerMirroredStrategy(None, options, devices=[work.device], gradients="mean", **more),
    )


def past_trials(work: Work, strategy: Strategy) -> Step:
    """Run 20 steps: in these, `strategy` tries how gradients travel fastest. Then restore the module's first weights.

    Called by: every rank.   Returns: the training step.
    """
    step, module = with_strategy(work, strategy)
    first = copy.deepcopy(module.state_dict())
    for _ in range(STEPS_OF_TRIALS):
        step()
    module.load_state_dict(first)
    return step


def train(arguments: argparse.Namespace, device: Device) -> tuple[Row, Row]:
    """Train a model and measure its steps. Called by: every rank.

    Returns: the row of results, and the machine and software; benchmarks/README.md describes the keys. The time of each
        step is the time of its slowest rank, in milliseconds; medians are over the steps.
    Raises: UsageError on all ranks, if arguments do not fit the job or the input.
    """
    options = arguments.communication_options or CommunicationOptions()
    strategy = MultiWorkerMirroredStrategy(None, options, devices=[device.name], gradients="mean")
    communicator = strategy.extended.communicator
    work = work_of(arguments.model, arguments.batch_size, device.name)
    each = work.examples
    batch_size = each * communicator.size
    batches = examples.batches(strategy, work.model, arguments.input, batch_size)
    step, module = with_strategy(work, strategy)
    times, losses = _measure(communicator, work, batches, step, arguments.steps)
    where = surroundings(communicator, device)

    here = np.array(list(times.values())) * 1e3
    of_ranks = np.stack(communicator.all_gather(here))
    by_part = dict(zip(times, of_ranks.swapaxes(0, 1), strict=True))  # arrays [rank, step]
    # A step takes as long as the slowest rank's step.
    slowest = {}
    samples = {}
    for part, values in by_part.items():
        slowest[part] = values.max(axis=0).tolist()
        samples[f"{part}_ms"] = values.round(4).tolist()
    p50 = medians(slowest)
    step_ms = p50["step"]
    compute = np.median(by_part["compute"], axis=1)
    efficiency, refused = efficiency_of(p50["compute"], step_ms, where)
    row = {
        "model": arguments.model,
        "parameters": sum(p.numel() for p in module.parameters()),
        "gradient_bytes": sum(p.nbytes for p in module.parameters()),
        "batch_size": batch_size,
        "examples_per_rank": each,
        "input": arguments.input,
        "communication_options": _what_is_set(options),
        "ways": strategy.extended.explain().split("\n"),
        "steps": arguments.steps,
        "step_ms": step_ms,
        "step_ms_p99": float(np.percentile(slowest["step"], 99)),
        "input_ms": p50["input"],
        "compute_ms": p50["compute"],
        "exposed_communication_ms": step_ms - p50["input"] - p50["compute"],
        "samples_per_s": batch_size / step_ms * 1e3,
        "samples_per_s_per_rank": each / step_ms * 1e3,
        "efficiency": efficiency,
        "efficiency_refused": refused,
        "slowest_rank": int(compute.argmax()),
        "slowest_ratio": float(compute.max() / np.median(compute)),
        "ranks_that_differ": ranks_that_differ(communicator, module),
        "losses_finite": all(communicator.all_gather_object(np.isfinite(losses).all())),
        "samples": samples,
    }
    return row, where


def work_of(name: str, batch_size: int | None, device: str = "cpu:0") -> Work:
    """Return this rank's `Work`: its equal part of a global batch for the model `name`. Called by: every rank.

    Args: batch_size: the examples of all ranks together; None: the model's default for each rank.
    Raises: UsageError on all ranks, if `batch_size` is not a multiple of the number of ranks.
    """
    model = MODELS[name]
    ranks = all_ranks().size
    each, rest = divmod(batch_size or model.examples_per_rank * ranks, ranks)
    if rest:
        raise UsageError(
            f"--batch-size {batch_size} is the global batch and does not divide by {ranks} ranks; "
            f"give a multiple, such as {max(1, each) * ranks}"
        )
    return Work(model, each, all_ranks().rank, device)


def _what_is_set(options: CommunicationOptions) -> str:
    default = vars(CommunicationOptions())
    changed = []
    for name, value in vars(options).items():
        if value != default[name]:
            changed.append(f"{name}={value}")
    return ", ".join(changed) or "default"


def _measure(
    communicator: Communicator,
    work: Work,
    batches: Iterator[examples.Batch] | None,
    step: Step,
    steps: int,
) -> tuple[Results, list[float]]:
    """Run `steps` steps with communication, and as many without. The steps before the measurement are not timed.

    Args:
        batches: gives the next step's batch; None: every step uses the same batch.
        step: a training step with communication.
    Returns: this rank's seconds of each step: "step" (whole, with its "input"), "input" (reading the batch) and
        "compute" (a step without communication); and all its losses, of the untimed steps, too.
    """
    times: Results = {"step": [], "input": [], "compute": []}
    losses: list[float] = []
    plain = alone(work)

    def whole() -> None:
        started = time.perf_counter()
        if batches is not None:
            work.take(next(batches))
        read = time.perf_counter()
        # `float` waits for the device: the copy of the loss comes after the optimizer's kernels.
        losses.append(float(step()))
        times["step"].append(time.perf_counter() - started)
        times["input"].append(read - started)

    def computation() -> None:
        started = time.perf_counter()
        float(plain())
        times["compute"].append(time.perf_counter() - started)

    untimed = STEPS_OF_TRIALS if communicator.size > 1 else WARM_UP
    for _ in range(untimed):
        whole()
    for _ in range(WARM_UP):
        computation()
    for values in times.values():
        values.clear()
    for first in range(0, steps, STEPS_PER_BLOCK):
        for turn in (whole, computation):
            communicator.barrier()
            for _ in range(min(STEPS_PER_BLOCK, steps - first)):
                turn()
    return times, losses


def efficiency_of(compute_ms: float, step_ms: float, where: Row) -> tuple[float | None, str]:
    """Return `compute_ms` / `step_ms` and ""; or None and a reason, if ranks share cores: then it would mislead.

    Args: where: the result of `surroundings`.
    """
    if where["oversubscribed"]:
        ranks = where["ranks"]
        cores = where["usable_cores"]
        return None, f"{ranks} ranks share {cores} cores, and slow each other down"
    return compute_ms / step_ms, ""


def ranks_that_differ(communicator: Communicator, module: torch.nn.Module) -> list[int]:
    """Return the ranks, in ascending order, that have parameters with other bits than rank 0's; [] if all are equal.

    Called by: every rank; all get the same list.
    """
    digest = hashlib.sha256()
    for parameter in module.parameters():
        bits = parameter.detach().cpu().contiguous().view(torch.uint8)
        digest.update(bits.numpy().tobytes())
    digests = communicator.all_gather_object(digest.hexdigest())
    return [rank for rank, other in enumerate(digests) if other != digests[0]]


def wrong(row: Row) -> str:
    """Return a row's faults as text: parameters that differ between ranks, losses that are not finite; "" if none."""
    found = []
    if row["ranks_that_differ"]:
        ranks = ", ".join(str(rank) for rank in row["ranks_that_differ"])
        found.append(f"parameters of rank {ranks} are not rank 0's")
    if not row["losses_finite"]:
        found.append("a loss is not finite")
    return "; ".join(found)


def lines(row: Row, where: Row) -> list[str]:
    """Return the row as lines of text."""
    efficiency = f"not given: {row['efficiency_refused']}"
    if row["efficiency"] is not None:
        efficiency = f"{row['efficiency']:.2f} (compute / step)"
    check = "parameters equal on all ranks, losses finite: OK"
    if mistake := wrong(row):
        check = f"FAILED: {mistake}"
    facts = {
        "parameters": f"{row['parameters']:,} ({row['gradient_bytes'] / 1e6:.1f} MB of gradients)",
        "step": f"{row['step_ms']:.2f} ms (p50), {row['step_ms_p99']:.2f} ms (p99)",
        "  input": f"{row['input_ms']:.2f} ms",
        "  compute": f"{row['compute_ms']:.2f} ms (the same step without communication, all ranks at once)",
        "  exposed communication": f"{row['exposed_communication_ms']:.2f} ms",
        "samples/s": f"{row['samples_per_s']:.1f} in all, {row['samples_per_s_per_rank']:.1f} per rank",
        "efficiency": efficiency,
        "slowest rank": f"{row['slowest_rank']}, {row['slowest_ratio']:.2f} times the median rank's compute",
        "check": check,
    }
    heading = (
        f"# train {row['model']} over {where['ranks']} ranks · {where['mpi']} · {where['cpu']}, "
        f"{where['usable_cores']} cores · {where['device']}\n"
        f"# global batch {row['batch_size']}, {row['examples_per_rank']} per rank · "
        f"{row['input']} input · {row['steps']} steps · {row['communication_options']} "
        "communication options"
    )
    table = (f"{name:<24}{text}" for name, text in facts.items())
    ways = (f"# {way}" for way in row["ways"])
    return [heading, *table, *ways]
