"""What a strategy does about torch modules: nothing until the program has imported torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpistrat.replicas.gradient_rule import GradientRule
from mpistrat.trace import spans

if TYPE_CHECKING:
    from mpistrat.cross_device_ops.all_reduce import MpiAllReduce
    from mpistrat.replicas.replicas import Replicas


class ModuleParts:
    """The parts of a strategy that its torch modules use.

    Attributes:
        strategy, group, ops: as of `Replicas`. Torch modules are recorded in the scope of `strategy`.
        rule: whether gradients are summed or averaged.
        gradient_sums: sums gradients over all replicas; None: as `ops` sums values.
        piggybacks: add words to the agreement before gradients are reduced; equally many on every rank. Each is a
            `pytorch.gradients.agreement.Piggyback`.
    """

    def __init__(
        self, replicas: Replicas, rule: GradientRule, gradient_sums: MpiAllReduce | None = None
    ) -> None:
        self.strategy, self.group, self.ops = replicas.strategy, replicas.group, replicas.ops
        self.replicas, self.rule, self.gradient_sums = replicas, rule, gradient_sums
        self.piggybacks: list[Any] = []


class TorchModules:
    """Makes what keeps modules when the first is seen: a program without torch must not import it.

    Args:
        make: makes a `pytorch.modules.strategy_modules.StrategyModules`.
        needed: whether the scope and `run` look for modules; else `mirror` and `no_sync` alone make it.

    Attributes:
        parts: given to `make`.
        made: the result of `make`; None so far.
        rule, piggybacks: as of `ModuleParts`.
    """

    def __init__(
        self, parts: ModuleParts, make: Callable[[ModuleParts], Any], needed: bool
    ) -> None:
        self.parts, self._make = parts, make
        self.rule, self.piggybacks = parts.rule, parts.piggybacks
        self.needed = needed
        self.made: Any = None

    def get(self) -> Any:
        if self.made is None:
            self.made = self._make(self.parts)
            spans.current.watch_optimizers(self.made.watch_steps)
        return self.made

    @property
    def are_seen(self) -> bool:
        """Whether modules that are built now are to be recorded."""
        return self.needed and "torch" in sys.modules

    def before_run(self) -> None:
        """All ranks are here, before replicas compute: what is pending is mirrored."""
        if self.are_seen:
            self.get().before_run()

    def after_run(self) -> None:
        """Replicas have computed, on this rank."""
        if self.made is not None:
            self.made.after_run()

    def after_loader(self) -> None:
        """All ranks are here: a loader has ended inside `Strategy.replica()`."""
        if self.made is not None:
            self.made.after_loader()

    def explain(self) -> str:
        return "" if self.made is None else self.made.explain()
