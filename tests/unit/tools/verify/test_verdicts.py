"""`mpistrat verify`: the verdict on recorded steps, and the causes that it names."""

from collections.abc import Callable

import numpy as np
import pytest

from mpistrat.tools.verify.causes import cause_of_split, causes_of, other_data
from mpistrat.tools.verify.comparison import Verdict, compare
from mpistrat.tools.verify.recording import Recording, Step, sample
from mpistrat.tools.verify.report import text_of

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


def judged(ranks: list[Recording], reference: Recording | None = None) -> Verdict:
    return compare([reference or recording()], CONTROL, ranks)


def differing(ranks: list[Recording], reference: Recording | None = None) -> Verdict:
    found = judged(ranks, reference)
    assert found.outcome == "tensor"
    return found


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
    assert verdict.outcome == "equal"
    assert verdict.distance <= 512 * EPSILON
    assert text_of(verdict, []).startswith(
        "EQUAL up to rounding: 2 ranks compute as 1 rank in 3 of 3 steps.\n"
    )


def test_ranks_on_gloo_are_compared_rank_by_rank() -> None:
    """As buffers of batch norms, which DDP leaves to each rank."""
    references = [recording(0), recording(1, factor=1.5)]
    ranks = [recording(0), recording(1, factor=1.5)]
    assert compare(references, CONTROL, ranks).outcome == "equal"
    found = compare(references, CONTROL, [recording(0), recording(1)])
    assert (found.outcome, found.rank) == ("tensor", 1)
    assert "  2 ranks on gloo: norm 5.61" in text_of(found, [])


def test_the_control_raises_the_limit() -> None:
    """A program whose numbers are as unstable as its control's is right."""
    ranks = parts(factor=1 + 1e-9)
    control = recording(factor=1 + 1e-10)
    assert compare([recording()], control, ranks).outcome == "equal"
    assert judged(ranks).outcome == "tensor"


def test_a_program_that_cannot_be_repeated_is_not_compared() -> None:
    verdict = compare([recording()], recording(factor=1.5), parts(factor=1.5))
    assert (verdict.outcome, verdict.number) == ("equal", 0)


def test_chaos_is_not_judged() -> None:
    """Where rounding alone changes the numbers beyond recognition, nothing is compared."""
    control = recording()
    control.steps[1].tensors["values"]["0"] = sample(WEIGHTS * -3)
    ranks = parts()
    ranks[0].steps[1].tensors["values"]["0"] = sample(WEIGHTS * 1e6)
    verdict = compare([recording()], control, ranks)
    assert (verdict.outcome, verdict.number) == ("equal", 1)
    assert "in 1 of 3 steps." in text_of(verdict, [])


def test_nan_is_equal_to_nan_alone() -> None:
    ranks = parts()
    reference = recording()
    control = recording()
    for run in (reference, control, *ranks):
        run.steps[0].tensors["gradients"] = {"0": sample(np.array([np.nan, 1.0]))}
    assert compare([reference], control, ranks).outcome == "equal"
    ranks[1].steps[0].tensors["gradients"] = {"0": sample(np.array([1.0, 1.0]))}
    assert compare([reference], control, ranks).outcome == "tensor"


def test_integers_have_no_rounding() -> None:
    ranks = parts()
    reference = recording()
    for run, count in ((reference, 1 << 40), (ranks[0], (1 << 40) + 1), (ranks[1], 1 << 40)):
        run.steps[1].tensors["buffers"] = {"seen": sample(np.array(count))}
    found = compare([reference], reference, ranks)
    assert (found.number, found.kind, found.key, found.rank) == (2, "buffers", "seen", 0)


def test_a_gradient_of_zeros_is_as_good_as_none() -> None:
    ranks = parts()
    ranks[0].steps[0].tensors["gradients"]["1"] = sample(np.zeros(3))
    assert judged(ranks).outcome == "equal"
    ranks[0].steps[0].tensors["gradients"]["1"] = sample(np.ones(3))
    assert judged(ranks).outcome == "tensor"


def test_tensors_of_unlike_sizes_differ() -> None:
    ranks = parts()
    ranks[1].steps[1].tensors["values"]["0"] = sample(WEIGHTS[:2])
    found = differing(ranks)
    assert (found.number, found.kind, found.rank) == (2, "values", 1)


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
        (called, "Numbers of calls of modules differ, on 1 rank and by rank: [4, 7, 8]."),
        (of_other_data, "The model got other data (sum of inputs 18 for 5)"),
        (in_another_order, "The model got the same examples in another order"),
        (all_of_it, "The model got 4 examples in this step, for 2"),
    ],
)
def test_a_fact_names_a_cause(change: Callable[[Recording], None], words: str) -> None:
    found = differing(both(change))
    assert (found.number, found.kind) == (1, "gradients")
    (cause,) = causes_of(found)
    assert cause.startswith(words)
    assert bool(other_data(found)) == ("The model got" in words)


def test_a_hook() -> None:
    reference = recording()
    reference.hooks.add("Linear.weight")
    (cause,) = causes_of(differing(both(turned), reference))
    assert cause == "A hook of Linear.weight sees the gradient of a rank's part."


def test_a_buffer() -> None:
    ranks = parts()
    reference = recording()
    for number, run in enumerate((reference, *ranks)):
        run.steps[0].tensors["buffers"] = {"mean": sample(WEIGHTS * min(1 + number, 2))}
    (cause,) = causes_of(compare([reference], reference, ranks))
    assert cause.startswith("A forward writes this buffer by the examples of a rank's part")


def test_ranks_that_differ_among_themselves() -> None:
    ranks = parts()
    turned(ranks[1])
    found = differing(ranks)
    assert found.rank == 1
    (cause,) = causes_of(found)
    assert cause.startswith("The ranks differ among themselves. Gradients do")


def test_values_that_differ_before_the_first_step() -> None:
    ranks = parts()
    ranks[1].steps[0].tensors["before"]["0"] = sample(WEIGHTS + 1)
    found = differing(ranks)
    among, begun = causes_of(found)
    assert among.startswith("The ranks differ among themselves")
    assert begun.startswith("The program has written it outside step(): weights that some ranks")
    assert text_of(found, []).startswith("DIFFERENT at step 1: the value before the step of ")


def test_values_that_were_written_between_steps() -> None:
    ranks = parts()
    for rank in ranks:
        rank.steps[2].tensors["before"]["0"] = sample(WEIGHTS)
    found = differing(ranks)
    (cause,) = causes_of(found)
    assert cause.startswith("The program has written it outside step()")
    assert text_of(found, []).startswith("DIFFERENT at step 3: the value before the step of ")


def test_learning_rates() -> None:
    ranks = parts()
    ranks[1].steps[1].rates = [0.05]
    ranks[1].steps[1].tensors["values"]["0"] = sample(WEIGHTS)
    _, cause = causes_of(differing(ranks))
    assert cause.startswith("Learning rates differ, on 1 rank and by rank: [[0.1], [0.1], [0.05]].")


@pytest.mark.parametrize("sizes", [(1, 1), (2, 0)])
def test_a_loss_that_does_not_split(sizes: tuple[int, int]) -> None:
    ranks = both(turned)
    ranks[0].steps[0].examples = [0, 100][: sizes[0]]
    ranks[1].steps[0].examples = [100][: sizes[1]]
    found = differing(ranks)
    assert causes_of(found) == []
    (cause,) = cause_of_split(found, judged([recording(0), recording(1)]))
    assert cause.startswith(f"The loss does not split into parts of {[*sizes]} examples")
    assert cause_of_split(found, judged([recording(0, factor=2.0)])) == []


def test_a_loss_that_does_not_split_in_the_last_step() -> None:
    ranks = parts()
    ranks[0].steps[2].tensors["gradients"]["0"] = sample(WEIGHTS[::-1])
    found = differing(ranks)
    assert found.number == 3
    assert len(cause_of_split(found, judged([recording()]))) == 1
    turned_at_once = recording()
    turned(turned_at_once)
    assert cause_of_split(found, judged([turned_at_once])) == []


def test_buffers_of_a_step_without_gradients() -> None:
    ranks = parts()
    reference = recording()
    for run in (reference, *ranks):
        run.steps[0].tensors |= {"gradients": {}, "buffers": {"mean": sample(WEIGHTS * run.rank)}}
    found = compare([reference], reference, ranks)
    assert (found.kind, found.rank) == ("buffers", 1)
    assert any("A forward writes this buffer" in cause for cause in causes_of(found))


def test_without_a_fact_no_cause_is_named() -> None:
    assert causes_of(differing(both(turned))) == []


def test_a_report_has_15_lines_at_most() -> None:
    ranks = parts()
    for rank in ranks:
        for change in (normed, drawn, called):
            change(rank)
        rank.steps[0].tensors["gradients"]["0"] = sample(WEIGHTS * (2 + rank.rank))
        rank.steps[0].rates = [0.3]
        rank.steps[0].losses = [(4.0, 0.5)]
        rank.outside.add("/home/me/log")
    reference = recording()
    reference.hooks.add("Linear.weight")
    reference.switched_off = True
    reference.steps[0].losses = [(5.0, 1.0)]
    found = differing(ranks, reference)
    lines = text_of(found, causes_of(found)).splitlines()
    assert len(lines) == 14
    assert lines[0] == "DIFFERENT at step 1: the gradient of Linear.weight on rank 0."
    assert lines[1].endswith(", loss 5.0")
    assert lines[2].endswith(", loss 4.0")
    assert lines[-2:] == [
        "Dropout was switched off in all runs.",
        "All runs have written new files, such as /home/me/log.",
    ]


def test_another_number_of_steps() -> None:
    found = judged([recording(0, steps=2), recording(1, steps=2)])
    assert found.outcome == "steps"
    assert text_of(found, []).startswith(
        "DIFFERENT number of steps, on 1 rank and by rank: [3, 2, 2].\n"
    )
