"""Under a real Slurm: SlurmClusterResolver agrees with MPI on every layout, and what cannot work says so."""

import json
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.clusters.slurm_cluster import SlurmCluster
from support.harness.mpi_launcher import Launcher

pytestmark = [
    pytest.mark.both_mpis("launching"),
    pytest.mark.slurm,
]

LAYOUT = Path(__file__).parent / "programs" / "layout.py"
PMI2 = "--mpi=pmi2"
# A rank that fails in MPI_Init must not keep the others for minutes.
ENV = {"MPISTRAT_START_SECONDS": "60"}

# What srun is given inside an allocation of 4 nodes with room for 3 tasks each, and the node of each rank
STEPS = {
    "-N1 -n2": "n1 n1",
    "-N4 -n4": "n1 n2 n3 n4",
    "-N2 -n4 --ntasks-per-node=2": "n1 n1 n2 n2",
    "-N2 -n4 -m cyclic": "n1 n2 n1 n2",
    "-N3 -n5 -m cyclic:block": "n1 n2 n3 n1 n2",
    "-N2 -n5 -m plane=2": "n1 n1 n2 n2 n1",
    "-N3 -n4": "n1 n1 n2 n3",  # SLURM_STEP_TASKS_PER_NODE=2,1(x2)
    "-N2 -n4 -m block,Pack": "n1 n1 n1 n2",
    "-N2 -n3 -w n4,n2": "n2 n2 n4",
}


def lines(text: str) -> list[dict]:
    """The ranks' lines, by rank of MPI or, without one, of Slurm."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda line: (line.get("mpi") or line.get("slurm") or [0])[0])


def check_agreement(text: str, node_of_rank: str) -> None:
    hosts = node_of_rank.split()
    ranks = lines(text)
    assert [line["node"] for line in ranks] == hosts, text
    names = list(dict.fromkeys(hosts))
    earlier: Counter[str] = Counter()
    for rank, (line, host) in enumerate(zip(ranks, hosts, strict=True)):
        expected = [rank, len(hosts), [names.index(host) for host in hosts], names]
        assert line["mpi"] == expected, text
        assert line["world"] == [rank, len(hosts)]
        assert line.get("slurm") == expected, text
        assert line["task"] == ["worker", rank]
        assert line["local_rank"] == earlier[host]
        assert line["addresses"][rank] == f"{host}:{8888 + earlier[host]}"
        earlier[host] += 1


def write_steps(path: Path, header: str, steps: list[str]) -> list[Path]:
    """A batch script of these srun steps, each with a file of its own for what it prints."""
    outputs = [path.with_suffix(f".{number}") for number in range(len(steps))]
    # Slurm gives a step other nodes while it still frees those of the step before.
    freed = "while squeue -hs -j $SLURM_JOB_ID | grep -qv batch; do sleep 0.1; done"
    commands = [
        f"srun --kill-on-bad-exit {PMI2} {step} {sys.executable} {LAYOUT} >{output}\n{freed}"
        for step, output in zip(steps, outputs, strict=True)
    ]
    path.write_text("\n".join(["#!/bin/bash", header, "set -e", *commands]) + "\n")
    return outputs


@pytest.fixture
def mpich() -> Launcher:
    return Launcher.named("MPICH")


@pytest.fixture
def open_mpi() -> Launcher:
    return Launcher.named("Open MPI")


def test_steps_of_every_layout(slurm: SlurmCluster, mpich: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "job"
    outputs = write_steps(script, "#SBATCH --nodes=4 --ntasks-per-node=3", list(STEPS))
    job = slurm.sbatch(mpich, script, env=ENV)
    assert job.wait(150) == "COMPLETED", job.report()
    for output, node_of_rank in zip(outputs, STEPS.values(), strict=True):
        check_agreement(output.read_text(), node_of_rank)


def test_node_names_that_do_not_sort_as_they_count(slurm: SlurmCluster, mpich: Launcher) -> None:
    job = slurm.srun(mpich, "-pnames", "-N3", "-n4", "-mcyclic", PMI2, sys.executable, LAYOUT)
    check_agreement(job.stdout, "n9 n10 n11 n9")


HETEROGENEOUS = "#SBATCH -p {} --nodes=2 --ntasks=3\n#SBATCH hetjob\n#SBATCH -p {} -N1 -n2"


# Chief and parameter servers are in the first component.
ROLES = [["chief", 0], ["ps", 0], ["ps", 1], ["worker", 0], ["worker", 1]]


def test_heterogeneous_jobs(slurm: SlurmCluster, mpich: Launcher, tmp_path: Path) -> None:
    steps = {
        "--het-group=0,1": "n1 n1 n2 n9 n9",
        "--het-group=0,1 -m cyclic": "n1 n2 n1 n9 n9",
        "--het-group=0": "n1 n1 n2",
        "--het-group=1": "n9 n9",
    }
    script = tmp_path / "job"
    outputs = write_steps(script, HETEROGENEOUS.format("main", "names"), list(steps))
    job = slurm.sbatch(mpich, script, env=ENV)
    assert job.wait() == "COMPLETED", job.report()
    for output, (step, node_of_rank) in zip(outputs, steps.items(), strict=True):
        check_agreement(output.read_text(), node_of_rank)
        ranks = lines(output.read_text())
        if "0,1" in step:
            assert [line["role"] for line in ranks] == ROLES
        else:
            alone = f"are in component {step[-1]} of the heterogeneous Slurm job"
            assert all(alone in line["role error"] for line in ranks), ranks


def test_components_whose_nodes_are_not_in_order(
    slurm: SlurmCluster, mpich: Launcher, tmp_path: Path
) -> None:
    """srun tells MPICH that ranks on different nodes share one; without that, they would share no memory."""
    script = tmp_path / "job"
    outputs = write_steps(script, HETEROGENEOUS.format("names", "main"), ["--het-group=0,1"])
    job = slurm.sbatch(mpich, script, env=ENV)
    assert job.wait() == "COMPLETED", job.report()
    ranks = lines(outputs[0].read_text())
    assert [line["node"] for line in ranks] == ["n9", "n9", "n10", "n1", "n1"]
    for rank, line in enumerate(ranks):
        assert line["slurm"] == [rank, 5, [0, 0, 1, 2, 2], ["n9", "n10", "n1"]]
        assert (
            "ranks 2 and 3 share a node, but Slurm has started them on n10 and n1"
            in (line["mpi error"])
        )


@pytest.mark.parametrize("options", ["", "--map-by node"])
def test_mpirun_inside_a_batch_job(
    slurm: SlurmCluster, open_mpi: Launcher, tmp_path: Path, options: str
) -> None:
    script = tmp_path / "job"
    script.write_text(f"#!/bin/bash\nmpirun {options} {sys.executable} {LAYOUT}\n")
    job = slurm.sbatch(open_mpi, script, "-N2", "--ntasks-per-node=2", env=ENV)
    assert job.wait() == "COMPLETED", job.report()
    nodes = [0, 1, 0, 1] if options else [0, 0, 1, 1]
    ranks = lines(job.output)
    assert len(ranks) == 4, job.report()
    for rank, line in enumerate(ranks):
        assert line["mpi"] == [rank, 4, nodes, ["n1", "n2"]]
        assert line["node"] == ["n1", "n2"][nodes[rank]]
        assert "describe what mpirun starts ranks with" in line["slurm error before MPI"]
        assert "start this program with srun" in line["slurm error after MPI"]
        assert "slurm" not in line


def test_srun_that_speaks_another_pmi(slurm: SlurmCluster, launcher: Launcher) -> None:
    """Every rank would be rank 0 of 1."""
    job = slurm.srun(launcher, "-N2", "-n3", "--mpi=none", sys.executable, LAYOUT)
    ranks = lines(job.stdout)
    assert len(ranks) == 3, job.output
    for rank, line in enumerate(ranks):
        assert (
            f"3 ranks were started (SLURM_STEP_NUM_TASKS=3, SLURM_PROCID={rank})"
            in (line["mpi error"])
        )
        assert "srun --mpi=pmi2" in line["mpi error"]
        assert "world" not in line


def test_open_mpi_under_pmi2(slurm: SlurmCluster, open_mpi: Launcher) -> None:
    job = slurm.srun(open_mpi, "-n2", PMI2, sys.executable, LAYOUT)
    assert ["srun --mpi=pmix" in line["mpi error"] for line in lines(job.stdout)] == [True, True], (
        job.output
    )


def test_a_program_that_neither_srun_nor_mpirun_starts(
    slurm: SlurmCluster, mpich: Launcher, tmp_path: Path
) -> None:
    script = tmp_path / "job"
    script.write_text(f"#!/bin/bash\n{sys.executable} {LAYOUT}\n")
    job = slurm.sbatch(mpich, script, "-N2", "--ntasks-per-node=2")
    assert job.wait() == "COMPLETED", job.report()
    (line,) = lines(job.output)
    assert line["mpi"] == [0, 1, [0], ["n1"]]
    assert "this job has 4 tasks (SLURM_NTASKS), but this program was started by neither" in (
        job.output
    )


GPUS = shlex.quote(
    "import os; from mpistrat.cluster_resolver import SlurmClusterResolver as S; s = S(); s.cluster_spec(); "
    "print(s.topology().rank, s.num_accelerators()['GPU'], os.environ['CUDA_VISIBLE_DEVICES'])"
)


@pytest.mark.parametrize(
    ("options", "gpus_of_ranks"),
    [
        ("--gpus-per-node=4", "0,1 2,3 0,1 2,3"),  # srun shows all to each, the resolver shares out
        ("--gpus-per-task=1", "0 1 0 1"),
        ("--gpus-per-node=2 --gpu-bind=single:1", "0 1 0 1"),
    ],
)
def test_gpus_of_ranks(
    slurm: SlurmCluster, mpich: Launcher, options: str, gpus_of_ranks: str
) -> None:
    program = [sys.executable, "-c", shlex.split(GPUS)[0]]
    job = slurm.srun(mpich, "-N2", "-n4", "--ntasks-per-node=2", *options.split(), *program)
    expected = [
        f"{rank} {gpus.count(',') + 1} {gpus}" for rank, gpus in enumerate(gpus_of_ranks.split())
    ]
    assert sorted(job.stdout.splitlines()) == expected, job.output


def test_bench(slurm: SlurmCluster, mpich: Launcher, tmp_path: Path) -> None:
    measure = ["all_reduce", "-b", "4K", "-e", "64K", "-n", "3", "--json", "result.json"]
    command = [sys.executable, "-m", "mpistrat.tools.bench", *measure]
    job = slurm.srun(mpich, "-N2", "-n3", PMI2, *command, cwd=tmp_path, env=ENV)
    assert job.returncode == 0, job.output
    assert (tmp_path / "result.json").exists()
