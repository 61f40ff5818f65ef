"""The program of docs/tpus.md runs as it stands."""

from support.documentation import program_of
from support.xla.child_programs import answer


def test_the_program_runs() -> None:
    assert isinstance(answer(program_of("docs/tpus.md")), float)
