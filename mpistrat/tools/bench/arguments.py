"""What may be written on the command line of `mpistrat-bench`."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.options import CommunicationOptions
from mpistrat.tools.bench.models import MODELS
from mpistrat.tools.bench.operations import OPERATIONS
from mpistrat.tools.bench.rounds import ROUNDS

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def number_of_bytes(text: str) -> int:
    """ "64M" is 64 · 2^20."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper().removesuffix("B"))
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(
            f"expected bytes such as 4096, 64K, 16M or 1G, got {text!r}"
        )
    return int(found[1]) * _UNITS[found[2]]


def at_least(smallest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {text}")
        return int(text)

    return number


def dtype(text: str) -> np.dtype[Any]:
    try:
        found = np.dtype(text)
    except TypeError:
        found = None
    if found is None or found.kind not in "iufc":
        raise argparse.ArgumentTypeError(
            f"must be a number of NumPy's, such as float32 or int64, got {text!r}"
        )
    return found


def communication_options(text: str) -> CommunicationOptions:
    """ "bytes_per_pack=4000000,timeout_seconds=60": arguments of `CommunicationOptions`."""
    given = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            given[name.strip()] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            given[name.strip()] = value
    try:
        return CommunicationOptions(**given)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="mpistrat-bench",
        description="Measures over the ranks of an MPI job: mpirun -n 8 mpistrat-bench all_reduce",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in OPERATIONS:
        _add_sweep(commands, name)
    _add_train(commands)
    _add_input(commands)
    _add_compare(commands)
    _add_plan(commands)
    return top


def _add_files(one: argparse.ArgumentParser) -> None:
    one.add_argument("--json", metavar="FILE", help="write everything, every sample, too")
    one.add_argument("--plot", metavar="FILE.png", help="draw a picture (matplotlib)")


def _add_sweep(commands: Any, name: str) -> None:
    one = commands.add_parser(
        name,
        aliases=[name.replace("_", "")] if "_" in name else [],
        help=f"sweep {name} over sizes",
        description=f"{name} over a range of sizes, with nccl-tests' columns. GB are 1e9 bytes. The limit is the "
        "time in which all ranks at once copy as many bytes; results are checked.",
    )
    one.set_defaults(run="sweep", operation=name)
    _add_sizes(one)
    one.add_argument(
        "-d", "--dtype", type=dtype, default="float32", help="a number of NumPy's (float32)"
    )
    one.add_argument("-n", "--iters", type=at_least(1), help="calls per size (what 2 s allow)")
    if name == "all_reduce":
        one.add_argument(
            "--window",
            action="store_true",
            help="of buffers in shared memory, as gradients are",
        )
    _add_files(one)


def _add_sizes(one: argparse.ArgumentParser) -> None:
    one.add_argument("-b", "--minbytes", type=number_of_bytes, default="4K", metavar="BYTES")
    one.add_argument("-e", "--maxbytes", type=number_of_bytes, default="64M", metavar="BYTES")
    one.add_argument("-f", "--factor", type=at_least(2), default=4, help="between sizes (4)")


def _add_train(commands: Any) -> None:
    one = commands.add_parser(
        "train",
        help="steps of a training loop, and how long they wait for communication",
        description="Steps of a training loop, and beside them the same computation without communication, on all "
        "ranks at once. What a step takes longer is exposed communication. Parameters and losses are checked.",
    )
    one.set_defaults(run="train")
    _add_work(one)
    _add_files(one)
    one.add_argument("--steps", type=at_least(1), default=20, help="to be timed (20)")
    one.add_argument(
        "--input",
        default="synthetic",
        metavar="WHAT",
        help="synthetic; digits (scikit-learn's); or a FILE: of text for the transformer, otherwise an .npz with "
        "`images` [examples, height, width(, channels)] and `labels` (synthetic)",
    )


def _add_work(one: argparse.ArgumentParser) -> None:
    one.add_argument("--model", choices=MODELS, default="mlp", help="(mlp)")
    one.add_argument(
        "--batch-size",
        type=at_least(1),
        metavar="EXAMPLES",
        help="global, over all ranks (64 per rank; resnet50 8, transformer 16)",
    )
    one.add_argument(
        "--communication-options",
        type=communication_options,
        metavar="KEY=VALUE,...",
        help="of the strategy, such as bytes_per_pack=4000000",
    )


def _add_input(commands: Any) -> None:
    one = commands.add_parser(
        "input",
        help="distributed datasets beside a DataLoader with a DistributedSampler",
        description="`throughput`: an epoch of a DataLoader with a DistributedSampler, and of a distributed one. "
        "`overhead`: what a step of a distributed dataset takes beside the same batches alone.",
    )
    one.set_defaults(run="input")
    _add_files(one)
    one.add_argument("what", choices=("throughput", "overhead"), nargs="?", default="throughput")
    one.add_argument(
        "--rounds", type=at_least(1), default=15, help="of which the median counts (15)"
    )
    one.add_argument(
        "--examples", type=at_least(1), default=16384, help="of an epoch, for throughput (16384)"
    )


def _add_compare(commands: Any) -> None:
    one = commands.add_parser(
        "compare",
        help="the same work by mpi4py, torch on gloo, and Horovod and TensorFlow where they are installed",
        description="The same work by mpistrat and by its peers, which take turns in one run, on CPUs: loops with "
        "mpi4py, torch on gloo, and Horovod and TensorFlow where they are installed.",
    )
    what = one.add_subparsers(dest="work", required=True, metavar="WORK")
    train = what.add_parser("train", help="a training step")
    train.set_defaults(run="compare_train")
    _add_work(train)
    train.add_argument(
        "--rounds", type=at_least(1), default=ROUNDS, help=f"turns of each ({ROUNDS})"
    )
    sums = what.add_parser("all_reduce", aliases=["allreduce"], help="sums of float32, over sizes")
    sums.set_defaults(run="compare_all_reduce")
    _add_sizes(sums)
    sums.add_argument("--rounds", type=at_least(1), default=15, help="turns of each (15)")
    for part in (train, sums):
        _add_files(part)


def _add_plan(commands: Any) -> None:
    one = commands.add_parser(
        "plan",
        help="predict all_reduce on other numbers of nodes",
        description="The time of an all_reduce on N nodes, from a model that is fitted to what this run measures; "
        "where the run itself is such a one, beside the time that it takes.",
    )
    one.set_defaults(run="plan")
    one.add_argument(
        "--nodes",
        type=at_least(1),
        nargs="+",
        default=[1, 2, 4, 8, 16],
        metavar="N",
        help="1 2 4 8 16",
    )
    one.add_argument(
        "--ranks-per-node",
        type=at_least(1),
        metavar="K",
        help="as many of a node's ranks (all of them)",
    )
    what = one.add_mutually_exclusive_group()
    what.add_argument("--size", type=number_of_bytes, nargs="+", metavar="BYTES", help="1M 16M 64M")
    what.add_argument(
        "--model-parameters",
        type=float,
        nargs="+",
        metavar="P",
        help="gradients of so many parameters of float32: 25e6",
    )
    one.add_argument(
        "--alpha-us", type=float, help="a network's latency in microseconds, where there is none"
    )
    one.add_argument("--gbit", type=float, help="its bandwidth per node in 1e9 bits per second")
    one.add_argument("--json", metavar="FILE", help="write the model and the predictions")
