"""`python -m mpistrat.bench`."""

import sys

from mpistrat.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
