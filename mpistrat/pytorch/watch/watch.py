"""The watch: ranks compare all that should be equal on them, and a notice names the first value that has drifted apart.

A rank takes samples of its parameters, buffers, optimizers and schedulers after the optimizer steps 1, 2, 4, 8 and so
on, after each 1000th, and at the end of a loader. A checksum of them goes to the other ranks with the next agreement
that is there anyway, at last at the end of the program. The ranks send more only if checksums differ.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpistrat import settings
from mpistrat.communicators.contract.joint_errors import mark_raised_by_all
from mpistrat.communicators.graph_capture import is_capturing
from mpistrat.errors import DivergenceError
from mpistrat.machine.notices import tell
from mpistrat.pytorch.modules.registry import version
from mpistrat.pytorch.watch import drift
from mpistrat.pytorch.watch.compared import Schedulers, Things, tensors_and_options, training_flags
from mpistrat.pytorch.watch.divergence_report import (
    Digested,
    find_divergence,
    is_larger_than_rounding,
)
from mpistrat.pytorch.watch.mirrored_state import PARAMETER, Key
from mpistrat.pytorch.watch.samples import Samples
from mpistrat.pytorch.watch.unproved import SampledStep, Unproved
from mpistrat.replicas.torch_modules import NO_WORDS

if TYPE_CHECKING:
    from mpistrat.pytorch.modules.strategy_modules import StrategyModules

_EVERY = 1000
_FIRST_STEPS = 16  # in these steps each rank notes facts that may be causes


def is_due(number: int) -> bool:
    """Whether `number` is 1, 2, 4, 8 and so on, or a multiple of 1000."""
    return number & (number - 1) == 0 or number % _EVERY == 0


class Watch:
    """Compares the ranks of a strategy.

    Args:
        modules: the strategy's modules.
        roots: returns the outermost modules, for their training flags.

    Attributes: schedulers: the schedulers that have stepped.
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
        action = settings.on_drift()
        self._is_over = action == "off"
        self._is_off = self._is_over
        self.schedulers = Schedulers(modules.reducer)
        self._parts = modules.parts
        self._unproved = Unproved(action)
        self._unproved.present = weakref.WeakMethod(self._present)
        self._unproved.compare_at_end_of(self._communicator.mpi.comm)
        self._offered = 0  # so many of the first sampled steps are in `ModuleParts.watched`
        self._sampled_at = 0  # the step of the last samples
        self._has_told_of_rounding = False
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
            self._take(self._gradients)
            self._gradients = None
        if self._unproved.steps:
            self._offer()
        self.note_versions()

    def after_loader(self) -> None:
        """Take samples if there was a step since the last samples. Called by: the end of a loader. Not collective."""
        if not self._is_over and self._sampled_at < self._reducer.steps:
            self._take(Samples({}, 0))
            self._offer()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep samples of the last values when Python drops `optimizer`. Called by: its first step."""
        weakref.finalize(optimizer, _keep_last, weakref.ref(self)).atexit = False

    def keep_last(self) -> None:
        """Keep samples of the parameters that a dropped optimizer still holds, for the end of the program."""
        if self._unproved.steps:
            self._unproved.last = self._present()

    def _take(self, gradients: Samples) -> None:
        self._sampled_at = self._reducer.steps
        things = self._things()
        names = {key: thing.name for key, thing in things.items()}
        values = _samples(things, self._sampled_at)
        taken = SampledStep(self._sampled_at, names, values, gradients, self._facts)
        self._unproved.steps.append(taken)
        self._facts = {}

    def _present(self) -> Samples:
        return _samples(self._things(), 0)

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

    def _things(self) -> Things:
        return {
            **tensors_and_options(self._modules),
            **self.schedulers.things(),
            **training_flags(self._roots()),
        }

    def _offer(self) -> None:
        """Give the next agreement the number of the last step with samples on the host, and a checksum up to it.

        A device of another rank may be late. So the ranks compare the checksums only if all have the same number.
        """
        self._offered = self._unproved.arrived()
        self._parts.watched = NO_WORDS
        if self._offered:
            step = self._unproved.steps[self._offered - 1].step
            checksum = self._unproved.checksum(self._offered)
            self._parts.watched = np.array([step, -step, checksum, -checksum], np.int32)

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

    def at_save(self) -> DivergenceError | None:
        """Compare all bits of tensors. Collective.

        Rank 0 tells once of differences that are no larger than rounding, as between two kinds of processors. Options
        are compared by `Checkpoint.check_alike`.
        Called by: `CheckpointManager.save`, on every rank.
        Returns: the error for larger differences, equal on all ranks; None if there are none.
        """
        if self._is_off:
            return None
        things = tensors_and_options(self._modules)
        digested: dict[Key, Digested] = {}
        for key, thing in things.items():
            if isinstance(thing.copies[0], torch.Tensor):
                digested[key] = Digested.of(thing)
        of_rank = zlib.crc32(repr(digested).encode())
        digests = self._communicator.all_gather_object(of_rank, label="digest at a save")
        if len(set(digests)) == 1:
            return None
        if not self._is_over:
            self._find(len(self._unproved.steps))
        steps = self._reducer.steps
        when = f"at a save after {steps} optimizer steps"
        error = find_divergence(self._strategy, digested, when)
        if error is None or is_larger_than_rounding(self._communicator, things, digested, steps):
            return error
        if self._communicator.rank == 0 and not self._has_told_of_rounding:
            tell(f"{error.name} differs in the last bits between ranks, {when}")
        self._has_told_of_rounding = True
        return None

    def _find(self, count: int) -> None:
        gather = functools.partial(self._communicator.all_gather_object, label="samples of ranks")
        found = self._unproved.find(count, gather)
        if found is None:
            return
        self._is_over = True
        self._unproved.steps.clear()
        self._parts.watched = NO_WORDS
        if found.is_error:
            error = DivergenceError(found.text, found.name)
            mark_raised_by_all(error)
            raise error
        if self._communicator.rank == 0:
            tell(found.text)


def _keep_last(reference: weakref.ref[Watch]) -> None:
    watch = reference()
    if watch is not None:
        watch.keep_last()


def _samples(things: Things, turn: int) -> Samples:
    firsts = {}
    for key, thing in things.items():
        firsts[key] = thing.copies[0]
    return Samples(firsts, turn)
