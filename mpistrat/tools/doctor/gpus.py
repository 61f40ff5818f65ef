"""GPUs, the NCCL between them, and whether MPI takes their memory."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator

from mpistrat.cluster_resolver.how_started import environment_of_others
from mpistrat.cluster_resolver.library_search import LIBRARY_PATH, libraries_on_path
from mpistrat.machine.gpus import visible_gpus
from mpistrat.tools.doctor.children import ask, last_words
from mpistrat.tools.doctor.facts import Driver, Gpus, Job, Rank
from mpistrat.tools.doctor.finding import OK, PROBLEM, WARNING, Finding
from mpistrat.tools.doctor.wording import count, ranks_in_words

CHECK = "GPUs"
SECONDS_TO_IMPORT = 60.0
WHEEL = "the wheel that torch needs"
BEGIN = '{"torch": '  # of the line that the child tells

# Torch first, as mpistrat does it: CuPy then takes the libnccl that is there.
_IMPORT = r"""
import ctypes, glob, json, os, sys
told = {"torch": "", "torch_error": "", "torch_cuda": "", "torch_gpus": 0, "cupy": "", "cupy_error": ""}
wheels = [p for top in sys.path for p in glob.glob(os.path.join(top, "nvidia", "nccl*", "lib", "libnccl.so*"))]
try:
    import torch
    told.update(torch=str(torch.__version__), torch_cuda=torch.version.cuda or "", torch_gpus=torch.cuda.device_count())
except ModuleNotFoundError as error:
    if error.name != "torch":
        told["torch_error"] = repr(error)
except Exception as error:
    told["torch_error"] = repr(error)
try:
    import cupy
    told["cupy"] = cupy.__version__
    from cupy.cuda import nccl
    nccl.available
except ModuleNotFoundError as error:
    if error.name != "cupy":
        told["cupy_error"] = repr(error)
except Exception as error:
    told["cupy_error"] = repr(error)
with open("/proc/self/maps") as maps:
    loaded = sorted({line.split(maxsplit=5)[-1].strip() for line in maps if "/libnccl.so" in line})
told["nccl_loaded"] = []
for path in loaded:
    number = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    number = number.value
    told["nccl_loaded"].append([path, f"{number // 10000}.{number // 100 % 100}.{number % 100}"])
told["wheels"] = list(dict.fromkeys(map(os.path.realpath, wheels)))  # as maps has them
print("\n" + json.dumps(told))
"""


def look(driver: Driver) -> Gpus:
    """What a child sees that imports the libraries: this process need not have them, nor survive them."""
    if driver.hangs:  # each would wait for its own limit, and the other ranks for this one
        return Gpus(torch_error="not asked: CUDA's driver hangs")
    answer = ask([sys.executable, "-c", _IMPORT], SECONDS_TO_IMPORT, environment_of_others())
    named = list(visible_gpus())
    on_path = [[LIBRARY_PATH, path] for path in libraries_on_path("libnccl.so*")]
    if answer.ended:
        words = last_words(answer.errors, 1)
        why = f"importing torch and CuPy: {answer.ended}" + (f", {words}" if words else "")
        return Gpus(named, torch_error=why, nccl_visible=on_path)
    lines = [line for line in answer.output.splitlines() if line.startswith(BEGIN)]
    try:
        told = json.loads(lines[-1])  # others may have printed, before it and at the end of Python
    except (IndexError, ValueError):
        words = last_words(answer.output, 1)
        why = "importing torch and CuPy: a child that did so did not tell what it saw"
        return Gpus(named, torch_error=f"{why}, {words}" if words else why, nccl_visible=on_path)
    wheels = told.pop("wheels")
    of_wheels = [[WHEEL, path] for path in wheels]
    others = [found for found in on_path if os.path.realpath(found[1]) not in wheels]
    return Gpus(named, **told, nccl_visible=[*of_wheels, *others])


def check(job: Job) -> Iterator[Finding]:
    nodes = zip(job.nodes(), job.node_names(), strict=True)
    told = [(ranks, ranks[0].gpus, name) for ranks, name in nodes if ranks[0].gpus]
    for ranks, gpus, name in told:
        if gpus.torch_error and not ranks[0].driver.hangs:
            yield Finding(
                CHECK,
                PROBLEM,
                f"torch cannot be imported: {gpus.torch_error}.",
                "pip install --force-reinstall torch, of the build that fits this machine "
                "(docs/getting_started.md: which torch comes from where)",
                (name,),
            )
    if not any(_have(ranks) or _errors(ranks) or gpus.named for ranks, gpus, _ in told):
        if told:
            yield Finding(
                CHECK,
                OK,
                "No GPU is visible: neither NCCL nor a CUDA-aware MPI is needed.",
            )
        return
    some_have = any(_have(ranks) for ranks, _, _ in told)
    for ranks, gpus, name in told:
        of_node = _of_node(ranks, gpus) if _have(ranks) else _none(ranks, gpus, some_have)
        for finding in of_node:
            yield dataclasses.replace(finding, nodes=(name,))
    yield from _nccl_versions([(gpus, name) for _, gpus, name in told])


def _number(rank: Rank) -> int:
    """How many a program on this rank can use: what else names GPUs may speak of another machine, or not be there."""
    assert rank.gpus is not None
    return len(rank.driver.gpus) or rank.gpus.torch_gpus


def _have(ranks: list[Rank]) -> bool:
    """Whether any rank of a node can use one."""
    return any(rank.driver.gpus for rank in ranks) or _number(ranks[0]) > 0


def _errors(ranks: list[Rank]) -> list[str]:
    """Of a node's driver, where it has one: each once."""
    drivers = [rank.driver for rank in ranks if rank.driver.installed]
    return list(dict.fromkeys(driver.error for driver in drivers if driver.error))


def _none(ranks: list[Rank], gpus: Gpus, others_have: bool) -> Iterator[Finding]:
    """Of a node without a GPU that a program could use."""
    named = f"CUDA_VISIBLE_DEVICES or nvidia-smi names {count(len(gpus.named), 'GPU')}"
    errors = _errors(ranks)
    if errors:
        yield Finding(
            CHECK,
            PROBLEM,
            f"No GPU can be used: {'; '.join(errors)}.",
            "compare with what nvidia-smi says, outside containers too; the node's driver must be reloaded, or "
            "LD_LIBRARY_PATH has the libcuda of another",
        )
    elif gpus.named and not ranks[0].driver.installed:
        yield Finding(
            CHECK,
            WARNING,
            f"{named}, but there is no driver of CUDA's here (libcuda.so.1): values stay in host memory.",
            "in a container: start it with the GPUs (apptainer exec --nv, docker run --gpus all); on a machine "
            "without GPUs: unset CUDA_VISIBLE_DEVICES",
        )
    elif gpus.named:
        yield Finding(
            CHECK,
            PROBLEM,
            f"{named}, but CUDA's driver shows this rank none.",
            "unset CUDA_VISIBLE_DEVICES, or name GPUs that the job has (Slurm sets it itself: --gpus-per-node=…)",
        )
    elif others_have:
        yield Finding(
            CHECK,
            PROBLEM,
            "No GPU is visible, while other nodes have some: values then go through the host everywhere.",
            "ask Slurm for them on every node (--gpus-per-node=…), and look at nvidia-smi there",
        )


def _of_node(ranks: list[Rank], gpus: Gpus) -> Iterator[Finding]:
    """Of a node with GPUs."""
    yield from _without(ranks)
    number = _number(ranks[0])
    if not number:
        return  # the first rank, which alone has tried torch, NCCL and MPI, had none to try them on
    there = f"{'is' if number == 1 else 'are'} {count(number, 'GPU')}"
    if gpus.torch and not gpus.torch_cuda:
        yield Finding(
            CHECK,
            PROBLEM,
            f"torch {gpus.torch} is a build for CPUs, and there {there}.",
            "pip install torch, of a CUDA build (docs/getting_started.md: which torch comes from where)",
        )
    elif gpus.torch and not gpus.torch_gpus:
        yield Finding(
            CHECK,
            PROBLEM,
            f"torch {gpus.torch} (CUDA {gpus.torch_cuda}) sees no GPU, and there {there}: its CUDA "
            "is newer than the driver.",
            "compare with the CUDA version that nvidia-smi shows; update the driver or take an older build of torch",
        )
    # --gpus-per-task, and scripts between launcher and program, give each rank others.
    between = max(number, len({name for rank in ranks for name in rank.driver.gpus}))
    sharing = [rank for rank in ranks if rank.driver.gpus] or ranks
    if len(sharing) > between:
        yield Finding(
            CHECK,
            WARNING,
            f"{count(len(sharing), 'rank')} share {count(between, 'GPU')}: NCCL refuses that, and values go "
            "through the host.",
            f"start one rank per GPU: --ntasks-per-node={between}",
        )
    yield from _nccl(gpus)
    if gpus.mpi_takes_gpu:
        yield Finding(CHECK, OK, "MPI takes memory of GPUs: a child process has sent some.")
    elif gpus.mpi_takes_gpu is not None:
        yield Finding(
            CHECK,
            WARNING,
            "MPI does not take memory of GPUs: a child process tried. Where NCCL cannot be used, values go "
            "through pinned host memory.",
            "load a CUDA-aware build of MPI (Open MPI with UCX and CUDA; MPICH_GPU_SUPPORT_ENABLED=1 on a Cray) if "
            "several ranks share a GPU",
        )


def _without(ranks: list[Rank]) -> Iterator[Finding]:
    """Of ranks that the driver shows no GPU, while it shows others of the node some."""
    without: dict[str, list[int]] = {}
    for rank in ranks:
        if not rank.driver.gpus:
            without.setdefault(rank.driver.error, []).append(rank.rank)
    if not without or not any(rank.driver.gpus for rank in ranks):
        return
    listed = [
        ranks_in_words(numbers) + (f" ({error})" if error else "")
        for error, numbers in without.items()
    ]
    yield Finding(
        CHECK,
        PROBLEM,
        f"CUDA's driver shows GPUs to some ranks of the node, and none to {'; '.join(listed)}.",
        "give each rank one: look at what sets CUDA_VISIBLE_DEVICES for each (--gpus-per-task=1, --gpu-bind=…, a "
        "script between launcher and program), and, after an error, at nvidia-smi",
    )


def _nccl(gpus: Gpus) -> Iterator[Finding]:
    loaded, wheels = gpus.nccl_loaded, [path for by, path in gpus.nccl_visible if by == WHEEL]
    others = sorted({path for by, path in gpus.nccl_visible if by != WHEEL})
    if len(loaded) > 1:
        told = " and ".join(f"{version} ({path})" for path, version in loaded)
        yield Finding(
            CHECK,
            PROBLEM,
            f"A process has loaded {len(loaded)} NCCLs: {told}.",
            "keep one: take NCCL's folder out of LD_LIBRARY_PATH and LD_PRELOAD, and pip uninstall other "
            "nvidia-nccl-cu* wheels than torch's",
        )
    elif not gpus.cupy:
        why = f" ({gpus.cupy_error})" if gpus.cupy_error else ""
        yield Finding(
            CHECK,
            WARNING,
            f"CuPy is missing{why}, by which NCCL is used: values on GPUs go a slower way.",
            "pip install 'mpistrat[cuda]'",
        )
    elif not loaded:
        yield Finding(
            CHECK,
            WARNING,
            "Neither torch nor CuPy has found a libnccl: values on GPUs go a slower way.",
            "pip install nvidia-nccl-cu13 (or cu12, as torch's CUDA is)",
        )
    elif wheels and loaded[0][0] not in wheels:
        yield Finding(
            CHECK,
            WARNING,
            f"NCCL {loaded[0][1]} is {loaded[0][0]}, and not {WHEEL} ({wheels[0]}).",
            f"take {loaded[0][0]} out of LD_LIBRARY_PATH, unless that is what you wish",
        )
    else:
        yield Finding(CHECK, OK, f"NCCL {loaded[0][1]}, one copy: {loaded[0][0]}.")
        if wheels and others:
            yield Finding(
                CHECK,
                WARNING,
                f"LD_LIBRARY_PATH has another NCCL, {others[0]}: a program that imports cupy before torch "
                "loads that one.",
                "import torch first, or take its folder out of LD_LIBRARY_PATH",
            )


def _nccl_versions(told: list[tuple[Gpus, str]]) -> Iterator[Finding]:
    having: dict[str, list[str]] = {}
    for gpus, name in told:
        for _, version in gpus.nccl_loaded[:1]:
            having.setdefault(version, []).append(name)
    if len(having) > 1:
        listed = "; ".join(f"{version} on {', '.join(names)}" for version, names in having.items())
        yield Finding(
            CHECK,
            PROBLEM,
            f"Nodes have different versions of NCCL: {listed}.",
            "start all ranks with one environment, and the same modules on all nodes",
        )
