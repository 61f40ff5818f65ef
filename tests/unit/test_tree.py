"""The tests lie as the package does."""

from pathlib import Path

UNIT = Path(__file__).parent
PACKAGE = UNIT.parents[1] / "mpistrat"


def test_each_folder_has_the_path_of_a_package_or_holds_tests_of_the_harness() -> None:
    tests = {file.parent.relative_to(UNIT) for file in UNIT.rglob("*.py")}
    packages = {file.parent.relative_to(PACKAGE) for file in PACKAGE.rglob("__init__.py")}
    assert tests - packages == {Path("harness")}
