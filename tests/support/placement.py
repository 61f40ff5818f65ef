"""What a strategy puts on accelerators, as a program: `python -m support.simulated_accelerator placement.py`.

Each rank runs all checks, and prints the name of each that holds.
"""

import contextlib
import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import mpistrat as ms

_RANKS = ms.MultiWorkerMirroredStrategy().extended.communicator
RANK = _RANKS.rank
SIZE = _RANKS.size
HOST = torch.device("cpu")
SUM = ms.VariableAggregation.SUM
EACH = [["sim:0", "sim:1"], ["sim:1", "sim:0"]]


def devices_of(*values: Any) -> set[str]:
    """Of modules, optimizers' states, variables and tensors."""
    found = set()
    for value in values:
        if isinstance(value, nn.Module):
            found |= devices_of(*value.parameters(), *value.buffers())
            gradients = [parameter.grad for parameter in value.parameters()]
            found |= devices_of(*(each for each in gradients if each is not None))
        elif isinstance(value, torch.optim.Optimizer):
            for state in value.state.values():
                tensors = [tensor for name, tensor in state.items() if name != "step"]
                found |= devices_of(*tensors)
        elif isinstance(value, ms.IndexedSlices):
            found |= devices_of(value.values, value.indices)
        elif isinstance(value, ms.Variable):
            found |= devices_of(value.read_value())
        else:
            found.add(str(value.device))
    return found


def make_model() -> Any:
    torch.manual_seed(5)
    hidden = nn.Linear(3, 4)
    norm = nn.BatchNorm1d(4)
    output = nn.Linear(4, 2)
    return nn.Sequential(hidden, norm, nn.Tanh(), output)


def batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 8, 3, generator=torch.Generator().manual_seed(1)))


def train(
    strategy: ms.Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[torch.Tensor],
) -> list[float]:
    """README's loop."""

    def step(batch: Any) -> Any:
        (x,) = batch
        loss = ms.compute_average_loss(model(x).square().sum(1), global_batch_size=8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    losses = []
    dataset = ms.input.BatchedDataset((torch.cat(data),), 8)
    batch: Any
    for batch in strategy.experimental_distribute_dataset(dataset):
        per_replica = strategy.run(step, args=(batch,))
        losses.append(strategy.reduce(ms.ReduceOp.SUM, per_replica, axis=None).item())
    return losses


def check_a_scope_ends_with_its_modules_on_the_device() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    (device,) = strategy.extended.worker_devices
    with strategy.scope():
        model = make_model()
        tied = nn.Linear(4, 2)
        tied.weight = model[3].weight
        recurrent = nn.LSTM(3, 4)
        before = list(model.parameters())
        model[0].weight.grad = torch.ones(4, 3)
        optimizer = torch.optim.Adagrad(model.parameters())  # has its state from the beginning
    assert device.startswith("sim:")
    assert devices_of(model, tied, recurrent, optimizer) == {device}
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert tied.weight is model[3].weight
    assert all(state["step"].device == HOST for state in optimizer.state.values())


def check_training_is_as_on_the_host() -> None:
    losses = []
    for strategy in (
        ms.MultiWorkerMirroredStrategy(devices=["cpu:0"]),
        ms.MultiWorkerMirroredStrategy(),
    ):
        for made_in_scope in (True, False):
            with strategy.scope():
                model: Any = None
                if made_in_scope:
                    model = make_model()
            if model is None:
                model = make_model()
            optimizer = torch.optim.Adam(model.parameters())
            if not made_in_scope:
                model(batches(1)[0]).square().sum().backward()
                optimizer.step()  # so that there is state, and there are gradients
                strategy.prepare(model, optimizer)
                assert devices_of(model, optimizer) == {
                    strategy.extended.worker_devices[0].replace("cpu:0", "cpu")
                }
            losses.append(train(strategy, model, optimizer, batches(4)))
    assert losses[0] == pytest.approx(losses[2], rel=1e-6)
    assert losses[1] == pytest.approx(losses[3], rel=1e-6)
    assert losses[0] != losses[1]


def check_what_lazy_modules_make() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = nn.Sequential(
            nn.LazyLinear(4, dtype=torch.float64), nn.LazyBatchNorm1d(dtype=torch.float64)
        )
    assert model(torch.ones(2, 3, dtype=torch.float64)).device == HOST
    assert devices_of(model) == set(strategy.extended.worker_devices)
    assert model[0].weight.dtype is torch.float64


def check_variables() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    (device,) = strategy.extended.worker_devices
    on_read = ms.VariableSynchronization.ON_READ
    with strategy.scope():
        variable = ms.Variable(torch.ones(2), aggregation=SUM)
        counter = ms.Variable(lambda: torch.zeros(()), synchronization=on_read, aggregation=SUM)
        array = ms.Variable(np.ones(2))
    assert devices_of(variable, counter) == {device}
    assert isinstance(array.read_value(), np.ndarray)

    def step() -> None:
        variable.assign_add(torch.ones(2))
        counter.assign_add(torch.ones((), device=device))

    strategy.run(step)
    assert devices_of(variable, counter) == {device}
    assert variable.numpy().tolist() == [1 + SIZE] * 2
    assert float(counter) == SIZE
    checkpoint = ms.checkpoint.Checkpoint(variable=variable)
    assert checkpoint is not None
    variable.load_state(np.zeros(2, np.float32))
    assert devices_of(variable) == {device}


def check_state_that_is_restored() -> None:
    trained = make_model()
    optimizer = torch.optim.Adam(trained.parameters())
    trained(batches(1)[0]).square().sum().backward()
    optimizer.step()
    strategy = ms.MultiWorkerMirroredStrategy()
    device = set(strategy.extended.worker_devices)
    with strategy.scope():
        model = make_model()
        inside = torch.optim.Adam(model.parameters())
        inside.load_state_dict(optimizer.state_dict())
    after = torch.optim.Adam(model.parameters())
    after.load_state_dict(optimizer.state_dict())
    assert devices_of(inside, after) == device
    assert len(inside.state) == len(after.state) == 6
    train(strategy, model, inside, batches(1))


def check_calls_from_the_host() -> None:
    """As of a script that evaluates outside `run`."""
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model().eval()
    x = batches(1)[0]
    expected = make_model().eval()(x)
    found = model(x)
    assert found.device == HOST
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found.sum(), [*model.parameters()])
    assert devices_of(*gradients) == set(strategy.extended.worker_devices)
    assert devices_of(model) == set(strategy.extended.worker_devices)
    assert devices_of(model(input=x), model(x.to(strategy.extended.worker_devices[0]))) == {
        "cpu",
        *strategy.extended.worker_devices,
    }
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        copy.deepcopy(model)(x)  # it is torch's alone
    reference = weakref.ref(model)
    del model, found
    gc.collect()
    assert reference() is None


def check_parameters_in_no_module() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    scale = nn.Parameter(torch.ones(2))
    shift = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.Adam([scale, shift])
    (scale * shift).sum().backward()
    optimizer.step()
    both: Any = [scale, shift]
    strategy.mirror(both)
    found = devices_of(scale, scale.grad, shift, shift.grad, optimizer)
    assert found == set(strategy.extended.worker_devices)
    assert isinstance(scale, nn.Parameter)
    assert not isinstance(shift, nn.Parameter)


def check_packed_sequences_from_the_host() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.full((), 2.0))

        def forward(self, packed: Any) -> Any:
            assert packed.batch_sizes.device == HOST
            return packed._replace(data=packed.data * self.factor)

    with ms.MultiWorkerMirroredStrategy().scope():
        model = Scaled()
    packed = model(pack_sequence([torch.ones(3, 1), torch.ones(2, 1)]))
    assert packed.data.flatten().tolist() == [2.0] * 5


def check_a_parameter_that_cannot_be_moved() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    model = nn.Linear(2, 2)
    kept = weakref.ref(model.weight) if RANK == SIZE - 1 else None
    with pytest.raises(RuntimeError, match="parameter weight of Linear cannot be brought to sim:"):
        strategy.mirror(model)
    assert kept is None or kept() is model.weight


def check_central_storage() -> None:
    _check_central(ms.CentralStorageStrategy(["sim:1"]), "sim:1", "sim:1")
    _check_central(ms.CentralStorageStrategy(["cpu:0"], "sim:1"), "sim:1", "cpu")
    _check_central(ms.CentralStorageStrategy(["sim:1"], "cpu:0"), "cpu", "sim:1")


def _check_central(strategy: ms.Strategy, parameters: str, computed: str) -> None:
    """Args: where variables are, and where replicas compute with them."""
    with strategy.scope():
        variable = ms.Variable(torch.ones(2), aggregation=SUM)
        model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    assert devices_of(variable, model) == {parameters}

    def step() -> Any:
        return variable.assign_add(torch.ones(2)), variable.read_value() * 1

    for value in strategy.run(step):
        assert devices_of(value) == {computed}
    assert variable.numpy().tolist() == [1 + SIZE] * 2
    losses = train(strategy, model, optimizer, batches(2))
    assert losses[1] < losses[0]
    assert devices_of(model, optimizer) == {parameters}


def check_ranks_do_not_share_parameters_on_an_accelerator() -> None:
    message = "ranks of a node are to share parameters, but those on sim are each rank's own"
    strategy = ms.CentralStorageStrategy(["sim:0"])
    expected: Any = contextlib.nullcontext()
    if RANK == 0 and SIZE > 1:
        expected = pytest.warns(RuntimeWarning, match=message)
    with expected:
        strategy.mirror(nn.Linear(2, 2))


def check_central_storage_takes_all_accelerators() -> None:
    strategy = ms.CentralStorageStrategy()
    devices = strategy.extended.worker_devices
    assert strategy.num_replicas_in_sync == 2 * SIZE
    assert devices == ("sim:0", "sim:1")
    assert strategy.extended.parameter_devices == ("cpu:0",)
    with strategy.scope():
        variable = ms.Variable(torch.ones(2), aggregation=SUM)

    def step() -> Any:
        variable.assign_add(torch.ones(2))
        return variable.read_value() + torch.ones(2, device="sim")

    results = strategy.run(step)
    assert [str(value.device) for value in results.values] == [*devices]
    assert variable.numpy().tolist() == [1 + 2 * SIZE] * 2


def strategies_of_two() -> list[ms.Strategy]:
    devices = EACH[RANK % 2]
    ops = [ms.ReductionToOneDevice(), ms.NcclAllReduce(), ms.HierarchicalCopyAllReduce()]
    return [
        ms.MirroredStrategy(devices),
        ms.MultiWorkerMirroredStrategy(devices=devices, deterministic=True),
        *(ms.MirroredStrategy(devices, cross_device_ops=each) for each in ops),
    ]


def check_arrays_on_two_devices_of_a_rank() -> None:
    for strategy in strategies_of_two():
        total = float(sum(range(1, 2 * SIZE + 1)))
        devices = strategy.extended.worker_devices

        def first(context: Any) -> Any:
            number = context.replica_id_in_sync_group
            device = devices[number - 2 * RANK]  # noqa: B023
            return torch.full((2,), number + 1.0, device=device)

        values = strategy.experimental_distribute_values_from_function(first)
        assert strategy.reduce(ms.ReduceOp.SUM, values, axis=None).tolist() == [total] * 2
        assert strategy.reduce(ms.ReduceOp.MEAN, values, axis=0).item() == total / (2 * SIZE)
        gathered = strategy.gather(values, axis=0)
        assert gathered.tolist() == [i + 1.0 for i in range(2 * SIZE) for _ in range(2)]
        assert devices_of(gathered, strategy.reduce(ms.ReduceOp.SUM, values, axis=None)) == {
            devices[0]
        }

        def step(x: Any) -> Any:
            context: Any = ms.get_replica_context()
            rows = ms.IndexedSlices(
                x[None], torch.zeros(1, dtype=torch.int64, device=x.device), (3, 2)
            )
            found = [
                context.all_reduce(ms.ReduceOp.SUM, x),
                *context.all_reduce(ms.ReduceOp.MEAN, [x, x * 2]),
                context.all_gather(x, axis=0),
                torch.empty(2, device="sim"),  # of a replica's own
            ]
            assert devices_of(*found) == devices_of(x)
            assert devices_of(*context.all_reduce(ms.ReduceOp.SUM, [rows])) == devices_of(x)
            return found[0], rows

        sums, rows = strategy.run(step, args=(values,))
        assert [value.tolist() for value in sums.values] == [[total] * 2] * 2
        added = strategy.reduce(ms.ReduceOp.SUM, rows, axis=None)
        assert added.values.sum().item() == 2 * total
        to = strategy.extended.reduce_to(ms.ReduceOp.SUM, values, devices[1])
        assert devices_of(to) == {devices[1]}
        copies = strategy.extended.broadcast_to(torch.ones(2), values)
        assert [str(copy.device) for copy in copies.values] == [*devices]

        with strategy.scope():
            variable = ms.Variable(torch.zeros(2), aggregation=SUM)

        def update(x: Any) -> None:
            variable.assign_add(x)  # noqa: B023
            assert devices_of(variable) == devices_of(x)  # noqa: B023

        strategy.run(update, args=(values,))
        assert variable.numpy().tolist() == [total] * 2

        dataset = ms.input.BatchedDataset((torch.arange(16.0),), 8)
        for (x,) in strategy.experimental_distribute_dataset(dataset):
            assert [str(value.device) for value in x.values] == [*devices]


def check_modules_take_one_rank_per_device() -> None:
    message = f"torch modules take one rank per device, and rank .* mpirun -n {2 * SIZE} python"
    for strategy in strategies_of_two()[:2]:
        model = nn.Linear(2, 2)
        with pytest.raises(NotImplementedError, match=message):
            strategy.mirror(model)
        with pytest.raises(NotImplementedError, match=message), strategy.scope():
            model = nn.Linear(2, 2)
    devices = EACH[0] if RANK == 0 else ["cpu:0", "cpu:1"]
    on_one_rank = ms.MirroredStrategy(devices)
    with pytest.raises(RuntimeError, match=message):
        on_one_rank.mirror(nn.Linear(2, 2))


def main() -> None:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(f"{RANK}: {name}\n", end="", flush=True)


if __name__ == "__main__":
    main()
