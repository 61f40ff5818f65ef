"""Compares recordings step by step. A control tells how much rounding changes the program's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpistrat.tools.verify.recording import Recording, Sample

# A difference is a fault if it is FACTOR times the control's largest difference so far, and above FLOOR epsilon.
FACTOR = 100.0
FLOOR = 64.0
# The kinds of tensors of a step, in the order in which the program computes them.
KINDS = ("before", "gradients", "buffers", "values")
_NOT_REPEATABLE = 1e-3  # a part of the norm
# Where rounding changes a tensor by such a part of the norm, a program is chaotic: its steps are not compared.
_CHAOTIC = 0.5


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor of a rank that differs from the reference by more than rounding.

    Attributes:
        number: the index of the step, from 0.
        kind, key: the tensor in `Step.tensors`.
        rank: the rank.
        distance: how far the two are apart, as a part of the norm of all tensors of the kind.
        limit: the largest distance that rounding explains.
    """

    number: int
    kind: str
    key: str
    rank: int
    distance: float
    limit: float


@dataclass(frozen=True)
class Verdict:
    """The first difference; None if all is equal up to rounding.

    Attributes:
        steps: number of steps that were compared; fewer than there are, if rounding has changed the rest beyond
            recognition.
        largest, limit: the largest distance that rounding explains, and its limit.
    """

    difference: FirstDifference | None
    steps: int
    largest: float
    limit: float


def compare(references: list[Recording], control: Recording, ranks: list[Recording]) -> Verdict:
    """Compare the steps that all runs have.

    Args:
        references: the run that is right by definition: one rank, or as many ranks as `ranks`.
        control: the first rank of the same run with numbers that were changed by rounding.
        ranks: the ranks to judge.
    """
    first = references[0]
    rounding: dict[tuple[str, str], float] = {}  # it grows in a training, so that it never falls
    largest = (0.0, FLOOR * first.epsilon)
    for number in range(len(first.steps)):
        for kind in KINDS:
            shaken = _distances(first, control, number, kind)
            middle = float(np.median([*shaken.values(), 0.0]))
            for key, distance in shaken.items():
                so_far = rounding.get((kind, key), 0.0)
                rounding[kind, key] = max(so_far, distance, middle)
            if max(rounding.values(), default=0.0) > _CHAOTIC:
                return Verdict(None, number, *largest)
            worst = None
            for rank in ranks:
                reference = references[rank.rank % len(references)]
                for key, distance in _distances(reference, rank, number, kind).items():
                    limit = FACTOR * rounding.get((kind, key), 0.0)
                    limit = max(limit, FLOOR * first.epsilon)
                    if distance <= limit:
                        largest = max(largest, (distance, limit))
                    elif worst is None or distance > worst.distance:
                        worst = FirstDifference(number, kind, key, rank.rank, distance, limit)
            if worst is not None:
                return Verdict(worst, number, *largest)
    return Verdict(None, len(first.steps), *largest)


def is_repeatable(reference: Recording, control: Recording) -> bool:
    """Whether the control begins as `reference` does."""
    most = max(_NOT_REPEATABLE, 16 * reference.epsilon)
    kinds = ("before", "gradients") if "before" in reference.steps[0].tensors else ("values",)
    for kind in kinds:
        distances = _distances(reference, control, 0, kind)
        if max(distances.values(), default=0.0) > most:
            return False
    return True


def _distances(reference: Recording, other: Recording, number: int, kind: str) -> dict[str, float]:
    """Return the distance of each tensor of a kind in a step; {} if a run has no such step."""
    if number >= min(len(reference.steps), len(other.steps)):
        return {}
    mine = reference.steps[number].tensors.get(kind, {})
    theirs = other.steps[number].tensors.get(kind, {})
    scale = math.hypot(*(s.norm for s in mine.values() if not s.exact)) or 1.0
    found = {}
    for key in sorted({*mine, *theirs}):
        if key in mine and key in theirs:
            found[key] = _distance(mine[key], theirs[key], scale)
        else:  # a gradient of zeros is as good as none
            found[key] = (mine.get(key) or theirs[key]).norm / scale
    return found


def _distance(mine: Sample, other: Sample, scale: float) -> float:
    """Return the distance of two tensors in units of `scale`, estimated from their elements and norms."""
    if mine.size != other.size:
        return math.inf
    if np.array_equal(mine.values, other.values, equal_nan=True) and mine.digest == other.digest:
        return 0.0
    whole = math.sqrt(mine.size / max(1, mine.values.size))
    sampled = float(np.linalg.norm(mine.values - other.values)) * whole
    apart = max(sampled, abs(mine.norm - other.norm))
    if math.isnan(apart):
        return math.inf
    return apart if mine.exact else apart / scale
