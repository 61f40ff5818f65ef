"""Record the runs that pictures are drawn from: `python docs/pictures/record.py [NAME …]`, with an MPICH in PATH.

recorded/NAME.json then holds the commands, and what their programs printed or what mpistrat wrote.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
PROGRAMS = "docs/pictures/programs"
COMMANDS = {
    "hosts_of_variables": [f"mpirun -n 4 python {PROGRAMS}/hosts_of_variables.py"],
    # MPICH takes the ranks for ranks of two nodes.
    "ranks_and_nodes": [
        "MPIR_CVAR_NUM_CLIQUES=2 MPIR_CVAR_CLIQUES_BY_BLOCK=1 "
        f"mpirun -n 4 python {PROGRAMS}/ranks_and_nodes.py"
    ],
    "restart": [
        f"KILLED_AT=27 mpirun -n 2 python {PROGRAMS}/restart.py",
        f"mpirun -n 3 python {PROGRAMS}/restart.py",
    ],
    "stall": [f"MPISTRAT_STALL_SECONDS=2 mpirun -n 3 python {PROGRAMS}/stall.py"],
    "straggler": [f"MPISTRAT_TRACE=traces mpirun -n 3 python {PROGRAMS}/straggler.py"],
    "values_of_a_step": [
        f"MPISTRAT_TRACE=traces mpirun -n 2 python {PROGRAMS}/values_of_a_step.py"
    ],
}
SECONDS = 60


def record(name: str) -> dict[str, Any]:
    """Run the commands of `name` in a new folder. Returns: what recorded/`name`.json holds."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [_run(command, Path(folder)) for command in COMMANDS[name]]
        return {"commands": COMMANDS[name], "jobs": jobs}


def _run(command: str, folder: Path) -> dict[str, Any]:
    program = command.replace(f"python {PROGRAMS}", f"{sys.executable} {HERE}/programs")
    # Unbuffered, Python writes a line and its end in two pieces, and mixes up the ranks' lines.
    settings = {"PYTHONPATH": str(TOP), "PYTHONUNBUFFERED": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        program,
        shell=True,
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if not done.stdout and not done.stderr.startswith("mpistrat: "):
        raise RuntimeError(done.stderr)
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    lines = [json.loads(line) for line in printed]
    job: dict[str, Any] = {"exit code": done.returncode, "ended": time.time()}
    job["lines"] = sorted(lines, key=lambda line: line.get("rank", 0))
    for report in folder.glob("mpistrat-report-*.txt"):
        job["report"] = report.read_text(encoding="utf-8").replace(f"{TOP}/", "").splitlines()
        job["reported"] = report.stat().st_mtime
        report.unlink()
    trace = folder / "traces" / "trace.json"
    if trace.exists():
        job["trace"] = _events(json.loads(trace.read_text(encoding="utf-8")))
    return job


def _events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The names of ranks and threads, and what they did after `mirror`, without folders and identifiers."""
    events = trace["traceEvents"]
    begin = max(event["ts"] for event in events if event["name"] == "mirror")
    kept = [event for event in events if event["ph"] == "M" or event["ts"] > begin]
    for event in kept:
        told = event.get("args") or {}
        shown = ("bytes", "call", "last to enter", "name")
        event["args"] = {key: value for key, value in told.items() if key in shown}
    return kept


def main() -> None:
    for name in sys.argv[1:] or COMMANDS:
        text = json.dumps(record(name), separators=(",", ":"))
        lines = re.sub(r'(\{"(?:rank|step|saved|begins|ph)")', r"\n\1", text)
        (HERE / "recorded" / f"{name}.json").write_text(f"{lines}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
