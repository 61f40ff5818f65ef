"""A strategy's handling of torch modules. It does nothing until the program has imported torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.replicas.gradient_rule import GradientRule
from mpistrat.trace import spans

if TYPE_CHECKING:
    from mpistrat.cross_device_ops.all_reduce import MpiAllReduce
    from mpistrat.replicas.replicas import Replicas


NO_WORDS = np.zeros(4, np.int32)


class ModuleParts:
    """The parts of a strategy that its torch modules use.

    Attributes:
        strategy: the strategy. Torch modules that are made in its scope are recorded.
        group: all replicas of all ranks.
        ops: combines values of all replicas.
        replicas: runs functions on this rank's replicas.
        rule: whether gradients are summed or averaged.
        gradient_sums: sums gradients over all replicas; None: `ops` sums them.
        piggybacks: objects that add integers to an all-reduce: before each reduction of gradients, the ranks agree by
            it. Each is a `pytorch.gradients.agreement.Piggyback`. Every rank has the same number of piggybacks.
        watch: compares the ranks, a `pytorch.watch.watch.Watch`; None if nothing is compared.
        watched: the watch's words for the next agreement of the ranks, int32[4]; zeros if there are none.
    """

    def __init__(
        self, replicas: Replicas, rule: GradientRule, gradient_sums: MpiAllReduce | None = None
    ) -> None:
        self.strategy = replicas.strategy
        self.group = replicas.group
        self.ops = replicas.ops
        self.replicas = replicas
        self.rule = rule
        self.gradient_sums = gradient_sums
        self.piggybacks: list[Any] = []
        self.watch: Any = None
        self.watched = NO_WORDS


class TorchModules:
    """Makes the keeper of a strategy's torch modules when it is first needed.

    The keeper is the object that mirrors modules and reduces their gradients. It is made late, so that a program
    without torch never imports torch.

    Args:
        make: makes the keeper, a `pytorch.modules.strategy_modules.StrategyModules`.
        needed: whether the scope and `run` look for modules. If False, only `prepare`, `mirror` and `no_sync` make the
            keeper.

    Attributes:
        parts: the argument of `make`. Its `Replicas` refer to this object from now on.
        made: the keeper, the result of `make`; None until it is needed.
    """

    def __init__(
        self, parts: ModuleParts, make: Callable[[ModuleParts], Any], needed: bool
    ) -> None:
        self.parts = parts
        parts.replicas.modules = self
        self._make = make
        self.needed = needed
        self.made: Any = None

    def get(self) -> Any:
        """Return the keeper of the modules, and make it at the first call."""
        if self.made is None:
            self.made = self._make(self.parts)
            spans.current.watch_optimizers(self.made.watch_steps)
        return self.made

    @property
    def are_seen(self) -> bool:
        """Whether modules that are built now are recorded."""
        return self.needed and "torch" in sys.modules

    def before_run(self) -> None:
        """Note that a step begins, and mirror new modules before replicas compute.

        Called by: every rank, in `run`, at the beginning of `replica()`, and at `next` of a distributed dataset in it.
        """
        if self.are_seen:
            modules = self.get()
            modules.registry.begin_step()
            modules.before_run()

    def after_run(self) -> None:
        """Tell the keeper that a run on this rank has ended without an error. Called by: strategies with servers."""
        if self.made is not None:
            self.made.after_run()

    def after_loader(self) -> None:
        """Tell the keeper that a loader has ended inside `Strategy.replica()`. Called by: every rank."""
        if self.made is not None:
            self.made.after_loader()

    def explain(self) -> str:
        return "" if self.made is None else self.made.explain()
