"""`mpistrat verify`: the verdict on recorded steps, and the causes that it names."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from mpistrat.tools.verify import report
from mpistrat.tools.verify.causes import Evidence, causes_of, needs_whole_batches
from mpistrat.tools.verify.comparison import Verdict, compare, is_repeatable
from mpistrat.tools.verify.recording import Recording, Step, sample

EPSILON = float(np.finfo(np.float64).eps)
WEIGHTS = np.array([1.0, 2.0, 3.0])


def recording(rank: int = 0, *, factor: float = 1.0, steps: int = 3) -> Recording:
    """A training whose gradients are the weights times a factor."""
    found = Recording(rank, epsilon=EPSILON, labels={"0": "Linear.weight"})
    weights = WEIGHTS
    for number in range(steps):
        gradients = weights * factor
        after = weights - 0.1 * gradients
        step = Step(rates=[0.1], examples=[number, number + 100], inputs=5.0, calls=4)
        kinds = {"before": weights, "gradients": gradients, "values": after}
        step.tensors = {kind: {"0": sample(array)} for kind, array in kinds.items()}
        found.steps.append(step)
        weights = after
    return found


CONTROL = recording(factor=1 + 2 * EPSILON)


def parts(*, factor: float = 1.0, ranks: int = 2) -> list[Recording]:
    """Ranks that each have a part of the examples of `recording`."""
    found = [recording(rank, factor=factor) for rank in range(ranks)]
    for rank in found:
        for step in rank.steps:
            step.examples = step.examples[rank.rank :: ranks]
            step.inputs /= ranks
    return found


def judged(ranks: list[Recording]) -> Verdict:
    return compare([recording()], CONTROL, ranks)


def evidence(ranks: list[Recording], reference: Recording | None = None) -> Evidence:
    difference = judged(ranks).difference
    assert difference is not None
    return Evidence(difference, [reference or recording()], ranks)


@pytest.mark.parametrize("size", [0, 1, 5, 512, 513, 100_000])
def test_a_sample_stands_for_its_tensor(size: int) -> None:
    array = np.arange(size, dtype=np.float32)
    found = sample(array)
    assert found.size == size
    assert found.values.size <= 512
    assert found.norm == pytest.approx(float(np.linalg.norm(array.astype(float))))
    changed = array.copy()
    changed[-1:] += 1
    assert (sample(changed).digest == found.digest) == (size == 0)


@pytest.mark.parametrize("factor", [1.0, 1 + 4 * EPSILON, 1 - 30 * EPSILON])
def test_rounding_is_no_difference(factor: float) -> None:
    verdict = judged(parts(factor=factor))
    assert verdict.difference is None
    assert verdict.largest <= 64 * EPSILON
    lines = report.equal(verdict, [recording()], parts())
    assert lines[0] == "EQUAL up to rounding: 2 ranks compute as 1 rank in 3 steps."


def test_ranks_on_gloo_are_compared_rank_by_rank() -> None:
    """As buffers of batch norms, which DDP leaves to each rank."""
    references = [recording(0), recording(1, factor=1.5)]
    assert compare(references, CONTROL, [recording(0), recording(1, factor=1.5)]).difference is None
    found = compare(references, CONTROL, [recording(0), recording(1)]).difference
    assert found is not None
    assert found.rank == 1


def test_the_control_raises_the_limit() -> None:
    """A program whose numbers are as unstable as its control's is right."""
    ranks = parts(factor=1 + 1e-9)
    assert compare([recording()], recording(factor=1 + 1e-10), ranks).difference is None
    assert judged(ranks).difference is not None
    assert is_repeatable(recording(), CONTROL)
    assert not is_repeatable(recording(), recording(factor=1.5))


def test_chaos_is_not_judged() -> None:
    """Where rounding alone changes the numbers beyond recognition, nothing is compared."""
    control = recording()
    control.steps[1].tensors["values"]["0"] = sample(WEIGHTS * -3)
    ranks = parts()
    ranks[0].steps[1].tensors["values"]["0"] = sample(WEIGHTS * 1e6)
    verdict = compare([recording()], control, ranks)
    assert (verdict.difference, verdict.steps) == (None, 1)
    lines = report.equal(verdict, [recording()], ranks)
    assert lines[0].endswith("in 1 steps.")
    assert lines[2] == "  In later steps rounding alone changes the numbers beyond recognition."


def test_nan_is_equal_to_nan_alone() -> None:
    ranks = parts()
    reference = recording()
    for run in (reference, CONTROL, *ranks):
        run.steps[0].tensors["gradients"] = {"0": sample(np.array([np.nan, 1.0]))}
    try:
        assert compare([reference], CONTROL, ranks).difference is None
        ranks[1].steps[0].tensors["gradients"] = {"0": sample(np.array([1.0, 1.0]))}
        assert compare([reference], CONTROL, ranks).difference is not None
    finally:
        CONTROL.steps[0].tensors["gradients"] = {"0": sample(WEIGHTS * (1 + 2 * EPSILON))}


def test_integers_have_no_rounding() -> None:
    ranks = parts()
    reference = recording()
    for run, count in ((reference, 1 << 40), (ranks[0], (1 << 40) + 1), (ranks[1], 1 << 40)):
        run.steps[1].tensors["buffers"] = {"seen": sample(np.array(count))}
    found = compare([reference], reference, ranks).difference
    assert found is not None
    assert (found.number, found.kind, found.key, found.rank) == (1, "buffers", "seen", 0)


def test_a_gradient_of_zeros_is_as_good_as_none() -> None:
    ranks = parts()
    ranks[0].steps[0].tensors["gradients"]["1"] = sample(np.zeros(3))
    assert judged(ranks).difference is None
    ranks[0].steps[0].tensors["gradients"]["1"] = sample(np.ones(3))
    assert judged(ranks).difference is not None


def both(change: Callable[[Recording], None], factor: float = 1.5) -> list[Recording]:
    ranks = parts(factor=factor)
    for rank in ranks:
        change(rank)
    return ranks


def turned(rank: Recording) -> None:
    """Its gradient is no multiple of the right one."""
    rank.steps[0].tensors["gradients"]["0"] = sample(WEIGHTS[::-1])


def normed(rank: Recording) -> None:
    turned(rank)
    rank.norms.add("BatchNorm2d")


def drawn(rank: Recording) -> None:
    turned(rank)
    rank.steps[0].draws = True


def called(rank: Recording) -> None:
    turned(rank)
    rank.steps[0].calls = 7 + rank.rank


def of_other_data(rank: Recording) -> None:
    turned(rank)
    rank.steps[0].examples = [77]
    rank.steps[0].inputs = 9.0


def in_another_order(rank: Recording) -> None:
    turned(rank)
    first, second = rank.steps[:2]
    first.examples, second.examples = second.examples, first.examples
    first.inputs = 9.0


def all_of_it(rank: Recording) -> None:
    turned(rank)
    rank.steps[0].examples = [0, 100]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rank: None, "All gradients are 1.5 times the right ones"),
        (normed, "BatchNorm2d in training takes the statistics of a rank's part"),
        (drawn, "Random numbers are drawn between forward and backward()"),
        (called, "Modules are called [7, 8] times by rank, for 4"),
        (of_other_data, "The model got other data (sum of inputs 18 for 5)"),
        (in_another_order, "The model got the same examples in another order"),
        (all_of_it, "All ranks together computed 4 examples in this step, for 2"),
    ],
)
def test_a_fact_names_a_cause(change: Callable[[Recording], None], words: str) -> None:
    found = evidence(both(change))
    assert (found.found.number, found.found.kind) == (0, "gradients")
    (cause,) = causes_of(found)
    assert cause.startswith(words)
    assert not needs_whole_batches(found)


def test_a_hook() -> None:
    reference = recording()
    reference.hooks.add("Linear.weight")
    (cause,) = causes_of(evidence(both(turned), reference))
    assert cause == "A hook of Linear.weight sees the gradient of a rank's part."


def test_ranks_that_differ_among_themselves() -> None:
    ranks = parts()
    turned(ranks[1])
    found = evidence(ranks)
    assert found.found.rank == 1
    (cause,) = causes_of(found)
    assert cause.startswith("The ranks differ among themselves (norms by rank: 3.74165739, 3.7")


def test_values_that_differ_before_the_first_step() -> None:
    ranks = parts()
    ranks[1].steps[0].tensors["before"]["0"] = sample(WEIGHTS + 1)
    among, begun = causes_of(evidence(ranks))
    assert among.startswith("The ranks differ among themselves")
    assert begun.startswith("It differs before the first step")


def test_values_that_were_written_between_steps() -> None:
    ranks = parts()
    for rank in ranks:
        rank.steps[2].tensors["before"]["0"] = sample(WEIGHTS)
    (cause,) = causes_of(evidence(ranks))
    assert cause == "The program has written it between two calls of step(), on rank 0."


def test_learning_rates() -> None:
    ranks = parts()
    ranks[1].steps[1].rates = [0.05]
    ranks[1].steps[1].tensors["values"]["0"] = sample(WEIGHTS)
    _, cause = causes_of(evidence(ranks))
    assert cause.startswith("Learning rates differ: [[0.1], [0.05]] by rank, for [0.1].")


@pytest.mark.parametrize(
    ("whole", "sizes", "words"),
    [
        (recording(), (1, 1), "no mean over examples (pairs"),
        (recording(factor=2.0), (1, 1), "no mean over examples (pairs"),
        (recording(), (2, 0), "a mean over unequal parts, of [2, 0] examples"),
    ],
)
def test_a_loss_that_does_not_split(whole: Recording, sizes: tuple[int, int], words: str) -> None:
    ranks = both(turned)
    ranks[0].steps[0].examples = [0, 100][: sizes[0]]
    ranks[1].steps[0].examples = [100][: sizes[1]]
    found = evidence(ranks)
    assert needs_whole_batches(found)
    assert causes_of(found) == []
    (cause,) = causes_of(dataclasses.replace(found, whole=[whole, whole]))
    assert cause.startswith("Ranks that each compute whole batches are right, so the loss")
    assert words in cause


def test_without_a_fact_no_cause_is_named() -> None:
    found = evidence(both(turned))
    assert "No fact tells the causes apart." in report.different(found, causes_of(found))
    turned_too = recording()
    turned(turned_too)
    (cause,) = causes_of(dataclasses.replace(found, whole=[turned_too]))
    assert cause.endswith("the split is not the cause.")


def test_whole_batches_prove_nothing_after_their_first_step() -> None:
    """With a sum of gradients, their first step is too long already."""
    ranks = parts()
    for rank in ranks:
        rank.steps[1].tensors["gradients"]["0"] = sample(WEIGHTS[::-1])
    other = recording()
    other.steps[1].tensors["gradients"]["0"] = sample(WEIGHTS * WEIGHTS)
    found = dataclasses.replace(evidence(ranks), whole=[other])
    assert found.found.number == 1
    assert causes_of(found) == []


def test_a_report_has_15_lines_at_most() -> None:
    ranks = parts()
    for rank in ranks:
        for change in (normed, drawn, called):
            change(rank)
        rank.steps[0].tensors["gradients"]["0"] = sample(WEIGHTS[::-1] * (2 + rank.rank))
        rank.steps[0].rates = [0.3]
        rank.steps[0].losses = [(4.0, 0.5)]
        rank.switched_off = True
        rank.outside.add("/home/me/log")
    reference = recording()
    reference.hooks.add("Linear.weight")
    reference.steps[0].losses = [(5.0, 1.0)]
    found = evidence(ranks, reference)
    lines = report.different(found, causes_of(found))
    assert len(lines) <= 15
    assert lines[0] == "DIFFERENT at step 1: the gradient of Linear.weight on rank 1."
    assert lines[4] == "  loss of the step: 5 and 4"
    assert lines[-2] == "Dropout was switched off in all runs."


def test_another_number_of_steps() -> None:
    ranks = [recording(0, steps=2), recording(1, steps=2)]
    assert judged(ranks).difference is None
    lines = report.other_number_of_steps([recording()], ranks)
    assert lines[0] == "DIFFERENT number of steps: 3 on 1 rank, [2, 2] by rank."
