"""`python -m mpistrat.trace DIR`: make trace.json from the parts that a job, such as a killed one, left in DIR."""

import argparse
import sys

from mpistrat.trace.merging import merge


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mpistrat.trace", description=__doc__)
    parser.add_argument("folder", metavar="DIR", help="the folder that MPISTRAT_TRACE named")
    folder = parser.parse_args().folder
    try:
        print(merge(folder).describe())
    except OSError as error:
        print(f"mpistrat: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
