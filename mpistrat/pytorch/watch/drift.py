"""Finds the first optimizer step that leaves ranks different, and the likely cause, from the evidence of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpistrat.machine.notices import ranks_in_words
from mpistrat.pytorch.watch.keys import (
    OF_PARAMETER,
    OPTIMIZER,
    PARAMETER,
    SCALER,
    SCHEDULER,
    TRAINING,
    Key,
)

_MOST_TOLD = 4  # groups of ranks in a notice

Values = Mapping[Key, Any]  # a checksum or a text, by key

# Facts about a step, the likeliest cause first. {} is the number of the step, or the name of a parameter.
LOCAL = "backward() inside no_sync gave gradients of step {} that were not reduced"
UNREDUCED = "no backward() reduced the gradients of step {}: autograd.grad, torch.func or the program set them"
WRITTEN = "{} was written outside optimizer.step()"
_CAUSES = {
    OPTIMIZER: "each rank sets it by its own loss or its own random numbers",
    SCHEDULER: "each rank steps the scheduler by its own loss, or not equally often",
    SCALER: "some ranks have loaded its state, or have not called update() equally often",
    TRAINING: "train() or eval() was called on some ranks only",
}
_CHANGED = "some .grad was written after backward() had reduced it"
_OTHER = (
    "some ranks have loaded a state, or have written values or their .data outside optimizer.step()"
)


class Evidence(NamedTuple):
    """The state of a rank right after an optimizer step.

    Attributes:
        step: the step's number, from 1.
        values: all that should be equal on all ranks.
        gradients: checksums of `.grad` before the step, by key of the parameter.
        facts: the step or the name for the text of each fact that this rank has noted since the evidence before.
    """

    step: int
    values: Values
    gradients: Values
    facts: Mapping[str, str]


class Drift(NamedTuple):
    """The first difference between ranks.

    Attributes:
        number: number of the evidence that shows it.
        before: the last step that left all equal; 0 if there is none.
        step: the step of the evidence.
        keys: the keys of the values that differ; the first key tells most.
        cause: the likely cause, in words.
    """

    number: int
    before: int
    step: int
    keys: list[Key]
    cause: str


def differing(by_rank: Sequence[Values]) -> set[Key]:
    """Return the keys that all ranks have, and that have other values on some ranks."""
    common = set(by_rank[0]).intersection(*by_rank)
    found = set()
    for key in common:
        of_ranks = {values[key] for values in by_rank}
        if len(of_ranks) > 1:
            found.add(key)
    return found


def first_drift(
    evidence: Sequence[Sequence[Evidence]], now: Sequence[Values], before: int, generators: set[int]
) -> Drift | None:
    """Return the first difference that is still there.

    A difference that is gone later is no drift: a program may average parameters by itself after a step.
    Args:
        evidence: the evidence of each rank, by rank, in the order of steps.
        now: the present values of each rank, by rank.
        before: the last step that left all equal; 0 for none.
        generators: the checksums of the ranks' random generators.
    Returns: None if there is no such difference.
    """
    still = differing(now)
    for number, of_ranks in enumerate(zip(*evidence, strict=False)):
        step = of_ranks[0].step
        if len({rank.step for rank in of_ranks}) > 1:  # some ranks have made more steps
            return None
        then = differing([rank.values for rank in of_ranks])
        keys = sorted(still & then, key=_order)
        if keys:
            cause = _cause(keys[0], of_ranks)
            if keys[0][0] == PARAMETER and len(generators) > 1:
                cause += "; the ranks' random generators differ"
            return Drift(number, before, step, keys, cause)
        before = step
    return None


def _order(key: Key) -> tuple[int, Key]:
    """Return a key for sorting: options first, because parameters that differ follow from them, and states last."""
    if key[0] == OPTIMIZER and key[2] == OF_PARAMETER:
        return 2, key
    return int(key[0] < OPTIMIZER), key


def _cause(key: Key, of_ranks: Sequence[Evidence]) -> str:
    order, _ = _order(key)
    if order == 0:
        return _CAUSES[key[0]]
    facts = [WRITTEN]
    other = _OTHER
    if differing([evidence.gradients for evidence in of_ranks]):
        # A reduction gives all ranks the same bits.
        facts = [LOCAL, UNREDUCED]
        other = _CHANGED
    for fact in facts:
        ranks = []
        text = ""
        for rank, evidence in enumerate(of_ranks):
            if fact in evidence.facts:
                text = text or fact.format(evidence.facts[fact])
                ranks.append(rank)
        if len(ranks) == len(of_ranks):
            return text
        if ranks:
            return f"{text} on {ranks_in_words(ranks)}"
    return other


def values_in_words(by_rank: Sequence[Sequence[str]]) -> str:
    """Return the values of the ranks at the first place where they differ: "0.5 on rank 0, 0.25 on ranks 1-3".

    Args: by_rank: the sampled elements of each rank, by rank.
    """
    ranks: dict[str, list[int]] = {}
    for row in zip(*by_rank, strict=False):
        ranks.clear()
        for rank, value in enumerate(row):
            ranks.setdefault(f"{value:.40}", []).append(rank)
        if len(ranks) > 1:
            break
    groups = [
        f"{value} on {ranks_in_words(ranks_with_it)}" for value, ranks_with_it in ranks.items()
    ]
    return ", ".join(groups[:_MOST_TOLD])
