"""Names the causes that fit a difference. Each cause has a test by facts of the recordings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mpistrat.tools.verify.comparison import FirstDifference
from mpistrat.tools.verify.recording import Recording, Sample, Step

_SAME = 1e-5  # numbers that differ less are the same but for rounding


@dataclass(frozen=True)
class Evidence:
    """The facts about a difference.

    Attributes:
        found: the difference.
        reference: the run that is right by definition: one rank, or ranks on gloo.
        ranks: the ranks that are judged.
        whole: as many ranks that each compute whole batches; [] if that was not run.
    """

    found: FirstDifference
    reference: list[Recording]
    ranks: list[Recording]
    whole: list[Recording] = field(default_factory=list)

    def steps(self, runs: list[Recording]) -> list[Step]:
        """Return the step of the difference on each rank of `runs`."""
        number = self.found.number
        return [rank.steps[number] for rank in runs if len(rank.steps) > number]

    def samples(self, runs: list[Recording]) -> list[Sample | None]:
        """Return the tensor that differs, on each rank of `runs`."""
        found = self.found
        return [step.tensors.get(found.kind, {}).get(found.key) for step in self.steps(runs)]

    def examples(self, runs: list[Recording]) -> Counter[int]:
        """Return the checksums of the examples of the step."""
        return _examples(self.steps(runs))

    def inputs(self, runs: list[Recording]) -> float:
        """Return the sum of the inputs of the step."""
        return sum(step.inputs for step in self.steps(runs))

    @property
    def has_same_data(self) -> bool:
        mine = self.examples(self.reference)
        theirs = self.examples(self.ranks)
        if mine.total() != theirs.total():
            return False
        return mine == theirs or _is_close(self.inputs(self.reference), self.inputs(self.ranks))


def causes_of(evidence: Evidence) -> list[str]:
    """Return a sentence for each cause that fits, the likeliest first; [] if no fact tells causes apart."""
    causes = _ALWAYS[:]
    if evidence.found.kind in ("gradients", "buffers"):
        causes.append(_data)
        if evidence.has_same_data:
            causes += _OF_GRADIENTS
    sentences = [cause(evidence) for cause in causes]
    return [sentence for sentence in sentences if sentence]


def needs_whole_batches(evidence: Evidence) -> bool:
    """Whether a run with whole batches on each rank tells more, because no fact explains an unlike gradient."""
    return evidence.found.kind == "gradients" and not causes_of(evidence)


def _not_agreeing(evidence: Evidence) -> str:
    samples = evidence.samples(evidence.ranks)
    if len({sample and sample.digest for sample in samples}) == 1:
        return ""
    norms = ", ".join(f"{sample.norm if sample else 0.0:.9g}" for sample in samples[:4])
    words = f"The ranks differ among themselves (norms by rank: {norms})"
    if evidence.found.kind != "gradients":
        return f"{words}."
    return (
        f"{words}: nothing has reduced the gradients of a rank's part (no_sync, torch.autograd.grad), or the program "
        "has written them since."
    )


def _begins_apart(evidence: Evidence) -> str:
    found = evidence.found
    if found.kind != "before":
        return ""
    if found.number == 0:
        return (
            "It differs before the first step: weights that some ranks have loaded, a forward that changes them, or "
            "random numbers of a rank."
        )
    for rank in evidence.ranks:
        after = rank.steps[found.number - 1].tensors["values"].get(found.key)
        before = rank.steps[found.number].tensors["before"].get(found.key)
        if after and before and after.digest != before.digest:
            return f"The program has written it between two calls of step(), on rank {rank.rank}."
    return ""


def _rates(evidence: Evidence) -> str:
    for step in evidence.steps(evidence.ranks):
        wanted = evidence.steps(evidence.reference)[0].rates
        if not np.allclose(step.rates, wanted, rtol=_SAME, atol=0.0):
            rates = [step.rates[:1] for step in evidence.steps(evidence.ranks)]
            return (
                f"Learning rates differ: {rates[:4]} by rank, for {wanted[:1]}. A schedule that goes by the loss must "
                "get the loss of all ranks."
            )
    return ""


def _data(evidence: Evidence) -> str:
    mine = evidence.examples(evidence.reference).total()
    theirs = evidence.examples(evidence.ranks).total()
    if mine != theirs:
        return f"All ranks together computed {theirs} examples in this step, for {mine}."
    if evidence.has_same_data:
        return ""
    if _of_all_steps(evidence.reference) == _of_all_steps(evidence.ranks):
        return "The model got the same examples in another order: shuffle by one seed on all ranks."
    return (
        f"The model got other data (sum of inputs {evidence.inputs(evidence.ranks):.7g} for "
        f"{evidence.inputs(evidence.reference):.7g}): another split or order of files, augmentation by random numbers "
        "of a rank, or a tensor that the program trains by hand."
    )


def _batch_norm(evidence: Evidence) -> str:
    kinds = sorted(set().union(*(rank.norms for rank in evidence.ranks)))
    if not kinds:
        return ""
    return (
        f"{', '.join(kinds)} in training takes the statistics of a rank's part: mpistrat.convert_sync_batchnorm takes "
        "those of the batch."
    )


def _buffer(evidence: Evidence) -> str:
    if evidence.found.kind != "buffers":
        return ""
    return (
        "A forward writes this buffer by the examples of a rank's part: mpistrat.reduce_buffers says how the ranks "
        "combine it."
    )


def _hooks(evidence: Evidence) -> str:
    names = sorted(set().union(*(rank.hooks for rank in evidence.reference)))
    if not names:
        return ""
    return f"A hook of {', '.join(names[:3])} sees the gradient of a rank's part."


def _random_numbers(evidence: Evidence) -> str:
    steps = evidence.steps([*evidence.reference, *evidence.ranks])
    if not any(step.draws for step in steps):
        return ""
    return (
        "Random numbers are drawn between forward and backward() (noise, masks): draw them for the whole batch, and "
        "take strategy.shard of them."
    )


def _factor(evidence: Evidence) -> str:
    factor = _ratio(evidence, evidence.ranks)
    if factor is None or _is_close(factor, 1.0):
        return ""
    return f"All gradients are {factor:.6g} times the right ones: a sum in place of a mean, or the reverse."


def _calls(evidence: Evidence) -> str:
    wanted = evidence.steps(evidence.reference)[0].calls
    calls = [step.calls for step in evidence.steps(evidence.ranks)]
    if wanted in calls:
        return ""
    return (
        f"Modules are called {calls[:4]} times by rank, for {wanted}: a loop over examples, or a solver that adapts "
        "its steps to them."
    )


def _whole_batches(evidence: Evidence) -> str:
    if not evidence.steps(evidence.whole):
        return ""
    if _ratio(evidence, evidence.whole) is None:
        if evidence.found.number:  # a sum of gradients is too large from the first step on
            return ""
        return "Ranks that each compute whole batches differ, too: the split is not the cause."
    sizes = [len(step.examples) for step in evidence.steps(evidence.ranks)]
    begin = "Ranks that each compute whole batches are right, so the loss does not split"
    if len({*sizes}) > 1:
        unequal = f"{begin}: a mean over unequal parts, of {sizes[:8]} examples"
        return f"{unequal}, or over boxes, tokens, pairs or the k largest."
    return f"{begin}: it is no mean over examples (pairs, the k largest, class weights, masks)."


_Causes = list[Callable[[Evidence], str]]
# In the order in which they are told.
_ALWAYS: _Causes = [_not_agreeing, _begins_apart, _rates]
_OF_GRADIENTS: _Causes = [
    _batch_norm,
    _buffer,
    _hooks,
    _random_numbers,
    _factor,
    _calls,
    _whole_batches,
]


def _ratio(evidence: Evidence, runs: list[Recording]) -> float | None:
    """Return c if all gradients of `runs` are c times those of the reference; None if there is no such number."""
    gradients = evidence.steps(evidence.reference)[0].tensors.get("gradients", {})
    others = evidence.steps(runs)[0].tensors.get("gradients", {})
    if not gradients or gradients.keys() != others.keys():
        return None
    mine = np.concatenate([gradients[key].values for key in gradients])
    theirs = np.concatenate([others[key].values for key in gradients])
    factor = float(mine @ theirs / (mine @ mine or 1.0))
    rest = np.linalg.norm(theirs - factor * mine)
    return factor if rest <= 1e-5 * np.linalg.norm(theirs) else None


def _of_all_steps(runs: list[Recording]) -> Counter[int]:
    return _examples([step for rank in runs for step in rank.steps])


def _examples(steps: list[Step]) -> Counter[int]:
    return Counter(digest for step in steps for digest in step.examples)


def _is_close(mine: float, theirs: float) -> bool:
    return math.isclose(mine, theirs, rel_tol=_SAME, abs_tol=_SAME)
