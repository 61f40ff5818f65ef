"""What `backward()` keeps from one step to the next, and when it makes that anew."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms

pytestmark = pytest.mark.mpi(min_size=2)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ALL = SIZE * (SIZE + 1) / 2  # what the gradients 1, 2, ... of all ranks add up to


@pytest.fixture
def strategy():
    options = ms.CommunicationOptions(overlap=False)
    return ms.MultiWorkerMirroredStrategy(
        comm=MPI.COMM_WORLD.Dup(), gradients="sum", communication_options=options
    )


@pytest.fixture
def model(strategy):
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,))]
    strategy.mirror(parameters)
    return parameters


def backward(strategy, parameters):
    """The gradients, anew; that of each element is rank + 1 on this rank."""

    def step():
        for parameter in parameters:
            parameter.grad = None
        sum(p.sum() for p in parameters if p.requires_grad).backward(torch.tensor(RANK + 1.0))

    strategy.run(step)
    return [p.grad for p in parameters]


def check(gradients, parameters):
    for gradient, parameter in zip(gradients, parameters, strict=True):
        assert gradient.dtype == parameter.dtype
        assert gradient.stride() == parameter.stride()
        assert torch.equal(gradient, torch.full_like(parameter, ALL))


def test_a_steady_step_makes_two_agreed_calls(strategy, monkeypatch):
    with strategy.scope():
        model = torch.nn.Linear(500, 500)
    contract, calls, agreed = strategy.extended.communicator.contract, [], []
    enter, agree = contract.enter, contract.agreement.agree

    def step():
        model.zero_grad()
        loss = model(torch.ones(1, 500)).sum()
        loss.backward()
        return ms.get_replica_context().all_reduce("sum", loss)

    def entered(signature, *args, **kwargs):
        result = enter(signature, *args, **kwargs)
        calls.append(contract.recorded[0])
        return result

    for _ in range(3):
        strategy.run(step)
    monkeypatch.setattr(contract, "enter", entered)
    monkeypatch.setattr(contract.agreement, "agree", lambda *a: agreed.append(a) or agree(*a))
    strategy.run(step)
    flags, gradients, loss = map(str, calls)
    assert "gradients of mirrored parameters" in flags
    assert "gradients of 2 parameters" in gradients  # which a stall report names
    assert "SUM" in loss
    assert len(agreed) == 2


def test_one_rank_without_several_threads_has_all_ranks_agree_on_gradients(strategy, monkeypatch):
    with strategy.scope():
        model = torch.nn.Linear(500, 500)
    communicator = strategy.extended.communicator
    for of in communicator, communicator.mpi:
        monkeypatch.setattr(of, "thread_multiple", RANK != 0)
    for _ in range(3):
        backward(strategy, [model.weight])
        check([model.weight.grad], [model.weight])


def test_the_memory_of_gradients_that_are_gone_is_used_again(strategy, model):
    first = [id(g) for g in backward(strategy, model)]
    for _ in range(3):
        gradients = backward(strategy, model)
        assert [id(g) for g in gradients] == first
        check(gradients, model)
        del gradients


def the_gradient(gradient):
    return gradient


def a_view(gradient):
    return gradient.view(-1)[1:]


def an_array(gradient):
    return gradient.numpy()


def the_gradient_of_another(gradient):
    """Torch alone refers to it."""
    other = torch.nn.Parameter(torch.zeros_like(gradient))
    other.grad = gradient
    return other


def what_a_graph_needs(gradient):
    factor = torch.ones_like(gradient).requires_grad_()
    return (gradient * factor).sum(), factor


def what_was_replaced(gradient):
    """As many tensors lie in the memory as before."""
    held, gradient.data = gradient.data, torch.zeros_like(gradient)
    return held


HOLDS = [
    *(the_gradient, a_view, an_array),
    *(the_gradient_of_another, what_a_graph_needs, what_was_replaced),
]


@pytest.mark.parametrize("hold", HOLDS)
def test_a_gradient_that_the_program_holds_is_not_overwritten(strategy, model, hold):
    held = hold(backward(strategy, model)[0])
    for _ in range(3):
        gradients = backward(strategy, model)
        gradients[0] *= 2
    if hold is what_a_graph_needs:
        held[0].backward()
        held = held[1].grad
    elif hold is the_gradient_of_another:
        held = held.grad
    assert np.all(np.asarray(held) == ALL)


def freeze(strategy, model):
    model[0].requires_grad_(False)
    assert backward(strategy, model)[0] is None
    check(backward(strategy, model)[1:], model[1:])
    model[0].requires_grad_(True)


def add(strategy, model):
    model.append(torch.nn.Parameter(torch.zeros(7)))
    strategy.mirror(model[-1])


def drop(strategy, model):
    del model[0]


def widen(strategy, model):
    for parameter in model:
        parameter.data = parameter.data.double()


def reshape(strategy, model):
    for parameter in model:
        parameter.data = parameter.data.flatten()[:3]


def transpose(strategy, model):
    model[0].data = model[0].data.t().contiguous().t()


def hook(strategy, model):
    seen = []
    handle = model[0].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    check(backward(strategy, model), model)
    assert torch.equal(seen[0], torch.full_like(model[0], RANK + 1.0))
    handle.remove()


@pytest.mark.parametrize("change", [freeze, add, drop, widen, reshape, transpose, hook])
def test_parameters_that_change(strategy, model, change):
    for _ in range(2):
        check(backward(strategy, model), model)
    change(strategy, model)
    for _ in range(2):
        check(backward(strategy, model), model)


@pytest.mark.parametrize("change", [widen, reshape, transpose])
def test_parameters_that_one_rank_changes(strategy, model, change):
    backward(strategy, model)
    if RANK == 0:
        change(strategy, model)
    with pytest.raises(ms.errors.CollectiveMismatchError, match="a parameter differs between"):
        backward(strategy, model)


def test_gradients_that_add_up(strategy, model):
    """Those of earlier backwards lie in one memory, and the sums of the next in another."""
    backward(strategy, model)
    places = set()
    for count in range(2, 6):
        strategy.run(lambda: (model[0].sum() * (RANK + 1.0)).backward())
        assert torch.equal(model[0].grad, torch.full((3, 4), count * ALL))
        places.add(model[0].grad.data_ptr())
    assert len(places) == 1
