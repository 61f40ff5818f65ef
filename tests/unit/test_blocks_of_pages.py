"""Each fenced block of each page runs in a test as it stands, or this file says why it cannot run here."""

import ast
import re
import shlex
from collections.abc import Iterator

import pytest

from launch.test_console_blocks import FAILING as WITH_OUTPUTS
from launch.test_docs import FRAGMENTS, PROGRAMS
from mpistrat.tools.bench.command_line import parser
from support.documentation import TOP, Block, blocks_of, prose_of

PAGES = [
    str(path.relative_to(TOP))
    for path in (
        *(TOP / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
        *sorted((TOP / "docs").rglob("*.md")),
    )
]
TROUBLES = "tests/unit/test_troubleshooting.py"
# Pages that a test does from top to bottom: it runs their `console` blocks, and saves the files.
DONE = {
    "docs/migration/": "tests/launch/test_migration.py",
    "docs/tutorial/": "tests/launch/test_tutorial.py",
    "docs/verify.md": "tests/launch/test_verify.py",
}
BENCH = "tests/launch/test_bench_training.py"
RESULTS = f"{BENCH}::test_every_program_behind_the_results_runs"
GUIDES = "tests/launch/test_guides.py"
FRAMEWORKS = "tests/launch/test_frameworks.py"
ON_TWO_RANKS = "test_two_ranks_do_what_one_process_does"
RUN = "tests/launch/test_run.py"
DOCTOR = "tests/launch/test_doctor.py"
TRACED = "tests/launch/test_tracing.py::test_a_program_of_torch_distributed"
# The commands of pages, as regular expressions, each with the test that runs it.
COMMANDS = {
    r"mpirun -n 2 python scripts/frameworks/loggers\.py": f"{FRAMEWORKS}::test_the_first_rank_alone_logs",
    r"mpirun -n 2 python scripts/frameworks/\w+\.py": f"{FRAMEWORKS}::{ON_TWO_RANKS}",
    r"mpirun -n 2 mpistrat run scripts/torch_distributed/\w+\.py": f"{GUIDES}::{ON_TWO_RANKS}",
    r"mpirun -n 4 mpistrat run scripts/torch_distributed/\w+\.py": (
        f"{GUIDES}::test_four_ranks_do_what_one_process_does"
    ),
    r"mpistrat run (train|scripts/torch_distributed/ddp)\.py": f"{RUN}::test_one_rank_without_mpi",
    r"mpirun -n 8 mpistrat run train\.py --lr 0\.1": f"{RUN}::test_a_script_for_torchrun",
    r"mpirun -n 8 mpistrat run -m package\.train": f"{RUN}::test_a_module_that_keeps_its_backend",
    r"python -m venv env && \. env/bin/activate": "tests/launch/test_release.py::test_the_wheel_runs",
    r"mpirun -n 2 mpistrat run your_ddp\.py": "tests/launch/test_release.py::test_the_wheel_runs",
    r"srun (--ntasks=8 |--mpi=pmi2 )?mpistrat run .*": f"{RUN}::test_srun",
    r"mpistrat doctor": f"{DOCTOR}::test_alone",
    r"mpirun -n 4 mpistrat doctor": f"{DOCTOR}::test_two_ranks",
    r"srun … mpistrat doctor": "tests/launch/test_doctor_in_slurm.py",
    r"MPISTRAT_TRACE=\S+ mpirun -n 4 python train\.py": "tests/launch/test_tracing.py::test_a_training_of_three_ranks",
    r"mpistrat verify .*": "tests/launch/test_verify.py::test_its_page",
    r"mpistrat trace traces/run1": TRACED,
    r"(mpirun -n 2 )?python train\.py": "tests/launch/test_docs.py::test_readmes_script_can_be_pasted",
    r"mpiexec -n \d mpistrat-bench .*": "tests/unit/test_blocks_of_pages.py::test_the_bench_understands_its_commands",
    r"mpiexec -n \d python benchmarks/(?!gpu)\w+\.py": RESULTS,
    r"python benchmarks/slow_link\.py --mpi MPICH": RESULTS,
    r"python benchmarks/existing_programs\.py": f"{BENCH}::test_existing_programs_beside_their_ports",
    r"scripts/benchmark( .*)?": RESULTS,
}
NO_NETWORK = "It needs a network."
ITSELF = "It is a run of the tests, or a stage of one."
NO_GPU = "It needs GPUs: scripts/test-gpu runs it, and benchmarks/results has its report."
MINUTES = "It takes minutes: benchmarks/results has its last run."
# The commands that no test runs.
NOT_HERE = {
    r"git clone .*": NO_NETWORK,
    r"pip install .*": NO_NETWORK,
    r"python -m venv ~/hour && \. ~/hour/bin/activate": NO_NETWORK,
    r"mkdir ~/tutorial && cd ~/tutorial": "The tests have folders of their own.",
    r"python -m venv build/peer": NO_NETWORK,
    r"build/peer/bin/pip install .*": NO_NETWORK,
    r"python -m build": NO_NETWORK,
    r"rattler-build .*": NO_NETWORK,
    r"python -m pip wheel .*": NO_NETWORK,
    r"(srun .*)?apptainer .*|    .*": NO_NETWORK,
    r"scripts/test(-gpu REPORT|-tpu| quick| full| manifest)?": ITSELF,
    r"\. \.venvs/app/bin/activate|MPICH=.*|export .*": ITSELF,
    r"pytest tests/unit|mpiexec -n 3 python -m pytest .*": ITSELF,
    r"sphinx-build -W --keep-going docs build/docs": ITSELF,
    r"mpiexec -n \d python benchmarks/gpu_\w+\.py": NO_GPU,
    r"python benchmarks/compiled_step\.py": MINUTES,
    r"(mpiexec -n 2 )?\.venvs/tpu/bin/python benchmarks/tpu_step\.py": MINUTES,
}
SLURM = "tests/launch/test_preemption_in_slurm.py::test_jobs_go_on_where_they_were_ended"
# Other blocks, by the page and the first line.
OTHERS = {
    ("docs/tracing.md", "traces/run1/timeline.png shows 2 ranks, steps 5 to 12 of 16."): TRACED,
    ("docs/preemption.md", "srun --kill-on-bad-exit=0 …; code=$?"): SLURM,
    ("docs/preemption.md", "trap 'kill -USR1 $mpirun' USR1"): SLURM,
    ("docs/torch_distributed.md", "#!/bin/bash"): f"{RUN}::test_srun",
    (
        "docs/elastic.md",
        "mpistrat: rank 2 of 4 (node7, pid 3243) was killed by SIGKILL: memory ran",
    ): ("tests/launch/test_elastic.py::test_a_rank_is_killed_somewhere"),
    (
        "docs/doctor.md",
        "PROBLEM  cores: 4 ranks here have 2 cores: they take turns, and MPI's waiting",
    ): (f"{DOCTOR}::test_json_has_the_same_findings"),
    (
        "docs/stalls.md",
        "mpistrat: rank 1 left out the call at test_sums.py:14 in test_a: rank 0 made it",
    ): "tests/mpi/test_left_out_calls.py",
    ("docs/frameworks.md", "+import mpistrat as ms"): "timm's train.py is in no package.",
    (
        "docs/migration/without_batches.md",
        "mpistrat: backward() has combined the gradients of 2 ranks, though no loader",
    ): "tests/launch/test_migration.py::test_backward_says_that_nothing_is_shared_out",
    ("README.md", "mpistrat: 2 ranks on 1 node, backend mpistrat"): (
        "tests/launch/test_release.py::test_the_wheel_runs"
    ),
}


def places_of(page: str, block: Block) -> Iterator[str]:
    """The tests that run a block, or the reasons why none does; "" where nothing is known."""
    rows = {**COMMANDS, **NOT_HERE}
    is_done = block.language == "console" or block.is_saved
    done = [test for start, test in DONE.items() if is_done and page.startswith(start)]
    if done:
        yield from done
    elif page == "docs/troubleshooting.md" and block.language == "text":
        yield TROUBLES
    elif page in WITH_OUTPUTS and is_done:
        yield "tests/launch/test_console_blocks.py"
    elif block.language == "python":
        known = {**dict.fromkeys(PROGRAMS, "tests/launch/test_docs.py::test_programs_run")}
        known |= {
            "CONTRIBUTING.md": "tests/mpi/test_additions.py",
            "docs/tpus.md": "tests/tpu/test_docs.py",
        }
        yield known.get(page, "")
    elif block.language == "py":
        yield "tests/launch/test_docs.py::test_fragments_run" if page in FRAGMENTS else ""
    elif other := OTHERS.get((page, block.text.partition("\n")[0])):
        yield other
    else:
        for command in block.commands():
            yield next((to for row, to in rows.items() if re.fullmatch(row, command)), "")


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_left_out(page: str) -> None:
    for block in blocks_of(page):
        places = [*places_of(page, block)]
        assert places, f"an empty block of {page}"
        assert all(places), f"neither a test nor a reason is known for\n{block.text}"


def test_tests_that_run_blocks_exist() -> None:
    places = {place for page in PAGES for b in blocks_of(page) for place in places_of(page, b)}
    tests = [place for place in places if place.startswith("tests/")]
    assert len(tests) > 10
    for test in tests:
        file, _, name = test.partition("::")
        functions = ast.walk(ast.parse((TOP / file).read_text(encoding="utf-8")))
        assert not name or name in {getattr(node, "name", "") for node in functions}, test


def commands_of_the_bench() -> list[str]:
    """In blocks and in the text, without the launcher."""
    texts = [block.text for page in PAGES for block in blocks_of(page)]
    texts += [f"{code}\n" for page in PAGES for code in re.findall(r"`([^`]+)`", prose_of(page))]
    found = [re.findall(r"\bmpistrat[- ]bench ([a-z][^#\n]*)", text) for text in texts]
    return sorted({command.strip() for commands in found for command in commands})


@pytest.mark.parametrize("command", commands_of_the_bench())
def test_the_bench_understands_its_commands(command: str) -> None:
    if command not in {"compare", "input"}:  # with a word after it
        parser("mpistrat bench").parse_args(shlex.split(command))


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_fence(page: str) -> None:
    """A block that is only indented would not be found here."""
    assert "\n\n    " not in prose_of(page)


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_code_fit_a_screen(page: str) -> None:
    for block in blocks_of(page):
        assert max(map(len, block.text.splitlines()), default=0) <= 80, block.text


def test_pages_name_packages_and_no_extras() -> None:
    """An extra is known where the project comes from an index, or from a checkout; a package is known in both."""
    for page in set(PAGES) - {"CONTRIBUTING.md"}:
        text = (TOP / page).read_text(encoding="utf-8")
        assert not re.findall(r"pip install [^`]*(?:mpistrat|\.)\[", text), page
