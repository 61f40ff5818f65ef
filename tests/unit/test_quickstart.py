"""scripts/quickstart: wrong arguments. The whole of it takes a minute, and is tried by hand."""

import subprocess
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "scripts" / "quickstart"


@pytest.mark.parametrize("arguments", [["0"], ["two"], ["-n", "2"], ["2", "3"], ["99999"]])
def test_wrong_arguments(arguments: list[str], tmp_path: Path) -> None:
    command = [QUICKSTART, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "scripts/quickstart: expected one number of ranks, at least 1 (for example: scripts/quickstart 4), got: "
        f"{' '.join(arguments)}\n"
    )
