"""The text of a verdict: at most 15 lines."""

from __future__ import annotations

import numpy as np

from mpistrat.tools.verify.causes import Evidence
from mpistrat.tools.verify.comparison import Verdict
from mpistrat.tools.verify.recording import Recording, Sample, Step

MOST_LINES = 15
_KINDS = {
    "before": "the value before the step",
    "gradients": "the gradient",
    "buffers": "the buffer",
    "values": "the value after the step",
}


def equal(verdict: Verdict, reference: list[Recording], ranks: list[Recording]) -> list[str]:
    """Return the lines for runs that are equal up to rounding."""
    lines = [
        f"EQUAL up to rounding: {len(ranks)} ranks compute as {_named(reference)} in {verdict.steps} steps.",
        f"  The largest difference is {verdict.largest:.1e} of the norm; rounding explains {verdict.limit:.1e}.",
    ]
    if verdict.steps < len(reference[0].steps):
        lines.append("  In later steps rounding alone changes the numbers beyond recognition.")
    return lines + _notes([*reference, *ranks])


def different(evidence: Evidence, causes: list[str]) -> list[str]:
    """Return the lines for the first difference of two runs, and its causes."""
    found = evidence.found
    references = evidence.samples(evidence.reference)
    reference = references[found.rank % len(references)]
    labels = evidence.reference[0].labels | evidence.ranks[0].labels
    tensor = f"{_KINDS[found.kind]} of {labels.get(found.key, found.key)}"
    ranks = [rank.rank for rank in evidence.ranks]
    other = evidence.samples(evidence.ranks)[ranks.index(found.rank)]
    lines = [
        f"DIFFERENT at step {found.number + 1}: {tensor} on rank {found.rank}.",
        f"  {_named(evidence.reference)}: {_shown(reference, other)}",
        f"  rank {found.rank} of {len(ranks)}: {_shown(other, reference)}",
        f"  The difference is {found.distance:.1e} of the norm; rounding explains {found.limit:.1e}.",
    ]
    mine = evidence.steps(evidence.reference)
    if mine[0].losses:
        theirs = evidence.steps(evidence.ranks)
        lines.append(f"  loss of the step: {_loss(mine):.9g} and {_loss(theirs):.9g}")
    lines.append("Causes that fit:" if causes else "No fact tells the causes apart.")
    lines += [f"  {cause}" for cause in causes[:7]]
    return lines + _notes([*evidence.reference, *evidence.ranks])


def other_number_of_steps(reference: list[Recording], ranks: list[Recording]) -> list[str]:
    """Return the lines for runs that are equal as far as they go, and make unlike numbers of steps."""
    numbers = [len(rank.steps) for rank in ranks[:8]]
    return [
        f"DIFFERENT number of steps: {len(reference[0].steps)} on {_named(reference)}, {numbers} by rank.",
        "  The steps that all runs have are equal up to rounding.",
        *_notes([*reference, *ranks]),
    ]


def _named(reference: list[Recording]) -> str:
    return "1 rank" if len(reference) == 1 else f"{len(reference)} ranks on gloo"


def _shown(sample: Sample | None, other: Sample | None) -> str:
    """Return the norm of a tensor, and its element that differs most from `other`."""
    if sample is None:
        return "none"
    text = f"norm {sample.norm:.9g}"
    if other is None or other.size != sample.size:
        return f"{text}, {sample.size} elements"
    place = int(np.argmax(np.abs(sample.values - other.values)))
    return f"{text}, element {sample.values[place]:.9g}"


def _loss(steps: list[Step]) -> float:
    """Return the loss of all ranks: the sum of weights times losses."""
    return sum(weight * loss for step in steps for loss, weight in step.losses if weight)


def _notes(recordings: list[Recording]) -> list[str]:
    notes = []
    if any(recording.switched_off for recording in recordings):
        notes.append("Dropout was switched off in all runs.")
    outside = sorted(set().union(*(recording.outside for recording in recordings)))
    if outside:
        notes.append(f"All runs have written {outside[0]} (new files in all: {len(outside)}).")
    return notes
