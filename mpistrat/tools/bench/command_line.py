"""The command line of `mpistrat-bench`."""

from __future__ import annotations

import ast
import contextlib
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mpistrat.options import CommunicationOptions
from mpistrat.tools.bench.operations import OPERATIONS
from mpistrat.tools.bench.rounds import ROUNDS

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def number_of_bytes(text: str) -> int:
    """Return the number of bytes in a text such as "64M": 64 · 2^20. The units are K, M and G, with or without a B.

    Raises: ArgumentTypeError for another text, and for 0.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper().removesuffix("B"))
    if not found or not int(found[1]):
        raise ArgumentTypeError(f"expected bytes such as 4096, 64K, 16M or 1G, got {text!r}")
    return int(found[1]) * _UNITS[found[2]]


def at_least(smallest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < smallest:
            raise ArgumentTypeError(f"must be at least {smallest}, got {text}")
        return int(text)

    return number


_positive = at_least(1)


def device(text: str) -> str:
    if re.fullmatch(r"[a-z]+(:\d+)?", text):
        return text
    raise ArgumentTypeError(
        f"must be auto, cpu, or a device of torch's such as cuda or cuda:1, got {text!r}"
    )


def dtype(text: str) -> np.dtype[Any]:
    with contextlib.suppress(TypeError):
        if (found := np.dtype(text)).kind in "iufc":
            return found
    raise ArgumentTypeError(f"must be a number of NumPy's (float32, int64, …), got {text!r}")


def communication_options(text: str) -> CommunicationOptions:
    """Return `CommunicationOptions` with the arguments in a text: "bytes_per_pack=4000000,timeout_seconds=60".

    A value that is no Python literal is taken as a string.
    Raises: ArgumentTypeError for an unknown argument or a wrong value.
    """
    options = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            options[name.strip()] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[name.strip()] = value
    try:
        return CommunicationOptions(**options)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(str(error)) from None


# The names of `models.MODELS` and of `torch_collectives.CALLS`, which load torch
MODEL_NAMES = ("mlp", "mlp-large", "resnet50", "transformer")
TORCH_CALLS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)
_TORCH_SIZES = [8, *(4 << shift for shift in range(4, 25, 2))]  # to 64 MB

_SIZES = ("-b --minbytes", "-e --maxbytes", "-f --factor")
_FILES = ("--json", "--plot")
_WORK = ("--model", "--batch-size", "--communication-options", "--device")

# The options of all commands, each with its arguments for argparse
_OPTIONS: dict[str, dict[str, Any]] = {
    "-b --minbytes": {"type": number_of_bytes, "default": "4K", "metavar": "BYTES"},
    "-e --maxbytes": {"type": number_of_bytes, "default": "64M", "metavar": "BYTES"},
    "-f --factor": {"type": at_least(2), "default": 4, "help": "from one size to the next (4)"},
    "-d --dtype": {"type": dtype, "default": "float32", "help": "a NumPy dtype (float32)"},
    "-n --iters": {"type": _positive, "help": "calls per size (as many as take 2 s)"},
    "--window": {"action": "store_true", "help": "use buffers in shared memory, as for gradients"},
    "--device": {
        "type": device,
        "default": "auto",
        "help": "the device to measure: auto (each rank's share of its node's accelerators, or the CPU), cpu, cuda or "
        "another kind, or one device for all ranks, such as cuda:1 (auto)",
    },
    "--json": {"metavar": "FILE", "help": "write all results and samples to FILE"},
    "--plot": {"metavar": "FILE.png", "help": "draw a picture (needs matplotlib)"},
    "--rounds": {"type": _positive, "help": "measurements; the median counts (%(default)s)"},
    "--model": {"choices": MODEL_NAMES, "default": "mlp", "help": "the model to train (mlp)"},
    "--batch-size": {
        "type": _positive,
        "metavar": "EXAMPLES",
        "help": "examples of all ranks together (64 per rank; resnet50 8, transformer 16)",
    },
    "--communication-options": {
        "type": communication_options,
        "metavar": "KEY=VALUE,...",
        "help": "the strategy's communication options, such as bytes_per_pack=4000000",
    },
    "--steps": {"type": _positive, "default": 20, "help": "steps to time (20)"},
    "--input": {
        "default": "synthetic",
        "metavar": "WHAT",
        "help": "synthetic; digits (scikit-learn's); or a FILE: of text for the transformer, otherwise an .npz with "
        "`images` [examples, height, width(, channels)] and `labels` (synthetic)",
    },
    "what": {"choices": ("throughput", "overhead"), "nargs": "?", "default": "throughput"},
    "--examples": {
        "type": _positive,
        "default": 16384,
        "help": "examples of an epoch, for throughput (16384)",
    },
    "--nodes": {
        "type": _positive,
        "nargs": "+",
        "default": [1, 2, 4, 8, 16],
        "metavar": "N",
        "help": "numbers of nodes to predict (1 2 4 8 16)",
    },
    "--ranks-per-node": {"type": _positive, "metavar": "K", "help": "ranks to use on a node (all)"},
    "--size": {
        "type": number_of_bytes,
        "nargs": "+",
        "metavar": "BYTES",
        "help": "sizes to predict (1M 16M 64M), or to compare (8 bytes to 64M)",
    },
    "--calls": {"nargs": "+", "choices": TORCH_CALLS, "default": TORCH_CALLS, "metavar": "CALL"},
    "--model-parameters": {
        "type": float,
        "nargs": "+",
        "metavar": "P",
        "help": "the sizes of the gradients of P float32 parameters: 25e6",
    },
    "--alpha-us": {
        "type": float,
        "help": "the latency in microseconds of a network that this run cannot measure",
    },
    "--gbit": {"type": float, "help": "its bandwidth per node, in 1e9 bits per second"},
}


def parser(prog: str) -> ArgumentParser:
    top = ArgumentParser(
        prog=prog,
        description="Measures over the ranks of an MPI job.",
        epilog=f"example: mpirun -n 8 {prog} all_reduce",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in OPERATIONS:
        sweep = commands.add_parser(
            name,
            aliases=sorted({name.replace("_", "")} - {name}),
            help=f"sweep {name} over sizes",
            description=f"{name} over a range of sizes, with nccl-tests' columns. GB are 1e9 bytes. The limit is the "
            "time in which all ranks at once copy as many bytes; results are checked.",
        )
        window = ["--window"] if name == "all_reduce" else []
        options = [*_SIZES, "-d --dtype", "-n --iters", "--device", *window, *_FILES]
        _add(sweep, options, run="sweep", operation=name, window=False)
    train = commands.add_parser(
        "train",
        help="steps of a training loop, and how long they wait for communication",
        description="Steps of a training loop, and beside them the same computation without communication, on all "
        "ranks at once. The difference is exposed communication. Parameters and losses are checked.",
    )
    _add(train, [*_WORK, *_FILES, "--steps", "--input"], run="train")
    pipelines = commands.add_parser(
        "input",
        help="distributed datasets beside a DataLoader with a DistributedSampler",
        description="`throughput`: an epoch of a DataLoader with a DistributedSampler, and of a distributed dataset. "
        "`overhead`: the time of a step of a distributed dataset, and of the same batches without one.",
    )
    _add(pipelines, [*_FILES, "what", "--rounds", "--examples"], run="input", rounds=15)
    compare = commands.add_parser(
        "compare",
        help="the same work by mpi4py, torch.distributed, and Horovod and TensorFlow where they are installed",
        description="The same work by mpistrat and by its peers, which take turns in one run: loops with mpi4py (on a "
        "device if MPI was seen to take its memory), torch on its own backend (gloo, NCCL, ...), and on CPUs Horovod "
        "and TensorFlow where they are installed.",
    )
    works = compare.add_subparsers(dest="work", required=True, metavar="WORK")
    train = works.add_parser("train", help="a training step")
    _add(train, [*_WORK, "--rounds", *_FILES], run="compare_train", rounds=ROUNDS)
    sums = works.add_parser("all_reduce", aliases=["allreduce"], help="sums of float32, over sizes")
    _add(sums, [*_SIZES, "--device", "--rounds", *_FILES], run="compare_all_reduce", rounds=15)
    calls = works.add_parser("torch", help="calls of torch.distributed, on gloo and on mpistrat")
    options = ["--calls", "--size", "--device", "--rounds", "--json"]
    _add(calls, options, run="compare_torch", size=_TORCH_SIZES, rounds=15)
    plan = commands.add_parser(
        "plan",
        help="predict all_reduce on other numbers of nodes",
        description="Predicts the time of an all_reduce on N nodes by a model that is fitted to times of this run. If "
        "this run has N nodes itself, its measured time stands beside the prediction.",
    )
    _add(plan, ["--nodes", "--ranks-per-node"], run="plan")
    _add(plan.add_mutually_exclusive_group(), ["--size", "--model-parameters"])
    _add(plan, ["--alpha-us", "--gbit", "--json"])
    return top


def _add(parser: Any, options: Iterable[str], **defaults: Any) -> None:
    """Add options to a parser, and set `defaults` for them.

    Args:
        options: keys of `_OPTIONS`: "-b --minbytes".
        defaults: by the option's name; `run` is the key of the command's function in `command._RUN`.
    """
    for option in options:
        parser.add_argument(*option.split(), **_OPTIONS[option])
    parser.set_defaults(**defaults)
