"""What a server does with what comes: once each, in order, and whatever nonsense comes, it lives."""

import pickle

import numpy as np
import pytest
import torch

from mpistrat import errors
from mpistrat.parameter_server.protocol.messages import (
    ENDED,
    FAILED,
    MAY_BEGIN,
    GradientMethod,
    NewArray,
    Push,
    SharedTensor,
    TensorSpec,
    Update,
    Updates,
    inline,
    unpack,
)
from mpistrat.parameter_server.protocol.snapshot import ADMIT, HOLD, RELEASE
from mpistrat.parameter_server.rpc.endpoint import portable_error
from mpistrat.parameter_server.rpc.segments import Mappings, RegionHandle
from mpistrat.parameter_server.server.server import ParameterServer
from mpistrat.parameter_server.server.server_optimizers import OptimizerDefinition, ServerOptimizer
from support.parameter_servers.recorded_rpc import RecordedRpc

KEY = 3


@pytest.fixture
def rpc() -> RecordedRpc:
    rpc = RecordedRpc()
    rpc.server = ParameterServer(rpc, clients=[1, 2], workers=[1, 2], creator=1)
    create(rpc, KEY, np.zeros(3))
    return rpc


def create(rpc, key, array):
    return rpc.receive_request(
        1, "create", NewArray(key, 0, f"v{key}", TensorSpec.of(array), inline(array))
    )


def value(rpc, key=KEY):
    return unpack(rpc.reply_to(rpc.receive_request(2, "pull", (key, None))), Mappings())


def add(number, key=KEY, work=None, n=0):
    return Update(key, "assign_add", [inline(np.full(3, float(number)))], work, n)


def update(rpc, source, *updates, push=None):
    return rpc.receive_request(source, "update", Updates(list(updates), push))


def test_updates_answer_with_small_values(rpc) -> None:
    (answer,) = rpc.reply_to(update(rpc, 1, add(2)))
    assert unpack(answer, Mappings()).tolist() == [2, 2, 2]
    create(rpc, 4, np.zeros(10_000))
    big = Update(4, "assign_add", [inline(np.ones(10_000))])
    assert rpc.reply_to(update(rpc, 1, big)) == [None]
    assert value(rpc, 4).tolist() == [1.0] * 10_000


def test_a_value_that_was_pulled_stays_what_it_was(rpc) -> None:
    before = rpc.reply_to(rpc.receive_request(1, "pull", (KEY, None)))
    update(rpc, 1, add(1))
    assert unpack(before, Mappings()).tolist() == [0, 0, 0]


def test_numbered_updates_are_made_once(rpc) -> None:
    first = rpc.reply_to(update(rpc, 1, add(1, work=7, n=0)))
    second = rpc.reply_to(update(rpc, 1, add(10, work=7, n=1)))
    again = [rpc.reply_to(update(rpc, 2, add(1, work=7, n=n))) for n in (0, 1)]
    for first_answer, other in zip([first, second], again, strict=True):
        assert np.array_equal(first_answer[0].data, other[0].data)  # what came of it then
    update(rpc, 2, add(100, work=8, n=0))
    assert value(rpc).tolist() == [111] * 3
    rpc.receive_notice(1, "forget", ([7], 6))
    rpc.receive_notice(1, "forget", ([], 8))
    with pytest.raises(
        errors.FailedPreconditionError, match="the work that it belongs to was over"
    ):
        rpc.reply_to(update(rpc, 2, add(1, work=7, n=2)))
    assert value(rpc).tolist() == [111] * 3


def test_a_numbered_update_that_failed_fails_again_and_the_next_one_is_made(rpc) -> None:
    bad = Update(KEY, "assign_add", [inline(np.ones(4))], 7, 0)
    for source in (1, 2):
        with pytest.raises(ValueError, match="broadcast"):
            rpc.reply_to(update(rpc, source, bad))
        rpc.reply_to(update(rpc, source, add(1, work=7, n=1)))
    assert value(rpc).tolist() == [1, 1, 1]


def test_an_update_whose_memory_went_with_its_sender_is_made_when_another_asks(rpc) -> None:
    gone = SharedTensor(RegionHandle(1 << 30, 0, 1, 64, 0, 24), TensorSpec.of(np.ones(3)))
    lost = Update(KEY, "assign_add", [gone], 7, 1)
    refused = update(rpc, 1, add(1, work=7, n=0), lost)
    with pytest.raises(RuntimeError, match="the server failed"):
        rpc.reply_to(refused)
    rpc.lose(1)
    rpc.reply_to(update(rpc, 2, add(1, work=7, n=0), add(10, work=7, n=1)))
    assert value(rpc).tolist() == [11] * 3


def test_work_that_was_begun_repeatedly_is_forgotten_with_all_before_it(rpc) -> None:
    for work in range(5):
        update(rpc, 1, add(1, work=work, n=0))
    rpc.receive_notice(1, "forget", ([3], 2))  # 2 was begun twice, and is not named
    assert len(rpc.server.store.idempotency) == 2
    rpc.receive_notice(1, "forget", ([4], 5))
    assert len(rpc.server.store.idempotency) == 0


def test_what_the_maker_of_arrays_did_not_make_nobody_waits_for(rpc) -> None:
    waiting = [rpc.receive_request(2, "find", 8), rpc.receive_request(2, "published", "saved")]
    rpc.lose(1)
    waiting += [rpc.receive_request(2, "find", 9), rpc.receive_request(2, "published", "restored")]
    for ticket in waiting:
        with pytest.raises(errors.UnavailableError, match="rank 1 has died before it made"):
            rpc.reply_to(ticket)
    assert rpc.reply_to(rpc.receive_request(2, "find", KEY))[0] == f"v{KEY}"


def test_after_the_maker_of_arrays_has_left_nobody_waits_for_it(rpc) -> None:
    waiting = [rpc.receive_request(2, "find", 8), rpc.receive_request(2, "published", "saved")]
    rpc.receive_notice(2, "publish", ("restored", 5))
    rpc.receive_notice(1, "done")
    waiting += [rpc.receive_request(2, "find", 9), rpc.receive_request(2, "published", "loaded")]
    rpc.lose(1)  # ended, after it had left
    waiting.append(rpc.receive_request(2, "find", 9))
    for ticket in waiting:
        with pytest.raises(errors.UnavailableError, match="rank 1 has left before it made"):
            rpc.reply_to(ticket)
    assert rpc.reply_to(rpc.receive_request(2, "published", "restored")) == 5
    assert rpc.reply_to(rpc.receive_request(2, "find", KEY))[0] == f"v{KEY}"


def test_an_array_that_could_not_be_made_is_refused_before_and_after(rpc) -> None:
    before, other = rpc.receive_request(2, "find", 8), rpc.receive_request(2, "find", 9)
    rpc.receive_notice(1, "cannot create", (8, KeyError("no such file")))
    for ticket in (before, rpc.receive_request(2, "find", 8)):
        with pytest.raises(KeyError, match="no such file"):
            rpc.reply_to(ticket)
    create(rpc, 9, np.zeros(2))
    assert rpc.reply_to(other)[0] == "v9"


def test_nonsense_is_refused(rpc) -> None:
    for error, kind, body in (
        (errors.NotFoundError, "pull", (99, None)),
        (errors.NotFoundError, "update", Updates([add(1, key=99)])),
        (errors.NotFoundError, "optimizer state", (1, KEY)),
        (errors.NotFoundError, "make optimizer", (1, pickle.dumps(None), [(99, False)])),
        (IndexError, "rows", (KEY, inline(np.array([3])))),
        (RuntimeError, "make optimizer", (1, pickle.dumps(None), [(KEY, False)])),
        (RuntimeError, "make optimizer", (1, b"no pickle", [(KEY, False)])),
        (TypeError, "pull", None),
    ):
        with pytest.raises(error):
            rpc.reply_to(rpc.receive_request(1, kind, body))
    assert value(rpc).tolist() == [0, 0, 0]


def test_an_array_is_found_once_it_is_there(rpc) -> None:
    tickets = [rpc.receive_request(rank, "find", 8) for rank in (1, 2)]
    assert not {*tickets} & {*dict(rpc.replies)}
    create(rpc, 8, np.zeros((2, 5), np.float32))
    for ticket in (*tickets, rpc.receive_request(2, "find", 8)):
        name, kind, _ = rpc.reply_to(ticket)
        assert (name, kind) == ("v8", TensorSpec((2, 5), "float32", False))


def test_it_serves_until_all_clients_have_left(rpc) -> None:
    left = []
    rpc.run_until = lambda until: left.append(until())
    rpc.server.serve()
    rpc.receive_notice(1, "done")
    rpc.server.serve()
    rpc.lose(2)
    rpc.server.serve()
    assert left == [False, False, True]


def test_while_one_is_alone_others_wait(rpc) -> None:
    hold = rpc.receive_request(1, HOLD)
    assert rpc.reply_to(hold) == {}
    theirs, own = update(rpc, 2, add(1)), update(rpc, 1, add(10))
    assert theirs not in dict(rpc.replies)
    assert own in dict(rpc.replies)
    assert value(rpc).tolist() == [10] * 3
    rpc.receive_notice(2, RELEASE)  # it is not the one
    assert value(rpc).tolist() == [10] * 3
    rpc.receive_notice(1, RELEASE)
    assert value(rpc).tolist() == [11] * 3
    assert theirs in dict(rpc.replies)


def test_the_next_one_that_is_alone_is_alone(rpc) -> None:
    rpc.receive_request(1, HOLD)
    second = rpc.receive_request(2, HOLD)
    update(rpc, 2, add(1))
    update(rpc, 3, add(10))
    assert second not in dict(rpc.replies)
    rpc.receive_notice(1, RELEASE)
    assert second in dict(rpc.replies)
    assert value(rpc).tolist() == [11] * 3
    update(rpc, 3, add(100))
    assert value(rpc).tolist() == [11] * 3
    rpc.receive_notice(2, RELEASE)
    assert value(rpc).tolist() == [111] * 3


@pytest.mark.parametrize("waiting", [False, True])
def test_who_dies_alone_or_waiting_to_be_holds_nothing(rpc, waiting: bool) -> None:
    rpc.receive_request(1, HOLD)
    if waiting:
        rpc.receive_request(2, HOLD)
        rpc.lose(2)
        rpc.receive_notice(1, RELEASE)
    else:
        rpc.lose(1)
    update(rpc, 3, add(1))
    assert value(rpc).tolist() == [1] * 3


def test_a_push_that_went_elsewhere_too_is_let_through_when_asked(rpc) -> None:
    rpc.receive_request(1, HOLD)
    push = Push(5, (0, 9))
    here = update(rpc, 2, add(1), push=push)
    other = update(rpc, 2, add(10))
    admit = rpc.receive_request(1, ADMIT, {(2, 5, None)})
    assert here in dict(rpc.replies)
    assert admit in dict(rpc.replies)
    assert other not in dict(rpc.replies)
    assert value(rpc).tolist() == [1] * 3


def test_rounds_do_not_end_while_one_is_alone(rpc) -> None:
    for worker in (1, 2):
        descend(rpc, worker, 1, 0)
    rpc.receive_request(1, HOLD)
    rpc.receive_notice(1, ENDED, (1, None))
    rpc.receive_notice(2, ENDED, (1, None))
    may_begin = rpc.receive_request(2, MAY_BEGIN, 1)
    assert value(rpc).tolist() == [0] * 3
    assert may_begin not in dict(rpc.replies)
    rpc.receive_notice(1, RELEASE)
    assert value(rpc).tolist() == [-2] * 3
    assert rpc.reply_to(may_begin) == 1


def test_workers_that_leave_end_no_round_while_one_is_alone(rpc) -> None:
    descend(rpc, 1, 1, 0)
    rpc.receive_notice(1, ENDED, (1, None))
    rpc.receive_request(1, HOLD)
    rpc.lose(2)
    assert value(rpc).tolist() == [0] * 3
    rpc.receive_notice(1, RELEASE)
    assert value(rpc).tolist() == [-1] * 3


def test_errors_of_other_classes_come_as_those_that_all_ranks_have() -> None:
    class Odd(ValueError):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(f"{first} and {second}")

    for error in (Odd("this", "that"), KeyError("that")):
        arrived = pickle.loads(pickle.dumps(portable_error(error)))
        assert type(arrived) is (ValueError if isinstance(error, ValueError) else RuntimeError)
        assert "that" in str(arrived)


OPTIMIZER = 1


def descend(rpc, source, gradient, number, lr=1.0, mean=False) -> None:
    """Send a gradient of a round."""
    definition = pickle.dumps(OptimizerDefinition(torch.optim.SGD, {"lr": 1.0}))
    rpc.reply_to(
        rpc.receive_request(source, "make optimizer", (OPTIMIZER, definition, [(KEY, False)]))
    )
    step = GradientMethod(OPTIMIZER, {"lr": lr}, number, mean)
    operand = [inline(np.full(3, float(gradient)))]
    rpc.reply_to(update(rpc, source, Update(KEY, step, operand)))


def test_each_worker_hears_once_that_a_round_failed_and_the_server_lives(rpc) -> None:
    for worker in (1, 2):
        descend(rpc, worker, 1, 0, lr=None)
    rpc.receive_notice(1, ENDED, (1, None))
    waiting = rpc.receive_request(1, MAY_BEGIN, 1)
    rpc.receive_notice(2, ENDED, (1, None))
    for ticket in (waiting, rpc.receive_request(2, MAY_BEGIN, 1)):
        with pytest.raises(TypeError, match="the step of 'v3' by all workers' gradients"):
            rpc.reply_to(ticket)
    assert value(rpc).tolist() == [0, 0, 0]
    for worker in (1, 2):
        assert rpc.reply_to(rpc.receive_request(worker, MAY_BEGIN, 1)) == 1
        descend(rpc, worker, 1, 1)
        rpc.receive_notice(worker, ENDED, (2, None))
    assert value(rpc).tolist() == [-2] * 3


def test_an_error_of_any_class_is_reported_as_one_that_all_know(rpc, monkeypatch) -> None:
    class Odd(Exception):
        pass

    def fail(*_):
        raise Odd("no")

    descend(rpc, 1, 1, 0)
    monkeypatch.setattr(ServerOptimizer, "step", fail)
    for worker in (1, 2):
        rpc.receive_notice(worker, ENDED, (1, None))
    with pytest.raises(RuntimeError, match=r"(?s)the step of 'v3'.*Odd: no"):
        rpc.reply_to(rpc.receive_request(2, MAY_BEGIN, 1))


def test_the_gradients_of_a_step_that_failed_are_dropped(rpc) -> None:
    descend(rpc, 1, 1, 0)
    for gradient in (100, 10):
        descend(rpc, 2, gradient, 0)
        if gradient == 100:
            rpc.receive_notice(2, FAILED, (0, None))
    for worker in (1, 2):
        rpc.receive_notice(worker, ENDED, (1, None))
    assert value(rpc).tolist() == [-11] * 3


def test_all_workers_that_ended_a_round_count_in_its_mean(rpc) -> None:
    descend(rpc, 1, 8, 0, mean=True)
    for worker in (1, 2):
        rpc.receive_notice(worker, ENDED, (1, None))
    assert value(rpc).tolist() == [-4] * 3
