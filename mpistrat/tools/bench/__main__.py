"""Runs `mpistrat-bench` as `python -m mpistrat.tools.bench`."""

import sys

from mpistrat.tools.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
