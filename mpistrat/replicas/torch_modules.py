"""What a strategy does about torch modules: nothing until the program has imported torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mpistrat.trace import spans


class TorchModules:
    """Makes what mirrors modules when the first is seen: a program without torch must not import it.

    Args:
        make: makes it. It has `before_run()`, `stop_recording(failed)`, `mirror(module)`, `no_sync()` and `explain()`,
            as `pytorch.modules.mirroring.Mirroring`.
        needed: whether the scope and `run` look for modules; else `mirror` and `no_sync` alone make it.

    Attributes:
        made: what was made; None so far.
    """

    def __init__(self, make: Callable[[], Any], needed: bool) -> None:
        self._make = make
        self.needed = needed
        self.made: Any = None

    def get(self) -> Any:
        if self.made is None:
            self.made = self._make()
            spans.current.watch_optimizers()
        return self.made

    @property
    def are_seen(self) -> bool:
        """Whether modules that are built now are to be recorded."""
        return self.needed and "torch" in sys.modules

    def explain(self) -> str:
        return "" if self.made is None else self.made.explain()
