"""`python -m support.simulated_accelerator program.py …` runs a program on a machine with simulated accelerators.

It ends with an error when the program has used device memory without order.
"""

import runpy
import sys

from support.simulated_accelerator.torch_sim import load


def main() -> None:
    del sys.argv[0]
    sim = load()
    runpy.run_path(sys.argv[0], run_name="__main__")
    unordered = sim.violations()
    if unordered:
        sys.exit("\n".join(["device memory was used without order:", *unordered[:10]]))


main()
