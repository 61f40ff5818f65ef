"""The decisions about launchers and libraries, with the texts that real ones give."""

import pytest

from mpistrat.cluster_resolver import launcher
from mpistrat.errors import TopologyError

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25\nMPICH configure:    --with-device=ch4:ucx,ofi\n"
MPICH_PMIX = MPICH + "MPICH configure:    --with-pmix=/usr\n"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11, repo rev: v5.0.11rc1\0"
OPEN_MPI_4 = (
    "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022\0"
)
INTEL = "Intel(R) MPI Library 2021.18 for Linux* OS\n\0"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.27.26 (ANL base 3.4a2)\n"
MVAPICH = "MVAPICH2 Version      :\t2.3.7\n"
UNKNOWN = "Some Other MPI 1.0"

HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "9"}
PRTERUN = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "PMIX_RANK": "1",
    "PRTE_LAUNCHED": "1",
}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
SRUN_PMI2 = {**SRUN, **HYDRA}
SRUN_PMIX = {**SRUN, "PMIX_RANK": "1"}
SBATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
ORTED_OF_MPIRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", **PRTERUN}


@pytest.mark.parametrize(
    ("version", "family", "name"),
    [
        (MPICH, "MPICH", "MPICH 5.0.2"),
        (OPEN_MPI, "Open MPI", "Open MPI v5.0.11"),
        (INTEL, "MPICH", "Intel(R) MPI Library 2021.18 for Linux* OS"),
        (CRAY, "MPICH", "MPI CRAY MPICH version 8.1.27.26 (ANL base 3.4a2)"),
        (MVAPICH, "MPICH", "MVAPICH2 2.3.7"),
        (UNKNOWN, "", UNKNOWN),
        ("", "", "an unknown MPI"),
    ],
)
def test_libraries_are_recognised(version, family, name):
    assert launcher.library_family(version) == family
    assert launcher.library_name(version) == name


@pytest.mark.parametrize(
    ("environ", "size", "rank", "launched_by"),
    [
        (HYDRA, 2, 1, "MPICH"),
        (PRTERUN, 2, 1, "Open MPI"),
        (SRUN, 2, 1, "srun"),
        (SRUN_PMI2, 2, 1, "pmi2"),
        (SRUN_PMIX, 2, 1, "srun"),
        (ORTED_OF_MPIRUN, 2, 1, "Open MPI"),
        ({"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "3"}, 4, 3, "mpirun_rsh"),
        ({"PALS_RANKID": "3"}, None, 3, "PALS"),
        ({"PMIX_RANK": "0"}, None, 0, "PMIx"),
    ],
)
def test_claims(environ, size, rank, launched_by):
    claim = launcher.read_claim(environ)
    assert (claim.size, claim.rank) == (size, rank)
    assert launched_by in claim.launcher


@pytest.mark.parametrize("environ", [{}, SBATCH_SCRIPT, {"SLURM_STEP_NUM_TASKS": "2"}])
def test_no_claim(environ):
    assert launcher.read_claim(environ) is None


def test_the_loaded_library_s_own_launcher_counts_most():
    nested = {**PRTERUN, "PMI_SIZE": "3", "PMI_RANK": "2"}
    assert launcher.read_claim(nested, launcher.OPEN_MPI).size == 2
    assert launcher.read_claim(nested, launcher.MPICH).size == 3


@pytest.mark.parametrize("text", ["two", "", "-1", "1.0", "٢"])
def test_a_variable_that_is_no_number_is_named(text):
    with pytest.raises(TopologyError, match=f"PMI_SIZE={text!r} is not a number"):
        launcher.read_claim({"PMI_SIZE": text, "PMI_RANK": "0"})


@pytest.mark.parametrize(
    ("environ", "version"),
    [
        (HYDRA, OPEN_MPI),
        (HYDRA, OPEN_MPI_4),
        (SRUN_PMI2, OPEN_MPI),
        (PRTERUN, MPICH),
        (PRTERUN, INTEL),
        (PRTERUN, CRAY),
        ({**PRTERUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, MPICH),
    ],
)
def test_mismatches_that_are_certain_before_mpi_init(environ, version):
    with pytest.raises(
        TopologyError,
        match=r"(?s)(2 ranks were|1 rank was) started.*but each would see.*MPI4PY_LIBMPI",
    ):
        launcher.check_library(environ, version, "/x/libmpi.so")


@pytest.mark.parametrize(
    ("environ", "version"),
    [
        ({}, OPEN_MPI),
        (SBATCH_SCRIPT, OPEN_MPI),
        (HYDRA, MPICH),
        (HYDRA, INTEL),
        (HYDRA, UNKNOWN),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, OPEN_MPI),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, INTEL),
        (PRTERUN, OPEN_MPI),
        (PRTERUN, MPICH_PMIX),
        ({**PRTERUN, **HYDRA}, OPEN_MPI),
        ({**PRTERUN, **HYDRA}, MPICH),
        (SRUN, OPEN_MPI),
        (SRUN_PMI2, OPEN_MPI_4),
        ({**SRUN_PMI2, "PMIX_RANK": "1"}, OPEN_MPI),
    ],
)
def test_what_may_work_is_tried(environ, version):
    launcher.check_library(environ, version)


def test_the_message_names_what_was_found():
    with pytest.raises(TopologyError) as caught:
        launcher.check_world(HYDRA, OPEN_MPI, 1, 0, "/venv/lib/libmpi.so.40")
    text = str(caught.value)
    assert text.startswith(
        "2 ranks were started (PMI_SIZE=2, PMI_RANK=1), but each sees a world of 1: "
    )
    for part in (
        "Open MPI v5.0.11 (/venv/lib/libmpi.so.40)",
        "MPI module",
        "srun --mpi=pmi2",
        "shadows",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("environ", "size", "rank"),
    [
        ({}, 1, 0),
        ({}, 4, 2),
        (SBATCH_SCRIPT, 1, 0),
        (HYDRA, 2, 1),
        (PRTERUN, 2, 1),
        (ORTED_OF_MPIRUN, 2, 1),
        (SRUN_PMIX, 2, 1),
        ({**HYDRA, "MPICH_RANK_REORDER_METHOD": "3"}, 2, 0),
        ({**SRUN, "SLURM_HET_SIZE": "2"}, 6, 5),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_HET_SIZE": "2"}, 1, 0),
        ({"PALS_RANKID": "0"}, 1, 0),
        ({"PALS_RANKID": "3"}, 4, 3),
    ],
)
def test_worlds_that_agree(environ, size, rank):
    launcher.check_world(
        environ, OPEN_MPI if "OMPI_COMM_WORLD_SIZE" in environ else MPICH, size, rank
    )


@pytest.mark.parametrize(
    ("environ", "size", "rank", "message"),
    [
        (
            SRUN,
            1,
            0,
            "2 ranks were started .SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1.*each sees a world of 1",
        ),
        (HYDRA, 3, 1, "2 ranks were started .*MPI sees a world of 3"),
        (HYDRA, 2, 0, "calls this process rank 1 .*but MPI calls it rank 0 of 2"),
        ({**SRUN, "SLURM_HET_SIZE": "2"}, 1, 0, "each sees a world of 1"),
        ({"PMIX_RANK": "1"}, 1, 0, "several ranks were started .PMIX_RANK=1.*world of 1"),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, 2, 0, "1 rank was started"),
    ],
)
def test_worlds_that_disagree(environ, size, rank, message):
    with pytest.raises(TopologyError, match=message):
        launcher.check_world(environ, MPICH, size, rank)


def test_without_mpi_one_process_is_one_rank_and_several_are_an_error():
    for environ in ({}, SBATCH_SCRIPT, {"PMI_SIZE": "1", "PMI_RANK": "0"}):
        launcher.check_alone(environ, "no libmpi")
    for environ in (HYDRA, PRTERUN, SRUN, {"PMIX_RANK": "0"}):
        with pytest.raises(
            TopologyError, match=r"(?s)started.*no MPI library.*no libmpi.*pip install"
        ):
            launcher.check_alone(environ, "no libmpi")


def test_a_chosen_library_that_does_not_load_is_an_error_even_alone():
    with pytest.raises(
        TopologyError, match=r"(?s)MPI4PY_LIBMPI=/x/libmpi.so cannot be used: too short.*text file"
    ):
        launcher.check_alone({"MPI4PY_LIBMPI": "/x/libmpi.so"}, "too short")


@pytest.mark.parametrize(
    "name",
    [
        "PMI_RANK",
        "PMI_FD",
        "PMI2_X",
        "PMIX_RANK",
        "PMIX_SERVER_URI41",
        "OMPI_UNIVERSE_SIZE",
        "HYDI_CONTROL_FD",
    ],
)
def test_what_children_must_not_inherit(name):
    assert launcher.confuses_children(name)


@pytest.mark.parametrize(
    "name",
    [
        "OMPI_MCA_btl",
        "MPICH_GPU_SUPPORT_ENABLED",
        "UCX_TLS",
        "PMIX_MCA_gds",
        "PMIX_PREFIX",
        "SLURM_PROCID",
        "PATH",
    ],
)
def test_what_children_keep(name):
    assert not launcher.confuses_children(name)


def test_what_says_a_rank_stays_readable_and_what_joins_a_job_does_not():
    says = "PMI_RANK PMI_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALRANKID SLURM_PROCID"
    joins = "PMI_FD PMI_PORT PMIX_NAMESPACE PMIX_RANK HYDI_CONTROL_FD OMPI_UNIVERSE_SIZE"
    assert [name for name in f"{says} {joins}".split() if launcher.joins_job(name)] == joins.split()


def test_a_child_is_not_the_rank_whose_variables_it_has_inherited():
    rank = {**HYDRA, **PRTERUN}
    child = {name: value for name, value in rank.items() if not launcher.joins_job(name)}
    assert {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} < child.keys()
    assert launcher.read_claim(launcher.without_inherited(child)) is None
    for mpi in (HYDRA, PRTERUN):  # a launcher that the child has started
        claim = launcher.read_claim(launcher.without_inherited({**child, **mpi}))
        assert claim is not None
        assert claim.variables.partition("=")[0] in mpi


def test_one_rank_in_a_job_of_several_tasks_is_told_so():
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    assert "this job has 4 tasks" in launcher.left_alone(job)
    for variables in ({}, {**job, "SLURM_STEP_ID": "0"}, {"SLURM_NTASKS": "1"}):
        assert launcher.left_alone(variables) == ""


def test_one_rank_among_several_processes_of_torchrun_is_an_error() -> None:
    one_of_two = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1"}
    with pytest.raises(TopologyError, match="without torchrun: mpirun -n 2 python train"):
        launcher.check_torchrun(one_of_two)
    for variables in ({}, {"WORLD_SIZE": "2"}, {**one_of_two, "WORLD_SIZE": "1"}):
        launcher.check_torchrun(variables)


ONE_OF_FOUR = {
    "PMI_SIZE": "4",
    "PMI_RANK": "2",
    "MPI_LOCALRANKID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_JWT": "secret",
    "SLURMD_NODENAME": "n1",
    "HOME": "/home/ann",
}


def test_claim() -> None:
    claim = launcher.read_claim(ONE_OF_FOUR)
    assert claim is not None
    assert (claim.size, claim.rank) == (4, 2)
    assert launcher.is_first_on_node(ONE_OF_FOUR)
    assert launcher.read_claim({}) is None


def test_others_are_no_ranks() -> None:
    assert "PMI_RANK" not in launcher.environment_of_children(ONE_OF_FOUR)
    assert launcher.environment_of_children(ONE_OF_FOUR)["HOME"] == "/home/ann"
