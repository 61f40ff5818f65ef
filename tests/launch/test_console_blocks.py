"""The outputs in the pages: the commands are run as the pages show them, and print what the pages show."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support import console
from support.documentation import TOP
from support.harness.mpi_launcher import Launcher

# Each page has so many jobs that fail. test_tutorial.py and test_migration.py run other pages.
FAILING = {
    "docs/checkpoints.md": 0,
    "docs/divergence.md": 1,
    "docs/stalls.md": 1,
    "docs/torch_distributed.md": 1,
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """MPICH's: a launcher adds words of its own at the end."""
    folder = tmp_path_factory.mktemp("programs")
    with console.forked_programs(folder, Launcher.named("MPICH").environment()) as environment:
        yield environment


@pytest.mark.parametrize("page", FAILING)
def test_commands_print_what_the_page_shows(
    tmp_path: Path, environment: Mapping[str, str], page: str
) -> None:
    jobs = console.run(TOP / page, tmp_path, environment)
    assert jobs
    assert len([job for job in jobs if job.returncode]) == FAILING[page]
