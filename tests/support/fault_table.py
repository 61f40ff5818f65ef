"""The table of faults, as docs/faults.md shows it. Tests of real jobs hold times, words and exit codes."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parents[1] / "data" / "faults.json"


@dataclass(frozen=True)
class FaultRow:
    """A fault of one rank.

    Attributes:
        name: the word by which `tests/launch/programs/faults.py` provokes it.
        after: when it is seen: "at once", "0.5 s …", or "MPISTRAT_STALL_SECONDS".
        printed: a regular expression for the message.
    """

    name: str
    fault: str
    seen_by: str
    after: str
    printed: str
    exit_code: str

    def seconds(self, stall_seconds: float) -> float:
        """From the fault until it is seen, where MPISTRAT_STALL_SECONDS is `stall_seconds`."""
        if self.after == "MPISTRAT_STALL_SECONDS":
            return stall_seconds
        return 0.0 if self.after == "at once" else float(self.after.partition(" s")[0])

    @property
    def line(self) -> str:
        """Its line in the page."""
        printed = re.sub(r" ?(\\n|\.\*)+ ?", " … ", self.printed)
        printed = printed.replace("\\", "").replace("|", " or ")
        cells = (self.fault, self.seen_by, self.after, f"`{printed}`", self.exit_code)
        return f"| {' | '.join(cells)} |"


def fault_table() -> list[FaultRow]:
    return [FaultRow(**row) for row in json.loads(TABLE.read_text(encoding="utf-8"))]
