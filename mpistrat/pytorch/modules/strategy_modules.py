"""`StrategyModules`: what a strategy needs to be done about torch modules."""

from __future__ import annotations

import abc
import contextlib
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
    """The torch modules of a strategy on this rank.

    Attributes:
        parts: of the strategy.
        registry: their parameters and buffers.
        reducer: reduces gradients over the replicas.
    """

    watch_steps = staticmethod(hooks.watch_steps)

    def __init__(self, parts: ModuleParts, registry: Registry, reducer: GradientReducer) -> None:
        self.parts, self.registry, self.reducer = parts, registry, reducer
        all_modules.add(self)

    @abc.abstractmethod
    def before_run(self) -> Any:
        """A run begins: parameters and buffers get the values that they are to have in it."""

    def has_made(self, module: torch.nn.Module) -> bool:
        """Whether `module` was made in the strategy's scope on this rank, as far as that is known."""
        return False

    def after_run(self) -> None:  # noqa: B027
        """A run has ended well."""

    def after_loader(self) -> None:  # noqa: B027
        """All ranks are here: a loader has ended inside `Strategy.replica()`."""

    @abc.abstractmethod
    def mirror(self, module: Any) -> Any:
        """The work of `Strategy.mirror`: a module, a parameter, or an iterable of them."""

    @abc.abstractmethod
    def stop_recording(self, failed: bool) -> None:
        """The outermost `scope()` is left. After an error nothing is sent: other ranks may not be here."""

    def after_restore(self, objects: Iterable[Any]) -> None:  # noqa: B027
        """These, of all kinds, have been given the states of a checkpoint."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """The work of `Strategy.no_sync`."""
        return self.reducer.no_sync()

    def explain(self) -> str:
        """How gradients are reduced, for people."""
        return self.reducer.explain()


def strategy_of(value: Any) -> AnyStrategy | None:
    """The strategy that has the parameters of `value`, a module or an optimizer; None if there is none.

    Of a module that torch has sharded it is the one in whose scope it was made.
    """
    parameters, modules = list[torch.Tensor](), list[torch.nn.Module]()
    if isinstance(value, torch.nn.Module):
        parameters, modules = [*value.parameters()], [*value.modules()]
    elif isinstance(value, torch.optim.Optimizer):
        parameters = hooks.parameters_of(value)
    for of_strategy in all_modules:
        if any(parameter in of_strategy.registry for parameter in parameters):
            return of_strategy.parts.strategy
    for of_strategy in all_modules:
        if any(map(of_strategy.has_made, modules)):
            return of_strategy.parts.strategy
    return None
