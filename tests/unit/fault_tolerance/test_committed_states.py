import numpy as np
import pytest
import torch

from mpistrat.fault_tolerance.committed_states import CommittedStates, copied


def state_of(step: int) -> dict:
    return {
        "model": {"weight": torch.full((2, 3), float(step)), "names": ("a", step)},
        "optimizer": [np.full(4, step), {"lr": 0.1 * step}],
    }


def assert_is(state: dict, step: int) -> None:
    assert torch.equal(state["model"]["weight"], torch.full((2, 3), float(step)))
    assert state["model"]["names"] == ("a", step)
    assert state["optimizer"][0].tolist() == [step] * 4
    assert state["optimizer"][1] == {"lr": 0.1 * step}


@pytest.mark.parametrize("back", [5, 6])
def test_the_last_two_are_kept(back: int) -> None:
    states = CommittedStates()
    assert states.last is None
    for step in range(7):
        states.keep(step, state_of(step))
    assert states.last == 6
    assert_is(states.back_to(back), back)
    assert states.last == back
    assert_is(states.back_to(back), back)  # again, as after a second loss


def test_what_is_kept_is_nobody_elses() -> None:
    states = CommittedStates()
    state = state_of(1)
    states.keep(1, state)
    state["model"]["weight"].zero_()
    restored = states.back_to(1)
    restored["optimizer"][0][:] = 7
    assert_is(states.back_to(1), 1)


def test_steps_are_done_anew_from_an_earlier_one() -> None:
    states = CommittedStates()
    states.keep(1, state_of(1))
    states.keep(2, state_of(2))
    states.back_to(1)
    states.keep(2, state_of(20))
    assert_is(states.back_to(2), 20)


def test_all_begin_anew() -> None:
    states = CommittedStates()
    states.keep(0, state_of(0))
    assert states.back_to(None) is None
    assert states.last is None


def test_a_step_that_is_not_kept() -> None:
    states = CommittedStates()
    for step in range(4):
        states.keep(step, {})
    with pytest.raises(RuntimeError, match="step 1 was to be restored"):
        states.back_to(1)


def test_memory_is_used_again_where_it_fits() -> None:
    memory = copied(state_of(1))
    again = copied(state_of(2), memory)
    assert_is(again, 2)
    assert again["model"]["weight"] is memory["model"]["weight"]
    assert again["optimizer"][0] is memory["optimizer"][0]
    larger = copied({"model": {"weight": torch.zeros(5)}, "optimizer": []}, again)
    assert larger["model"]["weight"].shape == (5,)
    assert larger["optimizer"] == []
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not copied(parameter).requires_grad


def test_bytes_of_a_state() -> None:
    states = CommittedStates()
    assert states.nbytes == 0
    states.keep(1, state_of(1))
    assert states.nbytes == 6 * 4 + 4 * 8
