"""Check the GPUs, the NCCL between them, and whether MPI takes their memory."""

from __future__ import annotations

import os
import sys

from mpistrat.errors import counted
from mpistrat.machine.gpu_advice import INSTALL_NCCL, ONE_ENVIRONMENT, ONE_RANK_PER_GPU
from mpistrat.machine.gpus import visible_gpus
from mpistrat.machine.library_search import LIBRARY_PATH, libraries_on_path
from mpistrat.machine.notices import ranks_in_words
from mpistrat.tools.doctor.children import ask
from mpistrat.tools.doctor.facts import Driver, Gpus, JobFacts, Ranks, grouped
from mpistrat.tools.doctor.finding import Finding, Findings, findings_of, on_node

ok, warning, problem = findings_of("GPUs")
SECONDS_TO_IMPORT = 60.0
# Headings of docs/troubleshooting.md
_UNUSABLE = "No GPU can be used"
_NCCLS = "Different versions of NCCL"
WHEEL = "the wheel that torch needs"
BEGIN = '{"torch": '  # the start of the child's line; libraries may print before and after it
_Node = tuple[str, Ranks, Gpus]  # its name, its ranks, and the GPUs that its first rank sees

# The child imports torch first, as mpistrat does. CuPy then uses the libnccl that torch has loaded.
_IMPORT = r"""
import ctypes, glob, json, os, sys
seen = {"torch": "", "nccl_loaded": []}
wheels = [p for top in sys.path for p in glob.glob(os.path.join(top, "nvidia", "nccl*", "lib", "libnccl.so*"))]
seen["wheels"] = list(dict.fromkeys(map(os.path.realpath, wheels)))  # as maps has them
for name in ("torch", "cupy"):
    try:
        if name == "torch":
            import torch
            version, cuda = str(torch.__version__), torch.version.cuda or ""
            builds = (("ROCm", getattr(torch.version, "hip", "")), ("oneAPI", getattr(torch.version, "xpu", "")))
            seen["torch_other"] = " ".join(f"{name} {number}" for name, number in builds if number)
            seen.update(torch=version, torch_cuda=cuda, torch_gpus=torch.accelerator.device_count())
        else:
            import cupy
            seen["cupy"] = cupy.__version__
            from cupy.cuda import nccl
            nccl.available
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != name:
            seen[name + "_error"] = repr(error)
with open("/proc/self/maps") as maps:
    loaded = sorted({line.split(maxsplit=5)[-1].strip() for line in maps if "/libnccl.so" in line})
for path in loaded:
    number = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    number = number.value
    seen["nccl_loaded"].append([path, f"{number // 10000}.{number // 100 % 100}.{number % 100}"])
print("\n" + json.dumps(seen))
"""


def look(driver: Driver) -> Gpus:
    """Return the GPUs and the NCCL that a child process sees when it imports torch and CuPy.

    A child process does it, because the import may crash or hang. Its failure is in `torch_error` of the result.
    Called by: the first rank on each node, for its node.
    Args: driver: if CUDA's driver hangs, no child is started, and `torch_error` says so.
    """
    if driver.hangs:  # every question would take its full time limit while the other ranks wait
        return Gpus(torch_error="not asked: CUDA's driver hangs")
    answer = ask([sys.executable, "-c", _IMPORT], SECONDS_TO_IMPORT)
    named = list(visible_gpus())
    on_path = [[LIBRARY_PATH, path] for path in libraries_on_path("libnccl.so*")]
    seen = answer.json(BEGIN)
    if seen is None:
        why = answer.failure("a child process that did so did not tell what it saw")
        return Gpus(named, torch_error=f"importing torch and CuPy: {why}", nccl_visible=on_path)
    wheels = seen.pop("wheels")
    visible = [[WHEEL, path] for path in wheels]
    for origin, path in on_path:
        if os.path.realpath(path) not in wheels:
            visible.append([origin, path])
    return Gpus(named, **seen, nccl_visible=visible)


def check(job: JobFacts) -> Findings:
    nodes: list[_Node] = []
    for name, ranks in job.nodes().items():
        if gpus := ranks[0].gpus:
            nodes.append((name, ranks, gpus))
    some_have = any(_have(ranks, gpus) for _, ranks, gpus in nodes)
    imports: list[Finding] = []
    found: list[Finding] = []
    for name, ranks, gpus in nodes:
        imports += on_node(name, _torch_import(ranks, gpus))
        found += on_node(name, _gpus_of_node(ranks, gpus, some_have))
    yield from imports
    yield from found
    if found or some_have:
        yield from _nccl_versions(nodes)
    elif nodes:
        yield ok("No GPU is visible: neither NCCL nor a CUDA-aware MPI is needed.")


def _torch_import(ranks: Ranks, gpus: Gpus) -> Findings:
    if gpus.torch_error and not ranks[0].driver.hangs:
        yield problem(
            f"torch cannot be imported: {gpus.torch_error}.",
            "pip install --force-reinstall torch, of the build that fits this machine "
            "(docs/getting_started.md: which torch comes from where)",
            "torch cannot be imported",
        )


def _have(ranks: Ranks, gpus: Gpus) -> bool:
    """Return whether CUDA's driver shows a GPU to any rank of the node, or torch sees one.

    GPUs that only CUDA_VISIBLE_DEVICES or nvidia-smi names do not count, because a rank may be unable to use them.
    """
    return any(rank.driver.gpus for rank in ranks) or gpus.torch_gpus > 0


def _gpus_of_node(ranks: Ranks, gpus: Gpus, some_have: bool) -> Findings:
    """Yield the findings about the GPUs of one node.

    Yields nothing if all is as on a machine without GPUs: no rank can use a GPU, CUDA's driver has no error, neither
    CUDA_VISIBLE_DEVICES nor nvidia-smi lists a GPU, and no other node has one.

    Args: some_have: whether any node of the job has GPUs that a program can use.
    """
    named = f"CUDA_VISIBLE_DEVICES or nvidia-smi names {counted(len(gpus.named), 'GPU')}"
    drivers = (rank.driver for rank in ranks)
    errors = dict.fromkeys(d.error for d in drivers if d.installed and d.error)
    if _have(ranks, gpus):
        yield from _usable(ranks, gpus)
    elif errors:
        yield problem(
            f"No GPU can be used: {'; '.join(errors)}.",
            "compare with nvidia-smi, also outside the container; reload the node's driver, or take the libcuda of "
            "another driver out of LD_LIBRARY_PATH",
            _UNUSABLE,
        )
    elif gpus.named and not ranks[0].driver.installed:
        yield warning(
            f"{named}, but there is no driver of CUDA's here (libcuda.so.1): values stay in host memory.",
            "in a container: start it with the GPUs (apptainer exec --nv, docker run --gpus all); on a machine "
            "without GPUs: unset CUDA_VISIBLE_DEVICES",
            _UNUSABLE,
        )
    elif gpus.named:
        yield problem(
            f"{named}, but CUDA's driver shows this rank none.",
            "unset CUDA_VISIBLE_DEVICES, or name GPUs that the job has (Slurm sets it itself: --gpus-per-node=…)",
            _UNUSABLE,
        )
    elif some_have:
        yield problem(
            "No GPU is visible, while other nodes have some: values then go through the host everywhere.",
            "ask Slurm for GPUs on every node (--gpus-per-node=…), and look at nvidia-smi on this node",
            _UNUSABLE,
        )


def _usable(ranks: Ranks, gpus: Gpus) -> Findings:
    """Yield the findings about a node with GPUs that a program can use: on ranks, torch, NCCL, and MPI."""
    yield from _without(ranks)
    number = len(ranks[0].driver.gpus) or gpus.torch_gpus
    if not number:
        return  # only the first rank tries torch, NCCL and MPI, and it has no GPU
    yield from _torch_build(gpus, number)
    yield from _shared_gpus(ranks, number)
    if gpus.torch_other:
        yield ok(f"torch's own collectives serve its tensors on GPUs ({gpus.torch_other}).")
    else:
        yield from _nccl(gpus)
    if gpus.mpi_refusal is not None:
        yield _mpi(gpus.mpi_refusal)


def _torch_build(gpus: Gpus, number: int) -> Findings:
    """Yield a finding if torch cannot use the node's `number` GPUs: it is a build for CPUs, or for a newer driver.

    Yields nothing if torch is not installed.
    """
    if not gpus.torch:
        return
    verb = "is" if number == 1 else "are"
    there = f"there {verb} {counted(number, 'GPU')}"
    build = gpus.torch_other
    if not build and gpus.torch_cuda:
        build = f"CUDA {gpus.torch_cuda}"
    if not build:
        yield problem(
            f"torch {gpus.torch} is a build for CPUs, and {there}.",
            "pip install torch, of a CUDA build (docs/getting_started.md: which torch comes from where)",
            "Torch not compiled with CUDA enabled",
        )
    elif not gpus.torch_gpus:
        yield problem(
            f"torch {gpus.torch} ({build}) sees no GPU, and {there}: it is newer than the driver.",
            "compare with the CUDA version that nvidia-smi shows; update the driver or take an older build of torch",
            "The NVIDIA driver on your system is too old",
        )


def _shared_gpus(ranks: Ranks, number: int) -> Findings:
    """Yield a warning if more ranks of a node use GPUs than the node has. GPUs are counted over all of its ranks.

    Ranks may see different GPUs, by --gpus-per-task or by a script that the launcher starts.
    """
    visible: set[str] = set()
    for rank in ranks:
        visible.update(rank.driver.gpus)
    gpus = max(number, len(visible))
    sharing = [rank for rank in ranks if rank.driver.gpus] or ranks
    if len(sharing) > gpus:
        yield warning(
            f"{counted(len(sharing), 'rank')} share {counted(gpus, 'GPU')}: NCCL refuses that, and values go "
            "through the host.",
            f"{ONE_RANK_PER_GPU}; --ntasks-per-node={gpus}",
            "Duplicate GPU detected",
        )


def _mpi(refusal: str) -> Finding:
    """Return a finding on whether MPI takes GPU memory: ok if `refusal` is "", else a warning.

    Args: refusal: the result of `device_memory_proof.reason_against`.
    """
    if not refusal:
        return ok("MPI takes memory of GPUs: a child process has sent some.")
    if "that sent device memory" not in refusal:
        return warning(
            f"Whether MPI takes memory of GPUs is not known: {refusal}.",
            "correct this cause, and run mpistrat doctor again",
            "MPI does not take memory of GPUs",
        )
    return warning(
        f"MPI does not take memory of GPUs: {refusal}. Where NCCL cannot be used, values go through pinned memory.",
        "load a CUDA-aware build of MPI (Open MPI with UCX and CUDA; MPICH_GPU_SUPPORT_ENABLED=1 on a Cray) if "
        "several ranks share a GPU",
        "MPI does not take memory of GPUs",
    )


def _without(ranks: Ranks) -> Findings:
    """Find ranks that see no GPU while other ranks of the node see some."""
    without = [rank for rank in ranks if not rank.driver.gpus]
    if 0 < len(without) < len(ranks):
        numbers_by_error = grouped((rank.driver.error, rank.rank) for rank in without)
        listed = []
        for error, numbers in numbers_by_error.items():
            text = ranks_in_words(numbers)
            if error:
                text += f" ({error})"
            listed.append(text)
        yield problem(
            f"CUDA's driver shows GPUs to some ranks of the node, and none to {'; '.join(listed)}.",
            "give each rank a GPU: look for the option or script that sets CUDA_VISIBLE_DEVICES (--gpus-per-task=1, "
            "--gpu-bind=…, a script between launcher and program); after an error, look at nvidia-smi",
            _UNUSABLE,
        )


def _nccl(gpus: Gpus) -> Findings:
    loaded = gpus.nccl_loaded
    if len(loaded) > 1:
        listed = " and ".join(f"{version} ({path})" for path, version in loaded)
        yield problem(
            f"A process has loaded {len(loaded)} NCCLs: {listed}.",
            "keep one: take NCCL's folder out of LD_LIBRARY_PATH and LD_PRELOAD, and pip uninstall other "
            "nvidia-nccl-cu* wheels than torch's",
            _NCCLS,
        )
    elif not gpus.cupy and not gpus.torch:
        missing = "CuPy is missing"
        if gpus.cupy_error:
            missing += f" ({gpus.cupy_error})"
        yield warning(
            f"{missing}, and so is torch: no array of a program is on a GPU.",
            "pip install torch, of a CUDA build, or cupy-cuda13x (cupy-cuda12x where CUDA is 12)",
            "CuPy is missing",
        )
    elif not loaded:
        yield warning(
            "Neither torch nor CuPy has found a libnccl: values on GPUs go a slower way.",
            INSTALL_NCCL,
            "Neither torch nor CuPy has found a libnccl",
        )
    else:
        path, version = loaded[0]
        yield from _origin_of_nccl(path, version, gpus.nccl_visible)


def _origin_of_nccl(path: str, version: str, visible: list[list[str]]) -> Findings:
    """Warn of an NCCL that is not the one from torch's wheel, or of another NCCL in LD_LIBRARY_PATH.

    Yields ok with the loaded NCCL, unless it is not the wheel's.
    Args:
        path: the loaded NCCL.
        visible: pairs [origin, path] of the NCCLs that a process could load, as in `Gpus.nccl_visible`.
    """
    paths = grouped((origin, path) for origin, path in visible)
    wheels = paths.get(WHEEL, [])
    others = sorted(paths.get(LIBRARY_PATH, []))
    if wheels and path not in wheels:
        yield warning(
            f"NCCL {version} is {path}, and not {WHEEL} ({wheels[0]}).",
            f"take {path} out of LD_LIBRARY_PATH, unless you want to use that NCCL",
            _NCCLS,
        )
        return
    yield ok(f"NCCL {version}, one copy: {path}.")
    if wheels and others:
        yield warning(
            f"LD_LIBRARY_PATH has another NCCL, {others[0]}: a program that imports cupy before torch "
            "loads that one.",
            "import torch first, or take its folder out of LD_LIBRARY_PATH",
            _NCCLS,
        )


def _nccl_versions(nodes: list[_Node]) -> Findings:
    versions = [(gpus.nccl_loaded[0][1], name) for name, _, gpus in nodes if gpus.nccl_loaded]
    hosts = grouped(versions)
    if len(hosts) > 1:
        on_hosts = [f"{version} on {', '.join(names)}" for version, names in hosts.items()]
        listed = "; ".join(on_hosts)
        yield problem(f"Nodes have different versions of NCCL: {listed}.", ONE_ENVIRONMENT, _NCCLS)
