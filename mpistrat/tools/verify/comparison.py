"""Compares runs step by step. A control tells how much rounding changes the program's numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mpistrat.tools.verify.recording import Recording, Sample, Step, sample

Run = list[Recording]  # of all its ranks, in their order

# A difference is a fault if it is FACTOR times the control's largest difference so far, and above FLOOR epsilon.
FACTOR = 100.0
FLOOR = 512.0
# The kinds of tensors of a step, in the order of the computation.
KINDS = ("before", "gradients", "buffers", "values")
_NONE = sample(np.zeros(0))  # stands for a tensor that a rank does not have


@dataclass(frozen=True)
class Verdict:
    """The first tensor of a rank that differs by more than rounding; without one, the tensor that differs most.

    Attributes:
        reference: the run that is right by definition: of one rank, or of as many ranks as `ranks`.
        ranks: the run that is judged.
        limit: the largest distance that rounding explains.
        outcome: "tensor", "steps" (other numbers of steps) or "equal".
        number: the number of the step, from 1; number of the compared steps if no tensor differs.
        kind, key: the tensor in `Step.tensors`.
        rank: the rank.
        distance: how far the two are apart, as a part of the norm of all tensors of the kind.
    """

    reference: Run
    ranks: Run
    limit: float
    outcome: str = "equal"
    number: int = 0
    kind: str = "values"
    key: str = ""
    rank: int = 0
    distance: float = 0.0

    def steps(self, run: Run) -> list[Step]:
        """Return the step on each rank."""
        index = self.number - 1
        return [rank.steps[index] for rank in run]

    def samples(self, run: Run) -> list[Sample]:
        """Return the tensor on each rank; of size 0 where there is none."""
        of_ranks = [step.tensors[self.kind] for step in self.steps(run)]
        return [tensors.get(self.key, _NONE) for tensors in of_ranks]


def compare(reference: Run, control: Recording, ranks: Run) -> Verdict:
    """Compare the steps that all runs have, up to the first that rounding changes beyond recognition.

    Args:
        reference, ranks: see `Verdict`.
        control: the first rank of the same run as `reference`, with numbers that were changed by rounding.
    """
    epsilon = reference[0].epsilon
    floor = FLOOR * epsilon
    recognisable = max(1 / FACTOR, 16 * epsilon)
    limits = dict.fromkeys(KINDS, floor)  # rounding grows in a training: they never fall
    most = Verdict(reference, ranks, floor)
    counts = {len(rank.steps) for rank in reference + ranks}
    for number in range(min(*counts, len(control.steps))):
        for kind in KINDS:
            shaken = _distances(reference[0], control, number, kind)
            rounding = np.max([0.0, *shaken.values()])
            if not rounding <= recognisable:  # it may be NaN
                return replace(most, outcome="equal", number=number)
            limit = max(limits[kind], FACTOR * rounding)
            limits[kind] = limit
            for right, rank in zip(reference * len(ranks), ranks, strict=False):
                for key, distance in _distances(right, rank, number, kind).items():
                    tensor = (number + 1, kind, key, rank.rank, distance)
                    found = Verdict(reference, ranks, limit, "tensor", *tensor)
                    if not distance <= limit:
                        return found
                    if distance > most.distance:
                        most = found
    outcome = "steps" if len(counts) > 1 else "equal"
    return replace(most, outcome=outcome, number=min(counts))


def _distances(mine: Recording, other: Recording, number: int, kind: str) -> dict[str, float]:
    """Return the distance of each tensor of a kind in a step, estimated from its elements and norms."""
    step = mine.steps[number]
    other_step = other.steps[number]
    samples = step.tensors.get(kind, {})
    others = other_step.tensors.get(kind, {})
    norms = [sample.norm for sample in samples.values()]
    scale = np.linalg.norm(norms) or 1.0
    found = dict.fromkeys(samples | others, 0.0)
    for key in found:
        right = samples.get(key, _NONE)
        judged = others.get(key, _NONE)
        if right.digest == judged.digest:
            continue
        apart = abs(right.norm - judged.norm)  # a gradient of zeros is as good as none
        if right.size == judged.size:
            differences = right.values - judged.values
            mean_square = np.square(differences).mean()
            apart = np.maximum(apart, np.sqrt(right.size * mean_square))
        found[key] = float(apart / scale)
    return found
