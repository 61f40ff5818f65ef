"""The programs of docs/existing_programs.md: with at most six lines changed, ranks do what one process does.

To add a program: `scripts/existing_programs/NAME.py`, which knows nothing of mpistrat; `NAME.diff`, made by
`diff -U2 --label a/NAME.py --label b/NAME.py`, in which `MultiWorkerMirroredStrategy(` stands once; and an entry of
PROGRAMS. All runs are in float64.
"""

import functools
import pickle
import re
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from support import unified_diff
from support.forked.jobs import RANK
from support.forked.jobs import job as forks
from support.harness.mpi_launcher import Job, Launcher, run_job

FOLDER = Path(__file__).parents[2] / "scripts" / "existing_programs"
IN_FLOAT64 = Path(__file__).parent / "programs" / "in_float64.py"
MOST_CHANGED_LINES = 6
TOLERANCE = 1e-10  # of saved tensors, relative and absolute
SECONDS = 100  # for a run, on a busy machine
LIBRARIES = ("timm", "transformers.models.gpt2.modeling_gpt2")


@dataclass(frozen=True)
class Program:
    """Arguments that make it short and draw nothing in `forward`; what it saves; what it prints of all examples."""

    arguments: tuple[str, ...]
    saves: str
    evaluation: str  # a regular expression
    imports: tuple[str, ...] = ()  # beside torch, that take long


PROGRAMS = {
    "mnist": Program(
        ("--epochs=1", "--dropout=0", "--save-model"),
        "mnist_cnn.pt",
        r"/1437 \(\d+%\)|Test set: .*",
    ),
    "word_language_model": Program(
        ("--epochs=2", "--dropout=0"), "model.pt", r"(?:valid|test) loss.*"
    ),
    "nanogpt": Program(("--max_iters=20",), "out/ckpt.pt", r"step \d+: .*"),
    "dcgan": Program(
        ("--examples=23", "--batch-size=8", "--niter=2", "--nz=8", "--ngf=2", "--ndf=2"),
        "dcgan.pt",
        r"fixed noise.*",
    ),
    "vae": Program(("--examples=150", "--batch-size=32", "--epochs=2"), "vae.pt", r"Test set.*"),
    "gpt2": Program(
        (
            # 8 and 4 examples: transformers computes the loss in float32, which rounds the weights of uneven parts.
            *("--examples=28", "--batch-size=8", "--epochs=2", "--dropout=0"),
            *("--vocab-size=32", "--n-positions=8", "--n-embd=16", "--n-layer=2", "--n-head=2"),
        ),
        "gpt2.pt",
        r"epoch \d.*",
        LIBRARIES,
    ),
    "timm_model": Program(
        (
            *("--examples=23", "--batch-size=8", "--epochs=2"),
            *("--model=test_vit", "--img-size=32"),
        ),
        "timm_model.pt",
        r"epoch \d.*",
        LIBRARIES,
    ),
}
# In every run each program is on two ranks; what takes longest is otherwise in `full` alone.
OFTEN = ("word_language_model", "gpt2", "timm_model")
SLOW = pytest.mark.slow
OFTEN_AND_SLOW = [pytest.param(name, marks=() if name in OFTEN else SLOW) for name in PROGRAMS]
WITHOUT_THREE_RANKS = {
    "word_language_model": "20 columns of text do not divide by 3",
    "gpt2": "the loss is float32 in transformers, and thirds are rounded",
}
SHARED, DETERMINISTIC = "shared_parameters=True", "deterministic=True"


@dataclass(frozen=True)
class Result:
    lines: int  # of output
    evaluation: list[str]
    files: set[str]
    saved: dict[str, Any]


def result_of(name: str, job: Job, folder: Path) -> Result:
    program = PROGRAMS[name]
    assert job.returncode == 0, job.output
    assert job.left_behind == ()
    evaluation = re.findall(program.evaluation, job.stdout)
    assert evaluation, job.output
    saved = dict(leaves(load(folder / program.saves)))
    assert any(torch.is_tensor(value) for value in saved.values())
    files = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return Result(len(job.stdout.splitlines()), evaluation, files, saved)


def original(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def diff(name: str) -> str:
    return (FOLDER / f"{name}.diff").read_text(encoding="utf-8")


def patched(name: str, strategy: str = "") -> str:
    """The program for ranks, with `strategy` as an argument of its strategy."""
    text = unified_diff.apply(diff(name), original(name))
    before, after = text.split("MultiWorkerMirroredStrategy(")
    more = ", " if strategy and not after.startswith(")") else ""
    return f"{before}MultiWorkerMirroredStrategy({strategy}{more}{after}"


@functools.cache
def in_one_process(name: str, of_ranks: bool = False) -> Result:
    """By Python alone: as it is, or the program for ranks."""
    with tempfile.TemporaryDirectory() as folder, forks(PROGRAMS[name].imports) as address:
        file = Path(folder, f"{name}.py")
        file.write_text(patched(name) if of_ranks else original(name), encoding="utf-8")
        arguments = [str(IN_FLOAT64), file.name, *PROGRAMS[name].arguments]
        command = [sys.executable, "-I", "-S", str(RANK), address, *arguments]
        environment = Launcher.named("MPICH").environment()
        return result_of(name, run_job(command, environment, SECONDS, Path(folder)), Path(folder))


def on_ranks(name: str, ranks: int, launcher: Launcher, strategy: str = "") -> Result:
    """In the folder of the test; `strategy` is an argument of the program's strategy."""
    Path(f"{name}.py").write_text(patched(name, strategy), encoding="utf-8")
    arguments = (IN_FLOAT64, f"{name}.py", *PROGRAMS[name].arguments)
    imported = PROGRAMS[name].imports
    job = launcher.run_python(ranks, *arguments, seconds=SECONDS, forked=True, imported=imported)
    return result_of(name, job, Path())


def assert_equal(found: Result, expected: Result, tolerance: float = TOLERANCE) -> None:
    assert found.evaluation == expected.evaluation
    assert found.lines == expected.lines  # the first rank alone prints
    assert found.files == expected.files
    assert found.saved.keys() == expected.saved.keys()
    for key, value in expected.saved.items():
        if torch.is_tensor(value) or isinstance(value, float):
            torch.testing.assert_close(
                found.saved[key],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, key=key: f"{key}: {text}",
            )
        else:
            assert found.saved[key] == value, key


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and other values of what was saved, by their paths in it."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from leaves(part, f"{path}/{key}")
    else:
        yield path, value


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The program's own modules are not here: they are any module."""
        if module == "__main__":
            return type(name, (torch.nn.Module,), {})
        return super().find_class(module, name)


def load(file: Path) -> Any:
    reading = types.SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="pickle")
    return torch.load(file, weights_only=False, pickle_module=reading)


@pytest.mark.parametrize("name", PROGRAMS)
def test_few_lines_are_changed(name: str) -> None:
    assert 0 < unified_diff.changed_lines(diff(name)) <= MOST_CHANGED_LINES
    assert "mpistrat" not in original(name)
    assert "mpistrat" in patched(name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_distributed_data_parallel_takes_more(name: str) -> None:
    """The ports that benchmarks/existing_programs.py measures."""
    port = (FOLDER / "ddp" / f"{name}.diff").read_text(encoding="utf-8")
    assert "DistributedDataParallel" in unified_diff.apply(port, original(name))
    assert unified_diff.changed_lines(port) > unified_diff.changed_lines(diff(name))


def test_all_programs_are_tested() -> None:
    for kind in ("py", "diff"):
        assert {path.stem for path in FOLDER.glob(f"*.{kind}")} == PROGRAMS.keys()


@pytest.mark.parametrize("name", OFTEN_AND_SLOW)
def test_python_alone_runs_the_program_of_ranks(name: str) -> None:
    assert_equal(in_one_process(name, of_ranks=True), in_one_process(name), tolerance=0.0)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.quick if name == "mnist" else ()) for name in PROGRAMS],
)
def test_two_ranks_do_what_one_process_does(name: str) -> None:
    assert_equal(on_ranks(name, 2, Launcher.named("MPICH"), ""), in_one_process(name))


@pytest.mark.parametrize("name", OFTEN_AND_SLOW)
def test_two_ranks_that_share_parameters(name: str) -> None:
    assert_equal(on_ranks(name, 2, Launcher.named("Open MPI"), SHARED), in_one_process(name))


@pytest.mark.parametrize("name", OFTEN_AND_SLOW)
def test_four_ranks_do_what_one_process_does(name: str, launcher: Launcher) -> None:
    assert_equal(on_ranks(name, 4, launcher, DETERMINISTIC), in_one_process(name))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["", SHARED, DETERMINISTIC])
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        (name, ranks)
        for name in PROGRAMS
        for ranks in (2, 3, 4)
        if ranks != 3 or name not in WITHOUT_THREE_RANKS
    ],
)
def test_ranks_do_what_one_process_does(
    name: str, ranks: int, strategy: str, launcher: Launcher
) -> None:
    assert_equal(on_ranks(name, ranks, launcher, strategy), in_one_process(name))
