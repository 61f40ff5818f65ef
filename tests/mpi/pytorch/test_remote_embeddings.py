"""Embeddings that stay on servers: workers have the rows that they look up."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import mpistrat as ms
from support.parameter_servers.remote_training import WORKERS, train

pytestmark = pytest.mark.mpi(min_size=2)


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
            for index in range(WORKERS):
                for part in look_ups(index, number).chunk(2):
                    (alone(part) ** 2).sum().backward()
            its.step()
        strategy.run(lambda: None)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=2e-5, atol=2e-6)
        with pytest.raises(IndexError, match="row 40 of an embedding of 40 rows"):
            model.table(torch.tensor([ROWS]))

    partitioner = ms.experimental.partitioners.MinSizePartitioner(64, max_shards=3)
    train(
        body, max_staleness=0, gradients="sum", variable_partitioner=partitioner if split else None
    )


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
        for copied in copy.deepcopy(table), pickle.loads(pickle.dumps(table)):
            assert torch.equal(copied.weight, plain.weight)
            assert copied.weight.untyped_storage().nbytes() == ROWS * 4 * 4
        look_up = torch.tensor([2, 1])
        for export in torch.jit.script, lambda module: torch.export.export(module, (look_up,)):
            with pytest.raises(RuntimeError, match=r"cannot be exported or .* copy.deepcopy"):
                export(torch.nn.Sequential(table))
        scripted = torch.jit.script(copy.deepcopy(table))
        assert torch.equal(scripted(look_up), plain(look_up))
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

    train(body, max_staleness=0, gradients="sum")
