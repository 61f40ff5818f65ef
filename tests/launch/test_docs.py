"""The programs of README and of docs/ run as they stand."""

import re
from pathlib import Path

import pytest

from support.documentation import OPEN_NAMES, TOP, blocks_of, program_of, programs_of

STRATEGY = "strategy = ms.MultiWorkerMirroredStrategy()"
TRAINING = f"""{STRATEGY}
with strategy.scope():
    build()
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
distributed = strategy.experimental_distribute_dataset(loader)
step = 1
"""
# Without a compiler, which a machine may lack.
COMPILED = """
import functools
torch.compile = functools.partial(torch.compile, backend="aot_eager")
strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
with strategy.scope():
    build()
loss_fn = F.cross_entropy
x, y = next(iter(loader))
download = dict
loss, correct = 0.5, 3
"""
# Ranks have different examples.
EQUAL = "torch.testing.assert_close(*strategy.gather(model.weight.detach()[None], axis=0))"
SUM_OF_TWO_RANKS = """manager.wait()
strategy.run(total.assign_add, args=(1.0,))
assert float(total.read_value()) == 2
"""
# Batches of row numbers.
ROWS = "loader = [np.arange(i, i + 4) for i in range(6)]"
# How many ranks run the programs of a page, and what comes before and after them.
PROGRAMS = {
    "README.md": (2, "", ""),
    "docs/training.md": (2, COMPILED, EQUAL),
    "docs/existing_programs.md": (2, "build()\ncriterion = F.cross_entropy", EQUAL),
    "docs/torch_distributed_and_strategies.md": (
        2,
        "",
        "assert torch.distributed.get_world_size() == 2",
    ),
    "docs/torch_distributed.md": (2, "", "assert dist.get_world_size() == 2"),
    "docs/frameworks.md": (2, "", "assert mean == 0.5"),
    "docs/one_copy.md": (2, "", "assert (total.numpy() == 2).all()"),
    "docs/checkpoints.md": (2, TRAINING, SUM_OF_TWO_RANKS),
    "docs/preemption.md": (2, STRATEGY, "assert handler.total_run_calls == STEPS"),
    "docs/elastic.md": (2, "", ""),
    "docs/parameter_servers.md": (5, "", ""),
    "docs/parameter_servers_v1.md": (3, ROWS, "main()"),
    "docs/parameter_servers_coordinator.md": (3, "", "main()"),
}

# Pages with programs that begin a training loop, in blocks of "py".
FRAGMENTS = ("docs/training.md",)


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_run(launcher, tmp_path: Path, page: str) -> None:
    ranks, before, after = PROGRAMS[page]
    program = tmp_path / "program.py"
    program.write_text(program_of(page, before, after), encoding="utf-8")
    job = launcher.run_python(ranks, program, forked=True, cwd=tmp_path)
    assert job.returncode == 0, job.output


@pytest.mark.parametrize("page", FRAGMENTS)
def test_fragments_run(launcher, tmp_path: Path, page: str) -> None:
    """Each by itself: they are the lines that a program of the reader's gets."""
    for number, block in enumerate(blocks_of(page)):
        if block.language == "py" and not block.is_saved:
            program = tmp_path / f"{number}.py"
            text = "\n".join([OPEN_NAMES, "build()", block.text])
            program.write_text(text, encoding="utf-8")
            job = launcher.run_python(2, program, forked=True, cwd=tmp_path)
            assert job.returncode == 0, job.output


def test_readmes_script_can_be_pasted(launcher, tmp_path: Path) -> None:
    """It needs no line that README does not show, and its loss is the same on each number of ranks."""
    program = tmp_path / "train.py"
    program.write_text(programs_of("README.md")[0], encoding="utf-8")
    jobs = [launcher.run_python(ranks, program, forked=True, cwd=tmp_path) for ranks in (1, 2)]
    assert [job.returncode for job in jobs] == [0, 0], jobs[1].output
    (shown,) = re.findall(r"`(last loss .*?)`", (TOP / "README.md").read_text())
    assert [job.stdout.splitlines() for job in jobs] == [[shown]] * 2


def test_no_program_is_left_out() -> None:
    pages = [TOP / "README.md", *(TOP / "docs").rglob("*.md")]
    having = {str(page.relative_to(TOP)) for page in pages if "```python" in page.read_text()}
    tutorial = {page for page in having if page.startswith("docs/tutorial/")}  # test_tutorial.py
    elsewhere = {"docs/tpus.md", "docs/verify.md"}  # tests/tpu, test_verify.py
    assert having - tutorial == {*PROGRAMS, *elsewhere}
