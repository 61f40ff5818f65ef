"""What a step knows of those after it."""

import pytest

from mpistrat.input.readers import knowing_what_follows
from mpistrat.input.splitting import ReplicaPieces


def steps(count, error=False):
    for i in range(count):
        step = ReplicaPieces([i])
        step.position = i
        yield step
    if error:
        raise OSError("broken")


@pytest.mark.parametrize("count", [0, 1, 2, 5, 20])
def test_all_steps_come_in_order_and_tell_the_truth(count):
    read_steps = list(knowing_what_follows(steps(count)))
    assert [step.position for step in read_steps] == list(range(count))
    for i, step in enumerate(read_steps):
        assert i + step.following < count
        assert not step.fails
    assert sum(step.following for step in read_steps) >= 3 * (count - 8)


def test_the_first_step_waits_for_no_other():
    made = []

    def recorded():
        for step in steps(9):
            made.append(step)
            yield step

    following = knowing_what_follows(recorded())
    next(following)
    assert len(made) == 1
    next(following)
    assert len(made) <= 3


def test_an_error_is_foreseen():
    """Those that know of it say after how many steps it comes, and it comes there."""
    read_steps, foreseen = [], []

    def read():
        for step in knowing_what_follows(steps(10, error=True)):
            read_steps.append(step)
            if step.fails:
                foreseen.append(step.position + step.following)

    with pytest.raises(OSError, match="broken"):
        read()
    assert len(read_steps) == 10
    assert set(foreseen) == {9}
    assert len(foreseen) >= 4
