"""docs/migration: the programs of its pages run before and after their diffs, and print the losses that the pages show.

To add a program: `docs/migration/programs/NAME.py`, `NAME.diff`, made by
`diff -U99 --label a/NAME.py --label b/NAME.py`, and a page that shows the diff and the commands with their output.
`programs/recorded` has the runs with Horovod and with TensorFlow.
"""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest

from support import unified_diff
from support.harness.mpi_launcher import Job, Launcher

FOLDER = Path(__file__).parents[2] / "docs" / "migration"
PROGRAMS = FOLDER / "programs"
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md"))}
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))
# Runs with libraries that the tests do not have.
RECORDED = {
    file.with_suffix(".py").name: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((PROGRAMS / "recorded").glob("*.json"))
}
LIBRARIES = ("lightning", "accelerate")
SECONDS = 100  # for a run, on a busy machine


def blocks(page: str) -> list[list[tuple[str, str]]]:
    """The commands of each block of a page, each with the output that the page shows."""
    found = re.findall(r"^```console\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    return [re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE) for block in found]


def text(name: str) -> str:
    return (PROGRAMS / name).read_text(encoding="utf-8")


def after(name: str) -> str:
    """The program that the diff makes."""
    return unified_diff.apply(text(f"{name}.diff"), text(f"{name}.py"))


@functools.cache  # most diffs of one loop come to the same program
def run(launcher: Launcher, ranks: int, program: str, *options: str) -> Job:
    """Run the text `program`. Args: options: those of `python` before the name of the program."""
    Path("program.py").write_text(program, encoding="utf-8")
    command = (*options, "program.py")
    imported = LIBRARIES if re.search("import (Fabric|Accelerator)", program) else ()
    job = launcher.run_python(ranks, *command, seconds=SECONDS, forked=True, imported=imported)
    assert job.returncode == 0, job.output
    assert job.left_behind == ()
    return job


def output_of(command: str, launcher: Launcher) -> str:
    """What a command of a page prints. The programs of the pages and the program of the last `patch` are there."""
    match shlex.split(command):
        case ["patch", "-s", "-o", new, old, diff]:
            Path(new).write_text(unified_diff.apply(text(diff), text(old)), encoding="utf-8")
            return ""
        case ["python", program]:
            return run(launcher, 1, of_page(program)).stdout
        case ["mpirun", "-n", ranks, "python", program]:
            return run(launcher, int(ranks), of_page(program)).stdout
        case ["mpirun", "-n", ranks, "mpistrat", "run", program]:
            return run(launcher, int(ranks), of_page(program), "-m", "mpistrat", "run").stdout
    raise ValueError(f"a page shows a command that this test cannot run: {command}")


def of_page(program: str) -> str:
    patched = Path(program)
    return patched.read_text(encoding="utf-8") if patched.exists() else text(program)


def is_recorded(command: str) -> bool:
    return not command.startswith("patch") and any(name in command for name in RECORDED)


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_their_page_shows(launcher: Launcher, page: str) -> None:
    for block in blocks(page):
        outputs = {shown for _, shown in block if shown}
        assert len(outputs) == 1, "before and after do not print the same"
        for command, shown in block:
            if not is_recorded(command):
                assert output_of(command, launcher) == shown, command


@pytest.mark.parametrize("name", {after(name): name for name in NAMES}.values())
def test_any_number_of_ranks_prints_the_same(launcher: Launcher, name: str) -> None:
    alone, together = (run(launcher, ranks, after(name)).stdout for ranks in (1, 3))
    assert alone == together
    assert alone in {shown for page in PAGES for block in blocks(page) for _, shown in block}


def test_backward_says_that_nothing_is_shared_out(launcher: Launcher) -> None:
    """The program of the page without its `shard`, and the text that the page shows."""
    (notice,) = re.findall(r"^```text\n(.*?)^```", PAGES["without_batches"], re.DOTALL | re.M)
    whole, number = re.subn(r"strategy\.shard\((.*)\):", r"\1:", after("reinforcement"))
    assert number == 1
    assert " ".join(notice.split()) in run(launcher, 2, whole).stderr.splitlines()


def test_each_program_has_its_diff_and_its_page() -> None:
    assert sorted(path.stem for path in PROGRAMS.glob("*.diff")) == NAMES
    for name in NAMES:
        assert "mpistrat" not in text(f"{name}.py")
        (page,) = (page for page in PAGES.values() if f"](programs/{name}.py)" in page)
        assert f"```{{literalinclude}} programs/{name}.diff\n" in page
        patch = ("patch", "-s", "-o", "train.py", f"{name}.py", f"{name}.diff")
        assert f"\n$ {' '.join(patch)}\n" in page


@pytest.mark.parametrize("program", RECORDED)
def test_a_page_shows_what_was_recorded(program: str) -> None:
    recorded = RECORDED[program]
    (page,) = (page for page in PAGES if f"]({PROGRAMS.name}/{program})" in PAGES[page])
    shown = [pair for block in blocks(page) for pair in block if is_recorded(pair[0])]
    assert shown == [(recorded["command"], "".join(f"{line}\n" for line in recorded["output"]))]
    (text,) = re.findall(r"recorded with ([^:]*)", PAGES[page])
    versions = re.findall(r"([A-Za-z]+) (\d+\.\d+\.\d+)", " ".join(text.split()))
    assert versions
    for library, version in versions:
        assert recorded["versions"][library].partition("+")[0] == version
