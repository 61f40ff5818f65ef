"""`StrategyModules`: the interface between a strategy and its torch modules."""

from __future__ import annotations

import abc
import contextlib
import itertools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from mpistrat.context import AnyStrategy
from mpistrat.pytorch import hooks
from mpistrat.pytorch.modules.registry import Registry
from mpistrat.replicas.torch_modules import ModuleParts

if TYPE_CHECKING:
    from mpistrat.pytorch.gradients.reducer import GradientReducer

all_modules: weakref.WeakSet[StrategyModules] = weakref.WeakSet()  # of all strategies


class StrategyModules(abc.ABC):
    """The torch modules of a strategy on this rank, and the methods that keep them equal.

    Attributes:
        parts: the parts of the strategy that modules use.
        registry: the parameters and buffers of the modules.
        reducer: reduces gradients over the replicas.
        compared: the optimizers, schedulers and gradient scalers that have been compared and are alike on all ranks,
            each with a number that is equal on all ranks. A step does not compare them again.
        numbers: gives the numbers.
    """

    watch_steps = staticmethod(hooks.watch_steps)

    def __init__(self, parts: ModuleParts, registry: Registry, reducer: GradientReducer) -> None:
        self.parts = parts
        self.registry = registry
        self.reducer = reducer
        self.compared = weakref.WeakKeyDictionary[Any, int]()
        self.numbers = itertools.count()
        all_modules.add(self)

    @abc.abstractmethod
    def before_run(self) -> Any:
        """Give parameters and buffers the values that they are to have in a run.

        Called by: every rank, before each `run`.
        """

    def has_made(self, module: torch.nn.Module) -> bool:
        """Whether this rank has made `module` in the strategy's scope; False if the strategy records no modules."""
        return False

    def after_run(self) -> None:  # noqa: B027
        """Do the work that follows a `run` without an error; here nothing. Called by: the strategy."""

    def after_loader(self) -> None:  # noqa: B027
        """Do the work that follows the end of a loader inside `Strategy.replica()`; here nothing.

        Called by: every rank.
        """

    @abc.abstractmethod
    def mirror(self, module: Any) -> Any:
        """Make `module` equal on all replicas now. Does the work of `Strategy.mirror`.

        Args: module: a module, a parameter, or an iterable of them.
        """

    @abc.abstractmethod
    def stop_recording(self, failed: bool) -> None:
        """Mirror the modules that were made in a `scope()`. Called by: the strategy, at the end of the outermost scope.

        Args: failed: whether the scope ends by an error. Then nothing is sent, because other ranks may not be here.
        """

    def after_restore(self, objects: Iterable[Any]) -> None:  # noqa: B027
        """Do the work that follows a restore of `objects` from a checkpoint; here nothing.

        Called by: `CheckpointManager` and `followers`.
        Args: objects: all restored objects: modules, optimizers and others.
        """

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Do the work of `Strategy.no_sync`."""
        return self.reducer.no_sync()

    def explain(self) -> str:
        """Return lines for people about how gradients are reduced."""
        return self.reducer.explain()


def strategy_of(value: Any) -> AnyStrategy | None:
    """Return the strategy that a module or an optimizer belongs to.

    This strategy mirrors a parameter of `value`. If no strategy does, a module in `value` was made in this strategy's
    scope; so modules with sharded parameters are found, too.
    Args: value: a module or an optimizer.
    Returns: None if there is no such strategy, or for other values.
    """
    parameters = list[torch.Tensor]()
    modules = list[torch.nn.Module]()
    if isinstance(value, torch.nn.Module):
        parameters = [*value.parameters()]
        modules = [*value.modules()]
    elif isinstance(value, torch.optim.Optimizer):
        parameters = hooks.parameters_of(value)
    for of_strategy in all_modules:
        if any(parameter in of_strategy.registry for parameter in parameters):
            return of_strategy.parts.strategy
    for of_strategy in all_modules:
        if any(map(of_strategy.has_made, modules)):
            return of_strategy.parts.strategy
    return None
