"""The watch: ranks compare all that should be equal on them, and a notice names the first value that has drifted apart.

A rank takes samples of its parameters, buffers, optimizers and schedulers after the optimizer steps 1, 2, 4, 8 and so
on, after each 1000th, and at the end of a loader. A checksum of them goes to the other ranks with the next agreement
that is there anyway, at last at the end of the program. The ranks send more only if checksums differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from mpistrat import settings
from mpistrat.communicators.contract.joint_errors import mark_raised_by_all
from mpistrat.communicators.graph_capture import is_capturing
from mpistrat.machine.notices import tell
from mpistrat.pytorch.watch.facts import Facts
from mpistrat.pytorch.watch.keys import PARAMETER
from mpistrat.pytorch.watch.mirrored_state import State, state_after_step
from mpistrat.pytorch.watch.samples import Samples
from mpistrat.pytorch.watch.unproved import SampledStep, Unproved
from mpistrat.replicas.torch_modules import NO_WORDS

if TYPE_CHECKING:
    from mpistrat.communicators.router import Router
    from mpistrat.pytorch.modules.strategy_modules import StrategyModules

_MOST_UNPROVED = 32


class Watch:
    """Compares the ranks of a strategy.

    Args:
        modules: the strategy's modules.
        roots: returns the outermost modules, for their training flags.

    Attributes: facts: the facts that this rank notes.
    """

    def __init__(
        self, modules: StrategyModules, roots: Callable[[], Iterable[torch.nn.Module]]
    ) -> None:
        self._modules = modules
        self._roots = roots
        self._parts = modules.parts
        self._reducer = modules.reducer
        self._communicator = cast("Router", modules.parts.group.communicator)
        action = self._communicator.broadcast_object(
            settings.on_drift(), label="the setting for drift"
        )
        self._is_over = action == "off"
        self._unproved = Unproved(action, weakref.WeakMethod(self._present))
        if not self._is_over:
            self._unproved.compare_at_end_of(self._communicator.mpi.comm)
        self.facts = Facts(modules.reducer)
        self._offered = 0  # so many of the first sampled steps are in `ModuleParts.watched`
        self._sampled_at = 0  # the step of the last samples
        self._gradients: Samples | None = None  # taken before a step

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note facts, and take samples of gradients if the step is due. Not collective.

        Called by: the hook before each optimizer step, for this rank's first replica.
        """
        if self._is_over or not self.facts.before_step(optimizer):
            return
        parameters = self.facts.parameters()
        if parameters and is_capturing(parameters[0]):
            return
        gradients = {}
        for slot, parameter in enumerate(parameters):
            if parameter is not None and parameter.grad is not None:
                gradients[PARAMETER, slot] = parameter.grad
        self._gradients = Samples(gradients, self._reducer.steps)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take samples if the step is due, offer samples to the next agreement, and note facts. Not collective.

        Does nothing once the watch is over. Called by: the hook after each optimizer step, for the first replica.
        """
        if self._is_over:
            return
        if self._gradients is not None:
            self._take(self._gradients, self._roots())
            self._gradients = None
        if self._offered < len(self._unproved.steps):
            self._offer()
        self.facts.after_step(optimizer)

    def after_loader(self) -> None:
        """Take samples if there was a step since the last samples. Called by: the end of a loader. Not collective."""
        if self._is_over:
            return
        if self._sampled_at < self._reducer.steps:
            self._take(Samples({}, 0), [])  # a rank alone may evaluate at the end of an epoch
            self._offer()
        self.facts.note_versions()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep samples of the last values when Python drops `optimizer`. Called by: its first step."""
        weakref.finalize(optimizer, _keep_last, weakref.ref(self)).atexit = False

    def keep_last(self) -> None:
        """Keep samples of the parameters that a dropped optimizer still holds, for the end of the program."""
        if self._unproved.steps:
            self._unproved.last = self._present().by_key()

    def _take(self, gradients: Samples, roots: Iterable[torch.nn.Module]) -> None:
        self._sampled_at = self._reducer.steps
        self._offered = 0
        things = state_after_step(self._modules, roots)
        names = {key: thing.name for key, thing in things.items()}
        values = _samples(things, self._sampled_at)
        taken = SampledStep(self._sampled_at, names, values, gradients, self.facts.taken())
        # Where a program has no agreement, the first and the last stay.
        del self._unproved.steps[_MOST_UNPROVED:]
        self._unproved.steps.append(taken)

    def _present(self) -> Samples:
        return _samples(state_after_step(self._modules, self._roots()), 0)

    def _offer(self) -> None:
        """Give the next agreement the number of the last step with samples on the host, and a checksum up to it.

        A device of another rank may be late. So the ranks compare the checksums only if all have the same number.
        """
        self._offered = self._unproved.arrived()
        self._parts.watched = NO_WORDS
        if self._offered:
            step = self._unproved.steps[self._offered - 1].step
            checksum = self._unproved.checksum(self._offered)
            words = [step, -step, checksum, -checksum]
            self._parts.watched = np.array(words, np.int32)

    def received(self, greatest: np.ndarray) -> None:
        """Compare the ranks' words. If they differ, the ranks look for a drift together, and rank 0 tells of it.

        Args: greatest: the maxima of all ranks' words. If all ranks have the same word, MAX(n) equals -MAX(-n).
        Raises: DivergenceError on all ranks, with MPISTRAT_ON_DRIFT=raise, if the ranks have drifted apart.
        """
        step, step_differs, checksum, checksum_differs = greatest.tolist()
        if step != -step_differs:
            return
        self._parts.watched = NO_WORDS
        if checksum != -checksum_differs:
            self._find(self._offered)
        else:
            del self._unproved.steps[: self._offered]
            self._unproved.equal_after = step

    def find_cause(self) -> None:
        """Tell of the cause of a drift, as far as the samples show it. Collective. Called by: a save of such ranks."""
        if not self._is_over:
            self._find(len(self._unproved.steps), raises=False)  # the checkpoint is to be written

    def _find(self, count: int, raises: bool = True) -> None:
        def gather(value: Any) -> list[Any]:
            return self._communicator.all_gather_object(value, label="samples of ranks")

        error = self._unproved.find(count, gather)
        if error is None:
            return
        self._is_over = True
        self._unproved.steps.clear()
        self._parts.watched = NO_WORDS
        if self._unproved.is_error and raises:
            mark_raised_by_all(error)
            raise error
        if self._communicator.rank == 0:
            tell(str(error))


def _keep_last(reference: weakref.ref[Watch]) -> None:
    watch = reference()
    if watch is not None:
        watch.keep_last()


def _samples(things: State, turn: int) -> Samples:
    firsts = {key: thing.copies[0] for key, thing in things.items()}
    return Samples(firsts, turn)
