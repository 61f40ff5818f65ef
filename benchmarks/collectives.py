"""all_reduce over the ranks of one node, of 4 KB to 64 MB, beside MPI, gloo, TensorFlow and a plain copy.

    mpiexec -n 2 python benchmarks/collectives.py

`mpistrat-bench compare all_reduce`, and its ratios over sizes from 64 KB and from 1 MB on. *In the window*: the buffer
lies in the memory that the ranks share, as gradients do. *Copy*: all ranks at once copy as many bytes, which is a limit
of the machine.
"""

from __future__ import annotations

import statistics

from program import program, report

from mpistrat.tools.bench.command_line import number_of_bytes
from mpistrat.tools.bench.comparison import compare_all_reduces
from mpistrat.tools.bench.rounds import all_ranks
from mpistrat.tools.bench.sweep import sizes


def main() -> None:
    parser = program(__doc__, rounds=15)
    parser.add_argument("--maxbytes", type=number_of_bytes, default="64M")
    arguments = parser.parse_args()
    rows, left_out = compare_all_reduces(sizes(4096, arguments.maxbytes, 4), arguments.rounds)
    report("all_reduce over one node", rows, arguments.json("collectives"), left_out)
    if all_ranks().rank == 0:
        for least, text in ((1 << 16, "64 KB"), (1 << 20, "1 MB")):
            large = [row for row in rows if row["bytes"] >= least]
            names = [name for name in large[0] if " / " in name or name == "in place"]
            for name in names:
                ratios = [row[name] for row in large]
                mean = statistics.geometric_mean(ratios)
                print(
                    f"{name}, {text} and more: {mean:.2f} (geometric mean), {min(ratios):.2f} (least)"
                )


if __name__ == "__main__":
    main()
