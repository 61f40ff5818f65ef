"""What a server does with what comes: once each, in order, and whatever nonsense comes, it lives."""

import pickle

import numpy as np
import pytest
import torch

from mpistrat import errors
from mpistrat.parameter_server.gate import ADMIT, HOLD, RELEASE, Push
from mpistrat.parameter_server.optimizer_steps import Step
from mpistrat.parameter_server.rpc.remote_errors import as_refusal
from mpistrat.parameter_server.rpc.requests import Created, Update, Updates
from mpistrat.parameter_server.rpc.segments import Mappings, Place
from mpistrat.parameter_server.server import ParameterServer
from mpistrat.parameter_server.server_optimizers import OptimizerRecipe, ServedOptimizer
from mpistrat.parameter_server.staleness import ENDED, FAILED, MAY_BEGIN
from mpistrat.parameter_server.tensors import Kind, Placed, carried, unpack
from support.parameter_servers.noted_post import NotedPost

KEY = 3


@pytest.fixture
def post() -> NotedPost:
    post = NotedPost()
    post.server = ParameterServer(post, clients=[1, 2], workers=[1, 2], maker=1)
    create(post, KEY, np.zeros(3))
    return post


def create(post, key, array):
    return post.asked(1, "create", Created(key, 0, f"v{key}", Kind.of(array), carried(array)))


def value(post, key=KEY):
    return unpack(post.answer_to(post.asked(2, "pull", (key, None))), Mappings())


def add(number, key=KEY, work=None, n=0):
    return Update(key, "assign_add", [carried(np.full(3, float(number)))], work, n)


def update(post, source, *updates, push=None):
    return post.asked(source, "update", Updates(list(updates), push))


def test_updates_answer_with_small_values(post) -> None:
    (answer,) = post.answer_to(update(post, 1, add(2)))
    assert unpack(answer, Mappings()).tolist() == [2, 2, 2]
    create(post, 4, np.zeros(10_000))
    big = Update(4, "assign_add", [carried(np.ones(10_000))])
    assert post.answer_to(update(post, 1, big)) == [None]
    assert value(post, 4).tolist() == [1.0] * 10_000


def test_a_value_that_was_pulled_stays_what_it_was(post) -> None:
    before = post.answer_to(post.asked(1, "pull", (KEY, None)))
    update(post, 1, add(1))
    assert unpack(before, Mappings()).tolist() == [0, 0, 0]


def test_numbered_updates_are_made_once(post) -> None:
    first = post.answer_to(update(post, 1, add(1, work=7, n=0)))
    second = post.answer_to(update(post, 1, add(10, work=7, n=1)))
    again = [post.answer_to(update(post, 2, add(1, work=7, n=n))) for n in (0, 1)]
    for one, other in zip([first, second], again, strict=True):
        assert np.array_equal(one[0].data, other[0].data)  # what came of it then
    update(post, 2, add(100, work=8, n=0))
    assert value(post).tolist() == [111] * 3
    post.told(1, "forget", ([7], 6))
    post.told(1, "forget", ([], 8))
    with pytest.raises(
        errors.FailedPreconditionError, match="the work that it belongs to was over"
    ):
        post.answer_to(update(post, 2, add(1, work=7, n=2)))
    assert value(post).tolist() == [111] * 3


def test_a_numbered_update_that_failed_fails_again_and_the_next_one_is_made(post) -> None:
    bad = Update(KEY, "assign_add", [carried(np.ones(4))], 7, 0)
    for source in (1, 2):
        with pytest.raises(ValueError, match="broadcast"):
            post.answer_to(update(post, source, bad))
        post.answer_to(update(post, source, add(1, work=7, n=1)))
    assert value(post).tolist() == [1, 1, 1]


def test_an_update_whose_memory_went_with_its_sender_is_made_when_another_asks(post) -> None:
    gone = Placed(Place(1 << 30, 0, 1, 64, 0, 24), Kind.of(np.ones(3)))
    lost = Update(KEY, "assign_add", [gone], 7, 1)
    refused = update(post, 1, add(1, work=7, n=0), lost)
    with pytest.raises(RuntimeError, match="the server failed"):
        post.answer_to(refused)
    post.lose(1)
    post.answer_to(update(post, 2, add(1, work=7, n=0), add(10, work=7, n=1)))
    assert value(post).tolist() == [11] * 3


def test_work_that_was_begun_repeatedly_is_forgotten_with_all_before_it(post) -> None:
    for work in range(5):
        update(post, 1, add(1, work=work, n=0))
    post.told(1, "forget", ([3], 2))  # 2 was begun twice, and is not named
    assert len(post.server.store.applied) == 2
    post.told(1, "forget", ([4], 5))
    assert len(post.server.store.applied) == 0


def test_what_the_maker_of_arrays_did_not_make_nobody_waits_for(post) -> None:
    waiting = [post.asked(2, "find", 8), post.asked(2, "published", "saved")]
    post.lose(1)
    waiting += [post.asked(2, "find", 9), post.asked(2, "published", "restored")]
    for ticket in waiting:
        with pytest.raises(errors.UnavailableError, match="rank 1 has died before it made"):
            post.answer_to(ticket)
    assert post.answer_to(post.asked(2, "find", KEY))[0] == f"v{KEY}"


def test_after_the_maker_of_arrays_has_left_nobody_waits_for_it(post) -> None:
    waiting = [post.asked(2, "find", 8), post.asked(2, "published", "saved")]
    post.told(2, "publish", ("restored", 5))
    post.told(1, "done")
    waiting += [post.asked(2, "find", 9), post.asked(2, "published", "loaded")]
    post.lose(1)  # ended, after it had left
    waiting.append(post.asked(2, "find", 9))
    for ticket in waiting:
        with pytest.raises(errors.UnavailableError, match="rank 1 has left before it made"):
            post.answer_to(ticket)
    assert post.answer_to(post.asked(2, "published", "restored")) == 5
    assert post.answer_to(post.asked(2, "find", KEY))[0] == f"v{KEY}"


def test_an_array_that_could_not_be_made_is_refused_before_and_after(post) -> None:
    before, other = post.asked(2, "find", 8), post.asked(2, "find", 9)
    post.told(1, "cannot create", (8, KeyError("no such file")))
    for ticket in (before, post.asked(2, "find", 8)):
        with pytest.raises(KeyError, match="no such file"):
            post.answer_to(ticket)
    create(post, 9, np.zeros(2))
    assert post.answer_to(other)[0] == "v9"


def test_nonsense_is_refused(post) -> None:
    for error, kind, body in (
        (errors.NotFoundError, "pull", (99, None)),
        (errors.NotFoundError, "update", Updates([add(1, key=99)])),
        (errors.NotFoundError, "optimizer state", (1, KEY)),
        (errors.NotFoundError, "make optimizer", (1, pickle.dumps(None), [(99, False)])),
        (IndexError, "rows", (KEY, carried(np.array([3])))),
        (RuntimeError, "make optimizer", (1, pickle.dumps(None), [(KEY, False)])),
        (RuntimeError, "make optimizer", (1, b"no pickle", [(KEY, False)])),
        (TypeError, "pull", None),
    ):
        with pytest.raises(error):
            post.answer_to(post.asked(1, kind, body))
    assert value(post).tolist() == [0, 0, 0]


def test_an_array_is_found_once_it_is_there(post) -> None:
    tickets = [post.asked(rank, "find", 8) for rank in (1, 2)]
    assert not {*tickets} & {*dict(post.answers)}
    create(post, 8, np.zeros((2, 5), np.float32))
    for ticket in (*tickets, post.asked(2, "find", 8)):
        name, kind, _ = post.answer_to(ticket)
        assert (name, kind) == ("v8", Kind((2, 5), "float32", False))


def test_it_serves_until_all_clients_have_left(post) -> None:
    left = []
    post.attend = lambda until: left.append(until())
    post.server.serve()
    post.told(1, "done")
    post.server.serve()
    post.lose(2)
    post.server.serve()
    assert left == [False, False, True]


def test_while_one_is_alone_others_wait(post) -> None:
    hold = post.asked(1, HOLD)
    assert post.answer_to(hold) == {}
    theirs, own = update(post, 2, add(1)), update(post, 1, add(10))
    assert theirs not in dict(post.answers)
    assert own in dict(post.answers)
    assert value(post).tolist() == [10] * 3
    post.told(2, RELEASE)  # it is not the one
    assert value(post).tolist() == [10] * 3
    post.told(1, RELEASE)
    assert value(post).tolist() == [11] * 3
    assert theirs in dict(post.answers)


def test_the_next_one_that_is_alone_is_alone(post) -> None:
    post.asked(1, HOLD)
    second = post.asked(2, HOLD)
    update(post, 2, add(1))
    update(post, 3, add(10))
    assert second not in dict(post.answers)
    post.told(1, RELEASE)
    assert second in dict(post.answers)
    assert value(post).tolist() == [11] * 3
    update(post, 3, add(100))
    assert value(post).tolist() == [11] * 3
    post.told(2, RELEASE)
    assert value(post).tolist() == [111] * 3


@pytest.mark.parametrize("waiting", [False, True])
def test_who_dies_alone_or_waiting_to_be_holds_nothing(post, waiting: bool) -> None:
    post.asked(1, HOLD)
    if waiting:
        post.asked(2, HOLD)
        post.lose(2)
        post.told(1, RELEASE)
    else:
        post.lose(1)
    update(post, 3, add(1))
    assert value(post).tolist() == [1] * 3


def test_a_push_that_went_elsewhere_too_is_let_through_when_asked(post) -> None:
    post.asked(1, HOLD)
    push = Push(5, (0, 9))
    here = update(post, 2, add(1), push=push)
    other = update(post, 2, add(10))
    admit = post.asked(1, ADMIT, {(2, 5, None)})
    assert here in dict(post.answers)
    assert admit in dict(post.answers)
    assert other not in dict(post.answers)
    assert value(post).tolist() == [1] * 3


def test_rounds_do_not_end_while_one_is_alone(post) -> None:
    for worker in (1, 2):
        descend(post, worker, 1, 0)
    post.asked(1, HOLD)
    post.told(1, ENDED, (1, None))
    post.told(2, ENDED, (1, None))
    may_begin = post.asked(2, MAY_BEGIN, 1)
    assert value(post).tolist() == [0] * 3
    assert may_begin not in dict(post.answers)
    post.told(1, RELEASE)
    assert value(post).tolist() == [-2] * 3
    assert post.answer_to(may_begin) == 1


def test_workers_that_leave_end_no_round_while_one_is_alone(post) -> None:
    descend(post, 1, 1, 0)
    post.told(1, ENDED, (1, None))
    post.asked(1, HOLD)
    post.lose(2)
    assert value(post).tolist() == [0] * 3
    post.told(1, RELEASE)
    assert value(post).tolist() == [-1] * 3


def test_errors_of_other_classes_come_as_those_that_all_ranks_have() -> None:
    class Odd(ValueError):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one} and {two}")

    for error in (Odd("this", "that"), KeyError("that")):
        told = pickle.loads(pickle.dumps(as_refusal(error)))
        assert type(told) is (ValueError if isinstance(error, ValueError) else RuntimeError)
        assert "that" in str(told)


OPTIMIZER = 1


def descend(post, source, gradient, number, lr=1.0, mean=False) -> None:
    """Send a gradient of a round."""
    recipe = pickle.dumps(OptimizerRecipe(torch.optim.SGD, {"lr": 1.0}))
    post.answer_to(post.asked(source, "make optimizer", (OPTIMIZER, recipe, [(KEY, False)])))
    step = Step(OPTIMIZER, {"lr": lr}, number, mean)
    operand = [carried(np.full(3, float(gradient)))]
    post.answer_to(update(post, source, Update(KEY, step, operand)))


def test_each_worker_hears_once_that_a_round_failed_and_the_server_lives(post) -> None:
    for worker in (1, 2):
        descend(post, worker, 1, 0, lr=None)
    post.told(1, ENDED, (1, None))
    waiting = post.asked(1, MAY_BEGIN, 1)
    post.told(2, ENDED, (1, None))
    for ticket in (waiting, post.asked(2, MAY_BEGIN, 1)):
        with pytest.raises(TypeError, match="the step of 'v3' by all workers' gradients"):
            post.answer_to(ticket)
    assert value(post).tolist() == [0, 0, 0]
    for worker in (1, 2):
        assert post.answer_to(post.asked(worker, MAY_BEGIN, 1)) == 1
        descend(post, worker, 1, 1)
        post.told(worker, ENDED, (2, None))
    assert value(post).tolist() == [-2] * 3


def test_an_error_of_any_class_is_told_as_one_that_all_know(post, monkeypatch) -> None:
    class Odd(Exception):
        pass

    def fail(*_):
        raise Odd("no")

    descend(post, 1, 1, 0)
    monkeypatch.setattr(ServedOptimizer, "step", fail)
    for worker in (1, 2):
        post.told(worker, ENDED, (1, None))
    with pytest.raises(RuntimeError, match=r"(?s)the step of 'v3'.*Odd: no"):
        post.answer_to(post.asked(2, MAY_BEGIN, 1))


def test_the_gradients_of_a_step_that_failed_are_dropped(post) -> None:
    descend(post, 1, 1, 0)
    for gradient in (100, 10):
        descend(post, 2, gradient, 0)
        if gradient == 100:
            post.told(2, FAILED, (0, None))
    for worker in (1, 2):
        post.told(worker, ENDED, (1, None))
    assert value(post).tolist() == [-11] * 3


def test_all_workers_that_ended_a_round_count_in_its_mean(post) -> None:
    descend(post, 1, 8, 0, mean=True)
    for worker in (1, 2):
        post.told(worker, ENDED, (1, None))
    assert value(post).tolist() == [-4] * 3
