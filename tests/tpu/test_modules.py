"""Modules of the scope are on the device, the same objects as before; variables too."""

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import mpistrat as ms

pytestmark = pytest.mark.mpi


class Shared(torch.nn.Module):
    """Two layers with one weight, two buffers that are one, and a layer whose shape comes with the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4))
        self.child = torch.nn.Module()
        self.child.register_buffer("scale", self.scale)
        self.lazy = torch.nn.LazyLinear(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.lazy(self.second(self.first(inputs)) * self.scale)


def test_parameters_stay_the_same_objects_and_shared_ones_shared() -> None:
    strategy = ms.TPUStrategy(gradients="sum")
    with strategy.scope():
        module = Shared()
        before = [*map(id, module.parameters())]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    device = torch.device(strategy.extended.worker_devices[0])
    inputs = torch.ones(2, 4).to(device)
    for _ in range(2):  # the second run mirrors what the first has made
        strategy.run(module, args=(inputs,))
    assert [*map(id, module.parameters())] == before
    assert module.first.weight is module.second.weight
    assert module.scale is module.child.scale
    tensors = [*module.parameters(), *module.buffers()]
    assert {tensor.device for tensor in tensors} == {device}

    def step(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        module(inputs).sum().backward()
        optimizer.step()

    old = module.lazy.bias.tolist()
    strategy.run(step, args=(inputs,))
    moved = 0.1 * 2 * strategy.num_replicas_in_sync
    assert module.lazy.bias.tolist() == pytest.approx([b - moved for b in old], rel=1e-5)
    states = strategy.extended.communicator.all_gather_object(module.first.weight.tolist())
    assert all(state == states[0] for state in states)
    for value in module, copy.deepcopy(module), AveragedModel(module), optimizer:
        assert b"mpistrat" not in pickle.dumps(value)
    copied = pickle.loads(pickle.dumps(module))
    assert type(copied.first.weight) is torch.nn.Parameter
    assert copied.lazy.bias.tolist() == module.lazy.bias.tolist()


def test_a_module_that_was_moved_by_hand_and_is_frozen_in_part() -> None:
    strategy = ms.TPUStrategy(gradients="mean")
    module = torch.nn.Linear(4, 3).to(strategy.extended.worker_devices[0])
    strategy.mirror(module)
    module.weight.requires_grad_(False)
    weight, bias = module.weight.tolist(), module.bias.tolist()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def step(inputs: torch.Tensor) -> None:
        module(inputs).sum().backward()
        optimizer.step()

    strategy.run(step, args=(torch.ones(2, 4).to(module.weight.device),))
    assert module.weight.tolist() == weight
    assert module.bias.tolist() == pytest.approx([b - 2 for b in bias])


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_recurrent_modules_train_where_the_scope_brings_them(kind: type[torch.nn.RNNBase]) -> None:
    strategy = ms.TPUStrategy(gradients="mean")
    torch.manual_seed(2)
    with strategy.scope():
        module = kind(3, 4, num_layers=2, bidirectional=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    on_host = kind(3, 4, num_layers=2, bidirectional=True)
    on_host.load_state_dict({name: value.cpu() for name, value in module.state_dict().items()})
    host_optimizer = torch.optim.SGD(on_host.parameters(), lr=0.1)
    inputs = torch.arange(18.0).reshape(3, 2, 3) / 18

    def descend(
        module: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor
    ) -> None:
        optimizer.zero_grad()
        module(inputs)[0].sum().backward()
        optimizer.step()

    there = inputs.to(strategy.extended.worker_devices[0])
    for _ in range(2):
        descend(on_host, host_optimizer, inputs)
        strategy.run(descend, args=(module, optimizer, there))
    for parameter, other in zip(module.parameters(), on_host.parameters(), strict=True):
        assert torch.allclose(parameter.detach().cpu(), other.detach(), rtol=1e-4, atol=1e-5)


class Watched(torch.nn.Sequential):
    """Something else refers to one of its parameters."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(2, 2))
        self.reference = weakref.ref(self[0].bias)


def test_a_parameter_that_something_else_refers_to_is_named() -> None:
    strategy = ms.TPUStrategy()
    fix = r"parameter 0\.bias of Watched .*to\('xla:0'\) in the scope"
    with pytest.raises(RuntimeError, match=fix), strategy.scope():
        module = Watched()
    with strategy.scope():
        module = torch.nn.Linear(2, 2).to("xla:0")
        reference = weakref.ref(module.bias)
    assert reference() is module.bias
    assert str(module.bias.device) == "xla:0"


def test_variables_are_on_the_device_and_combine_what_replicas_give() -> None:
    strategy = ms.TPUStrategy()
    ids = range(strategy.num_replicas_in_sync)
    of = ms.VariableAggregation
    with strategy.scope():
        totals = ms.Variable(np.ones(2), aggregation=of.SUM)
        means = ms.Variable(1.0, aggregation=of.MEAN)
        count = ms.Variable(3, dtype="int64", aggregation=of.SUM)
        on_read = ms.Variable(
            0.0, synchronization=ms.VariableSynchronization.ON_READ, aggregation=of.SUM
        )
        rows = ms.Variable(torch.zeros(4, 2), aggregation=of.SUM)
    device = torch.device(strategy.extended.worker_devices[0])

    def step() -> None:
        mine = torch.tensor(ms.get_replica_context().replica_id_in_sync_group + 1, device=device)
        totals.assign_add(mine.double() * torch.ones(2, dtype=torch.float64, device=device))
        means.assign_add(mine.float())
        count.assign_add(mine)
        on_read.assign_add(mine.float())
        index = torch.tensor([1], device=device)
        rows.scatter_add(
            ms.IndexedSlices(mine.float() * torch.ones(1, 2, device=device), index, (4, 2))
        )

    strategy.run(step)
    total = sum(i + 1 for i in ids)
    assert totals.values[0].read_value().device == device
    assert totals.numpy().tolist() == [1.0 + total] * 2
    assert totals.numpy().dtype == np.float64
    assert means.numpy() == pytest.approx(1 + total / len(ids))
    assert (int(count.numpy()), count.numpy().dtype) == (3 + total, np.int64)
    assert on_read.numpy() == total
    assert rows.numpy().tolist() == [[0, 0], [total] * 2, [0, 0], [0, 0]]
    count.assign(7)
    assert int(count.numpy()) == 7
