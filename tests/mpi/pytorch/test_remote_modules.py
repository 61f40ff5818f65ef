"""What workers see of torch modules whose parameters are on servers: values, buffers, optimizers' state."""

import copy
import pickle
from typing import Any

import pytest
import torch

import mpistrat as ms
from support.parameter_servers.remote_training import (
    COMM_OF_WORKERS,
    MAKERS,
    WORKERS,
    batch,
    loss_of,
    net,
    train,
)

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("split", [False, True])
def test_state_of_optimizers(split: bool) -> None:
    """`state_dict()` has the servers' state, and what is loaded goes there: training goes on."""

    def body(strategy: Any, worker: int) -> None:
        def step(model: torch.nn.Module, optimizer: Any, x: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

        states: Any = None
        for first in (0, 2):
            with strategy.scope():
                model = net(seed=worker)
                optimizer = MAKERS["adam"](model.parameters())
                if states:
                    model.load_state_dict(states[0])
            if states:
                optimizer.load_state_dict(states[1])
            for number in (first, first + 1):
                strategy.run(step, args=(model, optimizer, batch(worker, number)))
            strategy.run(lambda: None)
            states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            assert not optimizer.state
            assert len(states[1]["state"]) == 4
        alone = net()
        its = MAKERS["adam"](alone.parameters())
        for number in range(4):
            its.zero_grad()
            for index in range(WORKERS):
                loss_of(alone, batch(index, number)).backward()
            its.step()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(states[0][name], value, rtol=2e-5, atol=2e-6)
        for i, state in its.state_dict()["state"].items():
            for name, value in state.items():
                got = states[1]["state"][i][name]
                torch.testing.assert_close(got, value, rtol=2e-4, atol=2e-6)

    partitioner = ms.experimental.partitioners.FixedShardsPartitioner(2) if split else None
    train(body, max_staleness=0, gradients="sum", variable_partitioner=partitioner)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_what_is_saved_and_copied(name: str) -> None:
    """Plain modules with what the servers have, and optimizers with the state that is there."""

    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            model = net(seed=worker)
            optimizer = MAKERS[name](model.parameters())

        def step(x: torch.Tensor) -> None:
            loss_of(model, x).backward()
            optimizer.step()

        for number in range(2):
            strategy.run(step, args=(batch(worker, number),))
        COMM_OF_WORKERS.Barrier()
        values = [model, optimizer, torch.optim.swa_utils.AveragedModel(model)]
        dumped = pickle.dumps(values)
        assert b"mpistrat" not in dumped
        copies = pickle.loads(dumped), copy.deepcopy(values)
        states = model.state_dict(), optimizer.state_dict()
        assert len(states[1]["state"]) == 4
        for copied, its, averaged in copies:
            assert all(type(parameter) is torch.nn.Parameter for parameter in copied.parameters())
            assert [*its.param_groups[0]["params"]] == [*copied.parameters()]
            torch.testing.assert_close(dict(copied.state_dict()), dict(states[0]), rtol=0, atol=0)
            torch.testing.assert_close(its.state_dict(), states[1], rtol=0, atol=0)
            torch.testing.assert_close(
                dict(averaged.module.state_dict()), dict(states[0]), rtol=0, atol=0
            )
        assert not optimizer.state
        COMM_OF_WORKERS.Barrier()

    train(body, max_staleness=0, gradients="sum")


def test_what_worker_0_writes_is_everybody_s() -> None:
    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            model = torch.nn.Linear(3, 2)
        model.load_state_dict({"weight": torch.full((2, 3), worker + 5.0), "bias": torch.ones(2)})
        if worker == 0:
            strategy.run(lambda: None)
        COMM_OF_WORKERS.Barrier()
        strategy.run(lambda: None)
        COMM_OF_WORKERS.Barrier()
        strategy.run(lambda: None)
        assert (model.weight == 5).all()
        assert (model.bias == 1).all()

    train(body)


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> None:
        self.total += x.mean()
        self.norm(x)


def test_buffers() -> None:
    """What the workers' forwards add to statistics is added up, as in TensorFlow."""

    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            module = Counts()
        for _ in range(3):
            strategy.run(module, args=(torch.full((2, 2), worker + 1.0),))
        COMM_OF_WORKERS.Barrier()
        strategy.run(lambda: None)
        assert (module.total == 3 * sum(range(WORKERS + 1))).all()
        assert module.norm.num_batches_tracked == 3 * WORKERS
        assert (module.norm.running_mean > 0).all()
        means = COMM_OF_WORKERS.allgather(module.norm.running_mean.tolist())
        assert means == means[:1] * WORKERS

    train(body)


def test_what_cannot_be() -> None:
    def body(strategy: Any, worker: int) -> None:
        outside = torch.nn.Linear(2, 2)
        with strategy.scope():
            model = torch.nn.Linear(2, 2)
        model(torch.ones(2)).sum().backward()
        outside(torch.ones(2)).sum().backward()
        others = torch.optim.SGD([*outside.parameters(), *model.parameters()], lr=0.1)
        with pytest.raises(RuntimeError, match=r"shape \[2, 2\] is not on the servers"):
            others.step()
        alone = torch.optim.SGD(outside.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="is not on the servers"):
            strategy.run(alone.step)
        alone.step()  # outside run it is nobody else's
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=r"step\(closure\)"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(TypeError, match=r"LBFGS\.step needs a closure"):
            torch.optim.LBFGS(model.parameters()).step(None)

    train(body)
