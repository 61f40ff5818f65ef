"""A training step over two nodes that a slow link joins, beside what computing and the wire must take at least.

    python benchmarks/slow_link.py --mpi MPICH      # as root; MPISTRAT_TEST_MPICH is the folder of that MPI

The nodes are network namespaces of this machine (tests/support/clusters/two_nodes.py), and share its cores: efficiency
says nothing here. Of N nodes, each must send 2 (N - 1) / N times the gradients (Patarasuk and Yuan, Bandwidth optimal
all-reduce algorithms, 2009), here of float32 and without headers: a shorter format on the wire may go below that limit.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from mpistrat.tools.bench.report import table_report
from support.clusters.two_nodes import two_nodes, why_not
from support.harness.mpi_launcher import MPI_NAMES, Launcher

NODES = 2
SECONDS = 300.0
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_per_second(rate: str) -> float:
    """ "1gbit" is 1e9, as for tc."""
    found = re.fullmatch(r"(\d+)([kmg]bit)", rate)
    if not found:
        raise argparse.ArgumentTypeError(f"expected a rate such as 100mbit or 1gbit, got {rate!r}")
    return int(found[1]) * _BITS[found[2]]


def wire_limit_ms(gradient_bytes: int, rate: str) -> float:
    on_the_wire = 2 * (NODES - 1) / NODES * gradient_bytes
    return on_the_wire * 8 / bits_per_second(rate) * 1e3


def measure(arguments: argparse.Namespace, model: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The surroundings and the row of `model`."""
    file = folder / f"{model}.json"
    command: list[str | Path] = ["-m", "mpistrat.tools.bench", "train", "--model", model]
    command += ["--steps", str(arguments.steps), "--json", file]
    if arguments.communication_options:
        command += ["--communication-options", arguments.communication_options]
    with two_nodes(folder, arguments.rate) as nodes:
        launcher = Launcher.named(arguments.mpi)
        job = nodes.run_python(launcher, arguments.ranks_per_node, *command, seconds=SECONDS)
    if job.returncode:
        raise RuntimeError(f"mpistrat-bench train ended with {job.returncode}:\n{job.output}")
    content = json.loads(file.read_text())
    row = content["rows"][0]
    wire = wire_limit_ms(row["gradient_bytes"], arguments.rate)
    return content["surroundings"], {
        "model": model,
        "parameters": row["parameters"],
        "options": row["communication_options"],
        "gradients": row["ways"][-1],
        "step ms": row["step_ms"],
        "compute ms": row["compute_ms"],
        "wire limit ms": wire,
        "step / max(compute, wire)": row["step_ms"] / max(row["compute_ms"], wire),
        "samples": row["samples"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mpi", choices=MPI_NAMES, default=MPI_NAMES[0])
    parser.add_argument("--models", nargs="+", default=["mlp", "mlp-large"])
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc has it (1gbit)")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--communication-options", metavar="KEY=VALUE,...")
    parser.add_argument("--json", help="prefix of the file to write")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"not measured: {reason}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        measured = [measure(arguments, model, Path(folder)) for model in arguments.models]
    title = f"training step over {arguments.rate}, {NODES} nodes x {arguments.ranks_per_node} ranks"
    rows = [row for _, row in measured]
    where, _ = measured[0]
    report = table_report(title, rows, where)
    report.publish(arguments.json and f"{arguments.json}slow_link.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
