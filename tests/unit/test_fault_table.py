"""The page on faults shows the table from which the tests of real jobs take the messages."""

from pathlib import Path

from support.fault_table import fault_table

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table() -> None:
    lines = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert rows[2:] == [row.line for row in fault_table()]


def test_every_fault_of_the_table_has_a_program() -> None:
    """Of a strategy's ranks; or a test, where there is no strategy yet."""
    launch = ROOT / "tests" / "launch"
    program = (launch / "programs" / "faults.py").read_text(encoding="utf-8")
    before = (launch / "test_failures_before_a_strategy.py").read_text(encoding="utf-8")
    names = [row.name for row in fault_table()]
    assert len(set(names)) == len(names)
    assert [name for name in names if name not in program] == ["ends_early"]
    assert '"ends_early"' in before
