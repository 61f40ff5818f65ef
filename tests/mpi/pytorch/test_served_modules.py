"""Torch modules whose parameters are on servers. The last ranks serve, the others train."""

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms

pytestmark = pytest.mark.mpi(min_size=2)

COMM = MPI.COMM_WORLD
SERVERS = 1 if COMM.size < 4 else 2
WORKERS = COMM.size - SERVERS
CLUSTER = {
    "worker": [f"w{i}" for i in range(WORKERS)],
    "ps": [f"s{i}" for i in range(SERVERS)],
}
Strategy = ms.compat.v1.ParameterServerStrategy


def train(body: Callable[[Any, int], None], **options: Any) -> None:
    """Run `body(strategy, worker)` on the workers, while the other ranks serve."""
    if COMM.rank >= WORKERS:
        ms.Server(CLUSTER, "ps", COMM.rank - WORKERS).join()
        return
    resolver = ms.cluster_resolver.SimpleClusterResolver(
        ms.cluster_resolver.ClusterSpec(CLUSTER), task_type="worker", task_id=COMM.rank
    )
    strategy = Strategy(resolver, **options)
    try:
        body(strategy, COMM.rank)
    finally:
        strategy.extended.job.done()


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def batch(worker: int, step: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(10 * step + worker).normal(size=(4, 6))).float()


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).sum()


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def expected(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> torch.nn.Module:
    """One process that steps by the sum of the gradients of all workers' batches."""
    model = net()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss_of(model, batch(worker, step)) for worker in range(WORKERS)).backward()  # type: ignore[union-attr]
        optimizer.step()
        scheduler.step()
    return model


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_synchronous_steps(name: str, split: bool) -> None:
    """Equal to one process; worker 0's values are everybody's; learning rates change."""

    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            model = net(seed=worker)
            optimizer = MAKERS[name](model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

        for number in range(4):
            strategy.run(step, args=(batch(worker, number),))
            scheduler.step()
        strategy.run(lambda: None)  # pulls
        for got, wanted in zip(
            model.parameters(), expected(MAKERS[name], 4).parameters(), strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)
        assert not optimizer.state

    partitioner = ms.experimental.partitioners.FixedShardsPartitioner(2) if split else None
    train(body, max_staleness=0, variable_partitioner=partitioner)


ROWS = 40


def look_ups(worker: int, step: int) -> torch.Tensor:
    indices = np.random.default_rng(99 * step + worker).integers(0, ROWS, (3, 2))
    indices[0, 0] = ROWS - 1  # the padding
    return torch.from_numpy(indices)


class Embeds(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, 4, sparse=sparse, padding_idx=-1)
        self.bags = torch.nn.EmbeddingBag(ROWS, 4, sparse=sparse, mode="mean")
        self.out = torch.nn.Linear(4, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(indices).sum(1) * self.bags(indices))


@pytest.mark.parametrize(("split", "sparse"), [(False, True), (True, True), (True, False)])
def test_embeddings_stay_on_servers(split: bool, sparse: bool) -> None:
    """Only rows that are looked up come and go."""

    def body(strategy: Any, worker: int) -> None:
        torch.manual_seed(worker)
        with strategy.scope():
            model = Embeds(sparse)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        weight = model.table.weight
        assert weight.untyped_storage().nbytes() == 4
        client = strategy.extended.job.client

        def step(indices: torch.Tensor) -> None:
            optimizer.zero_grad()
            for part in indices.chunk(2):  # gradients add up
                (model(part) ** 2).sum().backward()
            assert weight.grad is not None
            assert weight.grad.is_sparse
            optimizer.step()

        torch.manual_seed(0)
        alone = Embeds(sparse)
        its = torch.optim.SGD(alone.parameters(), lr=0.05)
        for number in range(3):
            pushed = client.bytes_pushed
            strategy.run(step, args=(look_ups(worker, number),))
            assert client.bytes_pushed - pushed < 2 * 6 * (4 * 4 + 8) + 10 * 4 + 1
            its.zero_grad()
            for one in range(WORKERS):
                for part in look_ups(one, number).chunk(2):
                    (alone(part) ** 2).sum().backward()
            its.step()
        strategy.run(lambda: None)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=2e-5, atol=2e-6)
        with pytest.raises(IndexError, match="row 40 of an embedding of 40 rows"):
            model.table(torch.tensor([ROWS]))

    partitioner = ms.experimental.partitioners.MinSizePartitioner(64, max_shards=3)
    train(body, max_staleness=0, variable_partitioner=partitioner if split else None)


def test_what_else_computes_with_an_embedding() -> None:
    """It sees all of it, and a gradient of all of it comes back."""

    def body(strategy: Any, worker: int) -> None:
        torch.manual_seed(0)
        with strategy.scope():
            table = torch.nn.Embedding(ROWS, 4, sparse=True)
            optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        torch.manual_seed(0)
        plain = torch.nn.Embedding(ROWS, 4)
        weight, x = table.weight, torch.ones(3, 4)
        assert isinstance(weight, torch.nn.Parameter)
        assert weight.shape == plain.weight.shape
        assert weight.requires_grad
        assert torch.equal(weight.norm(), plain.weight.norm())
        assert torch.equal(weight.data, plain.weight)
        for one in copy.deepcopy(table), pickle.loads(pickle.dumps(table)):
            assert torch.equal(one.weight, plain.weight)
            assert one.weight.untyped_storage().nbytes() == ROWS * 4 * 4
        with pytest.raises(RuntimeError, match="cannot be moved"):
            table.double()
        torch.nn.functional.linear(x, weight).sum().backward()
        torch.nn.functional.linear(x, plain.weight).sum().backward()
        assert torch.equal(weight.grad, plain.weight.grad)

        def check() -> None:
            assert torch.equal(weight, plain.weight - plain.weight.grad)

        strategy.run(optimizer.step if worker == 0 else lambda: None)
        strategy.run(check)
        if worker == 0:  # whose values count
            strategy.run(lambda: torch.nn.init.constant_(weight, 3.0))
        else:
            strategy.run(lambda: None)
        strategy.run(lambda: None)
        assert (table(torch.tensor([0, ROWS - 1])) == 3).all()
        if worker > 0:
            torch.nn.init.constant_(weight, 4.0)
            assert (weight == 3).all()

    train(body, max_staleness=0)


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
            for one in range(WORKERS):
                loss_of(alone, batch(one, number)).backward()
            its.step()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(states[0][name], value, rtol=2e-5, atol=2e-6)
        for i, state in its.state_dict()["state"].items():
            for name, value in state.items():
                got = states[1]["state"][i][name]
                torch.testing.assert_close(got, value, rtol=2e-4, atol=2e-6)

    partitioner = ms.experimental.partitioners.FixedShardsPartitioner(2) if split else None
    train(body, max_staleness=0, variable_partitioner=partitioner)


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


def test_several_replicas_of_a_worker() -> None:
    """They aggregate among themselves first, and send once."""

    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            model = net(seed=worker)
            optimizer = MAKERS["adam"](model.parameters())
        pushed: list[int] = []

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            replica = ms.get_replica_context().replica_id_in_sync_group
            loss_of(model, x[2 * replica : 2 * replica + 2]).backward()
            optimizer.step()

        client = strategy.extended.job.client
        for number in range(3):
            before = client.bytes_pushed
            strategy.run(step, args=(batch(worker, number),))
            pushed.append(client.bytes_pushed - before)
        strategy.run(lambda: None)
        assert pushed == [4 * sum(p.numel() for p in model.parameters())] * 3
        for got, wanted in zip(model.parameters(), constant_rate(3).parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)

    train(body, max_staleness=0, devices=["cpu:0", "cpu:1"], gradients="sum")


def constant_rate(steps: int) -> torch.nn.Module:
    model = net()
    optimizer = MAKERS["adam"](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for worker in range(WORKERS):
            loss_of(model, batch(worker, step)).backward()
        optimizer.step()
    return model


def test_asynchronous_steps() -> None:
    """Every gradient is applied once, in whatever order."""

    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            model = torch.nn.Linear(4, 1, bias=False)
            torch.nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(4)).sum().backward()
            optimizer.step()

        for _ in range(7):
            strategy.run(step)
        COMM_OF_WORKERS.Barrier()
        assert (model.state_dict()["weight"] == -7 * WORKERS).all()

    train(body)


COMM_OF_WORKERS = COMM.Split(0 if COMM.rank < WORKERS else 1)


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


def test_a_round_has_the_numbers_of_the_lowest_rank() -> None:
    """Whoever comes first."""

    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            model = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + worker)

        def step() -> None:
            if worker == 0:
                time.sleep(0.2)
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()

        strategy.run(step)
        strategy.run(lambda: None)
        assert model.weight.item() == -WORKERS

    train(body, max_staleness=0)


def one_weight(strategy: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A weight, at first 0, and a step by a gradient of 1."""
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    return model, optimizer, step


def test_the_last_step_is_in_what_is_read_after_it() -> None:
    """Whoever is last, and wherever the weight is read."""

    def body(strategy: Any, worker: int) -> None:
        model, _, step = one_weight(strategy)
        for number in range(1, 4):
            if worker == number % WORKERS:
                time.sleep(0.1)
            strategy.run(step)
            seen = model.state_dict()["weight"].item()
            COMM_OF_WORKERS.Barrier()  # or another may be in the next step
            assert seen == -WORKERS * number

    train(body, max_staleness=0)


def test_workers_with_different_numbers_of_steps() -> None:
    """Also of steps in which one of them runs something else, alone."""

    def body(strategy: Any, worker: int) -> None:
        model, _, step = one_weight(strategy)
        for _ in range(2 + worker):
            strategy.run(step)
        if worker == WORKERS - 1:
            strategy.run(lambda: None)
            steps = sum(2 + one for one in range(WORKERS))
            assert model.state_dict()["weight"].item() == -steps

    train(body, max_staleness=0)


def test_all_workers_hear_that_a_step_could_not_be_made() -> None:
    def body(strategy: Any, worker: int) -> None:
        model, optimizer, step = one_weight(strategy)
        strategy.run(step)
        optimizer.param_groups[0]["lr"] = None
        with pytest.raises(TypeError, match=r"the step of .*weight.* by all workers' gradients"):
            strategy.run(step)
        optimizer.param_groups[0]["lr"] = 1.0
        strategy.run(step)
        assert model.state_dict()["weight"].item() == -2 * WORKERS

    train(body, max_staleness=0)


def test_a_run_that_failed_is_tried_again() -> None:
    """Its gradients are dropped."""

    def body(strategy: Any, worker: int) -> None:
        model, _, step = one_weight(strategy)

        def fail() -> None:
            step()
            if worker == 0:
                raise ValueError("once")

        if worker == 0:
            with pytest.raises(ValueError, match="once"):
                strategy.run(fail)
        strategy.run(step)
        assert model.state_dict()["weight"].item() == -WORKERS
        assert strategy.steps["worker 0 (rank 0)"] == 1

    train(body, max_staleness=0)


def test_the_mean_is_over_all_workers() -> None:
    """Whether or not they use a parameter, as with MultiWorkerMirroredStrategy."""

    def body(strategy: Any, worker: int) -> None:
        model, _, step = one_weight(strategy)
        strategy.run(step if worker == 0 else lambda: None)
        strategy.run(lambda: None)
        assert model.weight.item() == pytest.approx(-1 / WORKERS)

    train(body, max_staleness=0, gradients="mean")
