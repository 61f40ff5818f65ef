"""Names the causes that fit a difference. Each cause has a fact of the recordings behind it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.tools.verify.comparison import Run, Verdict
from mpistrat.tools.verify.recording import Step

_SAME = 1e-5  # numbers that differ less are the same but for rounding


def causes_of(found: Verdict) -> list[str]:
    """Return a sentence for each cause that fits, the likeliest first; [] if no fact tells causes apart."""
    steps = found.steps(found.reference[:1] + found.ranks)
    digests = {sample.digest for sample in found.samples(found.ranks)}
    # Sentences, and their facts. A sentence may hold its fact.
    causes: dict[str, Any] = {
        "The ranks differ among themselves. Gradients do if nothing reduces those of a rank's part (no_sync, "
        "torch.autograd.grad), or if the program writes them later.": len(digests) > 1,
        "The program has written it outside step(): weights that some ranks have loaded, a forward that changes them, "
        "or random numbers of a rank.": found.kind == "before",
        "Learning rates differ, on 1 rank and by rank: {}. A schedule that goes by the loss must get the loss of all "
        "ranks.": _unlike(steps, "rates"),
    }
    if found.kind in ("gradients", "buffers"):
        data = other_data(found)
        causes["The model got {}."] = data
        if not data:
            causes |= {
                "{} in training takes the statistics of a rank's part: mpistrat.convert_sync_batchnorm takes those of "
                "the batch.": names(found.ranks, "norms"),
                "A forward writes this buffer by the examples of a rank's part: mpistrat.reduce_buffers says how the "
                "ranks combine it.": found.kind == "buffers",
                "A hook of {} sees the gradient of a rank's part.": names(found.reference, "hooks"),
                "Random numbers are drawn between forward and backward() (noise, masks): draw them for the whole "
                "batch, and take strategy.shard of them.": any(step.draws for step in steps),
                "All gradients are {:.6g} times the right ones: a sum in place of a mean, or the reverse.": _factor(
                    steps
                ),
                "Numbers of calls of modules differ, on 1 rank and by rank: {}. A loop over examples makes them, or a "
                "solver that adapts its steps.": _unlike(steps, "calls"),
            }
    return [sentence.format(fact) for sentence, fact in causes.items() if fact]


def cause_of_split(found: Verdict, whole: Verdict) -> list[str]:
    """Return the cause that shows in `whole`, the verdict on ranks that each compute whole batches; else []."""
    if whole.outcome == "tensor" and whole.number <= found.number:
        return []
    sizes = [len(step.examples) for step in found.steps(found.ranks)]
    return [
        f"The loss does not split into parts of {sizes} examples: it is right on ranks that each compute whole "
        "batches. It is no mean over examples (pairs, tokens, boxes, masks, classes, the k largest), or the parts are "
        "unequal."
    ]


def other_data(found: Verdict) -> str:
    """Return the data that all ranks together got in the step; "" if the reference got the same."""
    right, wanted = _data_of(found.steps(found.reference))
    examples, inputs = _data_of(found.steps(found.ranks))
    if len(examples) != len(right):
        return f"{len(examples)} examples in this step, for {len(right)}"
    if examples == right or abs(inputs - wanted) <= _SAME * wanted:
        return ""
    all_steps = [step for rank in found.reference for step in rank.steps]
    everything, _ = _data_of(all_steps)
    if {*examples} <= {*everything}:
        return "the same examples in another order: shuffle by one seed on all ranks"
    return (
        f"other data (sum of inputs {inputs:.7g} for {wanted:.7g}): another split or order of files, augmentation by "
        "random numbers of a rank, or a tensor that the program trains by hand"
    )


def _data_of(steps: list[Step]) -> tuple[list[int], float]:
    """Return the checksums of all examples of steps, in order, and the sum of all inputs."""
    examples = sorted(digest for step in steps for digest in step.examples)
    return examples, sum(step.inputs for step in steps)


def names(run: Run, field: str) -> str:
    """Return the first names in a set that each rank of a run has recorded."""
    found = {name for rank in run for name in getattr(rank, field)}
    return ", ".join(sorted(found)[:3])


def _unlike(steps: list[Step], field: str) -> list[Any]:
    """Return the first values of a field; [] if all are equal."""
    values = [getattr(step, field) for step in steps]
    if values.count(values[0]) == len(values):
        return []
    return values[:5]


def _factor(steps: list[Step]) -> float:
    """Return c if all gradients in the second step are c times those in the first; 0.0 if not, or if c is 1."""
    flat = []
    for step in steps[:2]:
        gradients = step.tensors["gradients"].values()
        flat.append(np.concatenate([[], *(sample.values for sample in gradients)]))
    right, judged = flat
    if right.shape != judged.shape:
        return 0.0
    factor = right @ judged / (right @ right or 1.0)
    rest = np.linalg.norm(judged - factor * right)
    if rest < 1e-4 * np.linalg.norm(judged - right):
        return float(factor)
    return 0.0
