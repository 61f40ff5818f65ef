"""GPUs, NCCL and CUDA-aware MPI, by made-up facts: this machine need have none."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from mpistrat.machine.gpu_advice import ONE_RANK_PER_GPU
from mpistrat.tools.doctor import gpus
from mpistrat.tools.doctor.facts import Driver, Gpus, JobFacts
from mpistrat.tools.doctor.finding import OK, PROBLEM, WARNING, Finding

MakeJob = Callable[..., JobFacts]
WHEELS = "/env/nvidia/nccl/lib/libnccl.so.2"
MODULES = "/opt/nccl/lib/libnccl.so.2"
WELL = {
    "named": ["0", "1", "2", "3"],
    "torch": "2.13",
    "torch_cuda": "13.0",
    "torch_gpus": 4,
    "cupy": "14.2",
    "nccl_loaded": [[WHEELS, "2.29.7"]],
    "nccl_visible": [[gpus.WHEEL, WHEELS]],
    "mpi_refusal": "",
}
SENT = "two processes on its node that sent device memory: exit code 139, signal 11"
UNUSED = SENT.replace("sent", "were to send")


FOUR = {"installed": True, "gpus": ["a0", "b1", "c2", "d3"]}
NO_DRIVER = {"error": "libcuda.so.1: cannot open shared object file"}


def findings_of(
    make_job: MakeJob, per_node: int = 2, driver: dict[str, object] = FOUR, **changes: object
) -> list[Finding]:
    return list(gpus.check(make_job(per_node=per_node, gpus={**WELL, **changes}, driver=driver)))


def bad(findings: list[Finding]) -> Finding:
    (found,) = [finding for finding in findings if finding.level != OK]
    return found


def test_none(make_job: MakeJob) -> None:
    (finding,) = gpus.check(make_job())
    assert finding.level == OK
    assert finding.text.startswith("No GPU is visible")


def test_all_well(make_job: MakeJob) -> None:
    findings = findings_of(make_job)
    assert [finding.level for finding in findings] == [OK, OK]
    assert findings[0].text == f"NCCL 2.29.7, one copy: {WHEELS}."
    assert "a child process has sent some" in findings[1].text


def test_torch_alone_brings_nccl(make_job: MakeJob) -> None:
    assert {finding.level for finding in findings_of(make_job, cupy="")} == {OK}


def test_torch_for_other_gpus_than_nvidia_s(make_job: MakeJob) -> None:
    """Of its own collectives nothing is asked here, and nothing of NCCL."""
    other = {"torch_cuda": "", "torch_other": "ROCm 6.4", "cupy": "", "nccl_loaded": []}
    findings = findings_of(make_job, driver={}, **other)
    assert {finding.level for finding in findings} == {OK}
    assert "ROCm 6.4" in findings[0].text


def test_mpi_was_given_no_memory_of_a_gpu(make_job: MakeJob) -> None:
    found = bad(findings_of(make_job, mpi_refusal=UNUSED))
    assert found.text == f"Whether MPI takes memory of GPUs is not known: {UNUSED}."
    assert found.fix.startswith("correct this cause")


@pytest.mark.parametrize(
    ("changes", "level", "words", "fix"),
    [
        ({"mpi_refusal": SENT}, WARNING, "MPI does not take memory of GPUs", "CUDA-aware build"),
        (
            {"nccl_loaded": [[WHEELS, "2.29.7"], [MODULES, "2.4.8"]]},
            PROBLEM,
            f"has loaded 2 NCCLs: 2.29.7 ({WHEELS}) and 2.4.8 ({MODULES})",
            "LD_LIBRARY_PATH",
        ),
        (
            {"nccl_visible": [[gpus.WHEEL, WHEELS], ["LD_LIBRARY_PATH", MODULES]]},
            WARNING,
            f"LD_LIBRARY_PATH has another NCCL, {MODULES}",
            "import torch first",
        ),
        (
            {"nccl_loaded": [[MODULES, "2.4.8"]]},
            WARNING,
            f"is {MODULES}, and not the wheel",
            MODULES,
        ),
        (
            {"cupy": "", "nccl_loaded": [], "torch": ""},
            WARNING,
            "CuPy is missing",
            "cupy-cuda13x",
        ),
        ({"nccl_loaded": []}, WARNING, "found a libnccl", "pip install nvidia-nccl"),
        ({"torch_cuda": "", "torch_gpus": 0}, PROBLEM, "is a build for CPUs", "CUDA build"),
        ({"torch_gpus": 0}, PROBLEM, "(CUDA 13.0) sees no GPU, and there are 4 GPUs", "driver"),
        (
            {"torch_error": "ImportError('libcudart')"},
            PROBLEM,
            "cannot be imported: ImportError",
            "torch",
        ),
    ],
)
def test_traps(
    make_job: MakeJob, changes: dict[str, object], level: str, words: str, fix: str
) -> None:
    found = bad(findings_of(make_job, **changes))
    assert found.level == level
    assert words in found.text
    assert fix in found.fix


def test_more_ranks_than_gpus(make_job: MakeJob) -> None:
    found = bad(findings_of(make_job, per_node=8))
    assert "8 ranks share 4 GPUs" in found.text
    assert (
        found.fix == f"{ONE_RANK_PER_GPU}; --ntasks-per-node=4"
    )  # as the notice of a strategy says


def test_a_gpu_for_each_rank(make_job: MakeJob) -> None:
    """--gpus-per-task: the first rank sees one, and so does each other."""
    job = make_job(per_node=4, gpus={**WELL, "named": ["0"], "torch_gpus": 1})

    def seeing(names: list[str]) -> list[Finding]:
        drivers = [Driver(True, [name]) for name in names]
        return list(
            gpus.check(
                JobFacts(
                    [
                        dataclasses.replace(rank, driver=driver)
                        for rank, driver in zip(job.ranks, drivers, strict=True)
                    ]
                )
            )
        )

    assert {finding.level for finding in seeing(["a0", "b1", "c2", "d3"])} == {OK}
    assert "4 ranks share 2 GPUs" in bad(seeing(["a0", "a0", "b1", "b1"])).text


def test_nodes_that_differ(make_job: MakeJob) -> None:
    job = make_job(nodes=2, gpus=WELL, driver=FOUR)
    first, second = job.ranks[0], job.ranks[2]
    other = dataclasses.replace(second.gpus or Gpus(), nccl_loaded=[[WHEELS, "2.27.5"]])
    found = bad(list(gpus.check(JobFacts([first, dataclasses.replace(second, gpus=other)]))))
    assert found.text == "Nodes have different versions of NCCL: 2.29.7 on n1; 2.27.5 on n2."
    without = dataclasses.replace(second, gpus=Gpus(), driver=Driver())
    found = bad(list(gpus.check(JobFacts([first, without]))))
    assert (found.level, found.nodes) == (PROBLEM, ("n2",))
    assert "No GPU is visible, while other nodes have some" in found.text


@pytest.mark.parametrize(
    "changes", [{"named": []}, {"named": [], "torch": "", "torch_cuda": "", "torch_gpus": 0}]
)
def test_a_container_without_nvidia_smi(make_job: MakeJob, changes: dict[str, object]) -> None:
    assert {finding.level for finding in findings_of(make_job, **changes)} == {OK}
    job = make_job(nodes=2, gpus=WELL, driver=FOUR)
    without = dataclasses.replace(job.ranks[2].gpus or Gpus(), **changes)
    ranks = [job.ranks[0], dataclasses.replace(job.ranks[2], gpus=without)]
    assert {finding.level for finding in gpus.check(JobFacts(ranks))} == {OK}


CPU_TORCH = {"torch_cuda": "", "torch_gpus": 0, "cupy": "", "nccl_loaded": []}


@pytest.mark.parametrize(
    ("driver", "named", "level", "words", "fix"),
    [
        (NO_DRIVER, ["0"], WARNING, "1 GPU, but there is no driver of CUDA's here", "--nv"),
        ({"installed": True}, ["7"], PROBLEM, "CUDA's driver shows this rank none", "unset"),
        (
            {"installed": True, "error": "CUDA error 803 (too old)"},
            ["0"],
            PROBLEM,
            "No GPU can be used: CUDA error 803 (too old).",
            "libcuda",
        ),
        (
            {"installed": True, "error": "CUDA error 803 (too old)"},
            [],  # nvidia-smi fails, too
            PROBLEM,
            "No GPU can be used: CUDA error 803 (too old).",
            "libcuda",
        ),
        (
            {"installed": True, "error": "no end within 20 s", "hangs": True},
            [],
            PROBLEM,
            "No GPU can be used: no end within 20 s.",
            "libcuda",
        ),
        (NO_DRIVER, [], OK, "No GPU is visible", ""),  # a machine for CPUs
        ({"installed": True}, [], OK, "No GPU is visible", ""),  # CUDA_VISIBLE_DEVICES=
    ],
)
def test_gpus_that_are_named_and_cannot_be_used(
    make_job: MakeJob, driver: dict[str, object], named: list[str], level: str, words: str, fix: str
) -> None:
    """Nothing is said of torch, CuPy and NCCL then, which are right for this machine."""
    (found,) = findings_of(make_job, driver=driver, named=named, **CPU_TORCH)
    assert (found.level, words in found.text, fix in found.fix) == (level, True, True), found


def test_a_driver_that_hangs(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is asked, who would hang in it, and torch is not blamed."""

    def asked(*_: object) -> None:
        raise AssertionError("it was asked")

    monkeypatch.setattr(gpus, "ask", asked)
    monkeypatch.setattr(gpus, "visible_gpus", asked)
    driver = Driver(True, error="no end within 20 s", hangs=True)
    found = gpus.look(driver)
    assert found == Gpus(torch_error="not asked: CUDA's driver hangs")
    first, second = make_job().ranks
    first = dataclasses.replace(first, driver=driver, gpus=found)
    (finding,) = gpus.check(JobFacts([first, dataclasses.replace(second, driver=driver)]))
    assert finding.text == "No GPU can be used: no end within 20 s."


SEEING, SEEING_NONE = Driver(True, ["a0", "b1"]), Driver(True)
IN_ERROR = Driver(True, error="CUDA error 999 (unknown)")


@pytest.mark.parametrize(
    ("drivers", "words"),
    [
        ([SEEING, SEEING_NONE], "none to rank 1."),
        ([SEEING, IN_ERROR], "none to rank 1 (CUDA error 999 (unknown))."),
        ([SEEING_NONE, SEEING], "none to rank 0."),
        ([IN_ERROR, SEEING], "none to rank 0 (CUDA error 999 (unknown))."),
        (
            [SEEING, IN_ERROR, SEEING_NONE, IN_ERROR],
            "none to ranks 1, 3 (CUDA error 999 (unknown)); rank 2.",
        ),
        # These do not share it with the two that have none.
        ([Driver(True, ["a0"]), SEEING_NONE, SEEING_NONE], "none to ranks 1-2."),
        ([SEEING_NONE, IN_ERROR], "No GPU can be used: CUDA error 999 (unknown)."),
    ],
)
def test_ranks_of_a_node_that_see_others(
    make_job: MakeJob, drivers: list[Driver], words: str
) -> None:
    """Also where the first rank of the node, which alone imports torch, is the one that sees none."""
    number = len(drivers[0].gpus)
    job = make_job(per_node=len(drivers), gpus={**WELL, "named": [], "torch_gpus": number})
    ranks = [
        dataclasses.replace(rank, driver=driver)
        for rank, driver in zip(job.ranks, drivers, strict=True)
    ]
    found = bad(list(gpus.check(JobFacts(ranks))))
    assert (found.level, found.nodes) == (PROBLEM, ("n1",))
    assert found.text.endswith(words)
    assert found.fix


TORCH = """
import atexit, os, types
__version__ = "2.13"
version = types.SimpleNamespace(cuda=None)
accelerator = types.SimpleNamespace(device_count=lambda: 0)
"""


def look_with(folder: Path, torch: str, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """What `look` finds where packages lie in `folder`, with this text for torch."""
    (folder / "torch.py").write_text(torch)
    (folder / "cupy.py").write_text("raise ModuleNotFoundError(name='cupy')")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return gpus.look(Driver())


def test_a_library_that_prints_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = TORCH + "atexit.register(print, '{bye}')"
    found = look_with(tmp_path, torch, monkeypatch)
    assert (found.torch, found.torch_error) == ("2.13", "")


def test_a_child_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = TORCH + "print('no licence', flush=True)\nos._exit(0)"
    found = look_with(tmp_path, torch, monkeypatch)
    assert found.torch_error.endswith("did not tell what it saw, no licence")


def test_packages_behind_a_symbolic_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells where NCCL really lies: that is compared. LD_LIBRARY_PATH may name the wheel itself."""
    real, link = tmp_path / "real", tmp_path / "link"
    wheel = real / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    other = tmp_path / "libnccl.so.2"
    wheel.parent.mkdir(parents=True)
    for file in (wheel, other):
        file.write_bytes(b"\x7fELF")
    link.symlink_to(real)
    folders = [str(link / "nvidia" / "nccl" / "lib"), str(tmp_path)]
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(folders))
    found = look_with(link, TORCH, monkeypatch)
    assert [[by, path] for by, path in found.nccl_visible if path.startswith(str(tmp_path))] == [
        [gpus.WHEEL, str(wheel)],
        ["LD_LIBRARY_PATH", str(other)],
    ]


def test_here() -> None:
    """torch is imported in a child, whatever comes of it."""
    found = gpus.look(Driver())
    assert found.torch or found.torch_error or not found.torch_gpus
