"""`mpistrat-bench` where torch sees simulated accelerators. Arguments: commands, with "--" between them."""

import itertools
import sys
from pathlib import Path

from mpistrat.tools.bench.command import main

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.simulated_accelerator import load

sim = load()
codes = []
for dashes, command in itertools.groupby(sys.argv[1:], "--".__eq__):
    if not dashes:
        codes.append(main(list(command)))
print(f"violations: {sim.violations()}", flush=True)
sys.exit(max(codes))
