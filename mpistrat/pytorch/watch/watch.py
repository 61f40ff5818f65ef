"""The watch: ranks compare all that should be equal on them, and a notice names the first value that has drifted apart.

A rank takes samples of its parameters, buffers, optimizers and schedulers after the optimizer steps 1, 2, 4, 8 and so
on, and after each 1000th. A checksum of them goes to the other ranks with the next agreement that is there anyway. The
ranks send more only if checksums differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mpistrat import settings
from mpistrat.communicators.contract.joint_errors import mark_raised_by_all
from mpistrat.communicators.graph_capture import is_capturing
from mpistrat.errors import DivergenceError
from mpistrat.machine.notices import tell
from mpistrat.pytorch.modules.registry import version
from mpistrat.pytorch.watch import drift
from mpistrat.pytorch.watch.divergence_report import StateComparison
from mpistrat.pytorch.watch.mirrored_state import (
    PARAMETER,
    Key,
    State,
    state_after_step,
    state_at_save,
)
from mpistrat.pytorch.watch.samples import Samples
from mpistrat.replicas.torch_modules import NO_WORDS

if TYPE_CHECKING:
    from mpistrat.pytorch.modules.strategy_modules import StrategyModules

_EVERY = 1000
_FIRST_STEPS = 16  # in these steps each rank notes facts that may be causes
_ROUNDINGS = 64  # of a tensor in a step, as `Difference.roundings` has them
_STEPS_OF_DEVICES = 2  # so many steps later the host need not wait for the samples of a device


class _SampledStep(NamedTuple):
    """The evidence of a step on this rank, as samples that may still be on their way from a device."""

    step: int
    values: Samples
    gradients: Samples
    facts: dict[str, str]

    def sent(self) -> drift.Evidence:
        values = self.values.by_key()
        gradients = self.gradients.by_key()
        return drift.Evidence(self.step, values, gradients, self.facts)


def is_due(number: int) -> bool:
    """Whether `number` is 1, 2, 4, 8 and so on, or a multiple of 1000."""
    return number & (number - 1) == 0 or number % _EVERY == 0


class Watch:
    """Compares the ranks of a strategy.

    Args:
        modules: the strategy's modules.
        roots: returns the outermost modules, for their training flags.

    """

    def __init__(
        self, modules: StrategyModules, roots: Callable[[], Iterable[torch.nn.Module]]
    ) -> None:
        self._modules = modules
        self._strategy = modules.parts.strategy
        self._registry = modules.registry
        self._reducer = modules.reducer
        self._roots = roots
        self._communicator = modules.parts.group.communicator
        self._on_drift = settings.on_drift()
        self._is_over = self._on_drift == "off"
        self._parts = modules.parts
        self._unsent: list[_SampledStep] = []
        self._sent: list[_SampledStep] = []  # `ModuleParts.watched` is their checksum
        self._has_told_of_rounding = False
        self._equal_after = 0  # the last step that left all equal
        self._reductions = 0  # at the end of the last step
        self._unreduced_steps = 0
        self._facts: dict[str, str] = {}
        self._gradients: Samples | None = None  # taken before a step
        self._versions: dict[Key, int] = {}

    def before_step(self) -> None:
        """Note facts, and take samples of gradients if the step is due. Not collective.

        A step without a reduction since the step before is due if it is the 1st, 2nd, 4th, … such step.
        Called by: the hook before each optimizer step, for this rank's first replica.
        """
        step = self._reducer.steps + 1
        due = is_due(step)
        if self._reductions == self._reducer.reductions:
            self._unreduced_steps += 1
            due = due or is_due(self._unreduced_steps)
        if self._is_over or not (due or step <= _FIRST_STEPS):
            return
        parameters = self._parameters()
        if is_capturing(next(iter(parameters.values()), None)):
            return
        self._note_facts(step, parameters)
        if due:
            gradients = {}
            for key, parameter in parameters.items():
                if parameter.grad is not None:
                    gradients[key] = parameter.grad
            self._gradients = Samples(gradients, step)

    def after_step(self) -> None:
        """Take samples if the step is due. Called by: the hook after each optimizer step. Not collective."""
        self._reductions = self._reducer.reductions
        if self._gradients is not None:
            step = self._reducer.steps
            values = self._samples(self._things(), step)
            taken = _SampledStep(step, values, self._gradients, self._facts)
            self._unsent.append(taken)
            self._gradients = None
            self._facts = {}
        if self._unsent:
            self._send()
        self.note_versions()

    def note_versions(self) -> None:
        """Note how often each parameter was written. Called by: the ends of optimizer steps, and of mirroring."""
        self._versions = {}
        if self._notes_facts():
            for key, parameter in self._parameters().items():
                self._versions[key] = version(parameter)

    def _notes_facts(self) -> bool:
        """Whether this rank notes facts in the next step."""
        steps = self._reducer.steps
        return not self._is_over and (steps < _FIRST_STEPS or is_due(steps + 1))

    def _parameters(self) -> dict[Key, torch.Tensor]:
        found: dict[Key, torch.Tensor] = {}
        if self._reducer.slice_steps is None:  # else the ranks of a node share them
            for slot, parameter in enumerate(self._registry.parameters()):
                if parameter is not None:
                    found[PARAMETER, slot] = parameter
        return found

    def _note_facts(self, step: int, parameters: dict[Key, torch.Tensor]) -> None:
        """Note the first case of each kind since the last samples."""
        note = self._facts.setdefault
        if self._reducer.has_local:
            note(drift.LOCAL, str(step))
        elif self._reductions == self._reducer.reductions:
            note(drift.UNREDUCED, str(step))
        for key, parameter in parameters.items():
            if self._versions.get(key, version(parameter)) != version(parameter):
                note(drift.WRITTEN, self._registry.slots[key[1]].name)

    def _things(self) -> State:
        return state_after_step(self._modules, self._roots())

    def _samples(self, things: State, turn: int) -> Samples:
        firsts = {}
        for key, thing in things.items():
            firsts[key] = thing.copies[0]
        return Samples(firsts, turn)

    def _send(self) -> None:
        """Hand a checksum of the samples that are on the host to the next agreement."""
        long_ago = self._reducer.steps - _STEPS_OF_DEVICES
        while self._unsent and (
            self._unsent[0].values.are_on_host or self._unsent[0].step <= long_ago
        ):
            self._sent.append(self._unsent.pop(0))
        checksums = [step.values.checksum() for step in self._sent]
        high, low = divmod(zlib.crc32(repr(checksums).encode()) if checksums else 0, 1 << 16)
        self._parts.watched = np.array([low, -low, high, -high], np.int32)

    def received(self, greatest: np.ndarray) -> None:
        """Compare the ranks' words. If they differ, the ranks look for a drift together, and rank 0 tells of it.

        Args: greatest: the maxima of all ranks' words. If all ranks have the same word, MAX(n) equals -MAX(-n).
        Raises: DivergenceError on all ranks, with MPISTRAT_ON_DRIFT=raise, if the ranks have drifted apart.
        """
        sent = self._sent
        self._sent = []
        self._parts.watched = NO_WORDS
        if (greatest[::2] != -greatest[1::2]).any():
            self._find(sent)
        elif sent:
            self._equal_after = sent[-1].step

    def at_save(self) -> DivergenceError | None:
        """Compare all bits of arrays. `Checkpoint.check_alike` compares numbers. Collective.

        Rank 0 tells once of differences that are no larger than rounding, as between two kinds of processors.
        Called by: `CheckpointManager.save`, on every rank.
        Returns: the error for larger differences, equal on all ranks; None if there are none.
        """
        if self._on_drift == "off":
            return None
        with self._communicator.raising_together():
            comparison = StateComparison(self._communicator, state_at_save(self._modules))
        if comparison.is_equal(comparison.exchange()):
            return None
        if not self._is_over:
            self._find([*self._sent, *self._unsent])
        steps = self._reducer.steps
        when = f"at a save after {steps} optimizer steps"
        error = comparison.divergence(when, _ROUNDINGS * max(1, steps) ** 0.5)
        if error is None and comparison.names and not self._has_told_of_rounding:
            self._has_told_of_rounding = True
            if self._communicator.rank == 0:
                tell(f"{comparison.names[0]} differs in the last bits between ranks, {when}")
        return error

    def _find(self, sent: list[_SampledStep]) -> None:
        things = self._things()
        now = self._samples(things, 0).by_key()
        generator = zlib.crc32(torch.get_rng_state().numpy().data)
        mine = [taken.sent() for taken in sent], now, generator, self._on_drift
        by_rank = self._communicator.all_gather_object(mine, label="samples of the watch")
        evidence, values, generators, actions = zip(*by_rank, strict=True)
        found = drift.first_drift(evidence, values, self._equal_after, set(generators))
        if found is None:
            return
        key = found.keys[0]
        elements = sent[found.number].values.elements(key)
        of_ranks = self._communicator.all_gather_object(elements, label="values that differ")
        self._is_over = True
        self._unsent = []
        name = things[key].name
        others = len(found.keys) - 1
        described = drift.values_in_words(of_ranks)
        steps = f"{found.before} and {found.step}"
        text = (
            f"the ranks have drifted apart: {name} is {described}, and {others} more values differ. It began between "
            f"optimizer steps {steps}; the likely cause: {found.cause}. Make the ranks equal there, or call "
            "mpistrat.may_differ(module) if they may differ"
        )
        if actions[0] == "raise":
            error = DivergenceError(text, name)
            mark_raised_by_all(error)
            raise error
        if self._communicator.rank == 0:
            tell(text)
