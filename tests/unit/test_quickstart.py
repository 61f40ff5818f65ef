"""scripts/quickstart: wrong arguments, and all that it shows. The whole of it takes a minute, and is tried by hand."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
QUICKSTART = TOP / "scripts" / "quickstart"
SLEEP = shutil.which("sleep")
# Instead of Python: its venv has this file as its Python, and its pip waits until its line was shown.
PYTHON = f"""#!/bin/bash
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip")
        while [[ $# -gt 1 && $1 != --report ]]; do shift; done
        if [[ $1 == --report ]]; then cp report.json "$2"; exit; fi
        echo Collecting torch
        begun=$(wc -l <sleeps)
        for _ in {{1..200}}; do [[ $(wc -l <sleeps) -lt $((begun + 2)) ]] || break; {SLEEP} 0.05; done ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
COMMANDS = {
    "python": PYTHON,
    "mpirun": '#!/bin/sh\necho "mpirun $*"\n',
    "nvidia-smi": "#!/bin/sh\nexit 9\n",
    "sleep": f"#!/bin/sh\necho >>sleeps\nexec {SLEEP} 0.05\n",
}
MEGABYTES = {"torch": 3, "nvidia-cublas": 1}


@pytest.mark.parametrize("arguments", [["0"], ["two"], ["-n", "2"], ["2", "3"], ["99999"]])
def test_wrong_arguments(arguments: list[str], tmp_path: Path) -> None:
    command = [QUICKSTART, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "scripts/quickstart: expected one number of ranks, at least 1 (for example: scripts/quickstart 4), got: "
        f"{' '.join(arguments)}\n"
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the script reads, and stand-ins for Python, pip and MPI."""
    (tmp_path / "scripts").mkdir()
    for name in (
        "pyproject.toml",
        *(f"scripts/{n}" for n in ("quickstart", "environment.sh", "constraints.txt")),
    ):
        shutil.copy(TOP / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    parts = []
    for name, size in MEGABYTES.items():
        wheel = tmp_path / f"{name}.whl"
        wheel.write_bytes(bytes(size * 1_000_000))
        metadata = {"name": name, "version": "1.0"}
        parts.append(
            {"metadata": metadata, "download_info": {"url": wheel.as_uri(), "archive_info": {}}}
        )
    (tmp_path / "sleeps").touch()
    (tmp_path / "report.json").write_text(json.dumps({"install": parts}))
    return tmp_path


def quickstart(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": "python", "PATH": f"{checkout}/bin:{os.environ['PATH']}"}
    command = [checkout / "scripts" / "quickstart", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


def test_it_shows_sizes_progress_and_the_next_commands(checkout: Path) -> None:
    """`sleep` is short here, so that reports of the progress come at once."""
    done = quickstart(checkout, "3")
    reports = re.compile(r" +\d+ s  \S* in \.venv  (.*)\n")
    assert "Collecting torch" in reports.findall(done.stdout)
    assert reports.sub("", done.stdout) == (
        "Asking pip for the size of the packages …\n"
        "2 packages of 4 MB; torch 1.0 alone has 3 MB.\n"
        "This machine shows no NVIDIA GPU, and pip has found no smaller build of torch than that for CUDA.\n"
        "PyTorch's own index has a CPU build: docs/getting_started.md says how to name the index to pip.\n"
        "Installed in .venv.\n"
        "mpirun -n 3 python scripts/train_digits.py\n"
        "Next:\n"
        "  source .venv/bin/activate; unset MPI4PY_LIBMPI\n"
        "  mpistrat init my_training     # a training script of your own, with a test\n"
        "  mpistrat doctor               # looks at this machine's MPI, cores, memory and GPUs\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_it_shows_what_pip_has_said_after_a_failure(checkout: Path) -> None:
    (checkout / "bin" / "flock").write_text("#!/bin/sh\necho No matching distribution; exit 7\n")
    (checkout / "bin" / "flock").chmod(0o755)
    done = quickstart(checkout)
    assert done.returncode == 7
    assert done.stderr.endswith("No matching distribution\n")
    assert "Next" not in done.stdout
