"""The text of a verdict: at most 15 lines."""

from __future__ import annotations

from mpistrat.tools.verify.causes import names
from mpistrat.tools.verify.comparison import Run, Verdict

_KINDS = {
    "before": "the value before the step",
    "gradients": "the gradient",
    "buffers": "the buffer",
    "values": "the value after the step",
}
_OUTCOMES = {
    "tensor": """\
DIFFERENT at step {found.number}: {kind} of {label} on rank {found.rank}.
  {right}: {mine}
  rank {found.rank} of {ranks}: {theirs}
  The difference is {found.distance:.1e} of the norm; rounding explains {found.limit:.1e}.
Causes that fit:""",
    "steps": """\
DIFFERENT number of steps, on 1 rank and by rank: {counts}.
  The steps that all runs have are equal up to rounding.""",
    "equal": """\
EQUAL up to rounding: {ranks} ranks compute as {right} in {found.number} of {counts[0]} steps.
  The largest difference is {found.distance:.1e} of the norm; rounding explains {found.limit:.1e}.""",
}


def text_of(found: Verdict, causes: list[str]) -> str:
    """Return the lines for a verdict, and for the causes of a difference."""
    ranks = len(found.ranks)
    text = _OUTCOMES[found.outcome].format(
        found=found,
        kind=_KINDS[found.kind],
        label=found.ranks[0].labels.get(found.key, found.key),
        ranks=ranks,
        right="1 rank" if len(found.reference) == 1 else f"{ranks} ranks on gloo",
        mine=_side(found, found.reference),
        theirs=_side(found, found.ranks),
        counts=[len(rank.steps) for rank in found.reference[:1] + found.ranks],
    )
    lines = [text, *(f"  {cause}" for cause in causes)]
    if found.reference[0].switched_off:
        lines.append("Dropout was switched off in all runs.")
    outside = names(found.ranks, "outside")
    if outside:
        lines.append(f"All runs have written new files, such as {outside}.")
    return "\n".join(lines)


def _side(found: Verdict, run: Run) -> str:
    """Return the tensor on a rank, and the loss of all ranks."""
    sample = found.samples(run)[found.rank % len(run)]
    steps = found.steps(run)
    loss = sum(weight * loss for step in steps for loss, weight in step.losses if weight)
    return f"norm {sample.norm:.9g}, elements {sample.values[:3]}, loss {loss or 'unknown'}"
