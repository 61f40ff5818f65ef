"""Buffers that a forward writes: a replica's own in the forward, one value for whoever reads afterwards."""

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, update_bn

import mpistrat as ms
from support.training.whole_batch import (
    BATCH,
    FEATURES,
    Pair,
    batches,
    build,
    equal_on_all_ranks,
    loss_of,
    own,
    plain_step,
    replica_id,
)

MOMENTUM = 0.1


def normalized() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.BatchNorm1d(FEATURES), torch.nn.Linear(FEATURES, 2))


def even_batches(strategy: ms.Strategy) -> list[torch.Tensor]:
    """A batch of 4 examples for each replica of all ranks, in replica order; the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    shape = (4, FEATURES)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) * (i + 1)
        for i in range(strategy.num_replicas_in_sync)
    ]


def mine(strategy: ms.Strategy) -> torch.Tensor:
    context = ms.get_replica_context()
    assert context is not None
    return even_batches(strategy)[context.replica_id_in_sync_group]


def averaged_statistics(strategy: ms.Strategy, steps: int = 1) -> tuple[Any, Any]:
    """The mean over replicas of what a BatchNorm1d has seen after `steps` forwards on its own batch."""
    layers = [torch.nn.BatchNorm1d(FEATURES).double() for _ in even_batches(strategy)]
    for layer, x in zip(layers, even_batches(strategy), strict=True):
        for _ in range(steps):
            layer(x)
    return tuple(
        torch.stack([getattr(layer, name) for layer in layers]).mean(0)
        for name in ("running_mean", "running_var")
    )


def check_state(strategy: ms.Strategy, model: torch.nn.Module, steps: int) -> None:
    state = model.state_dict()
    mean, variance = averaged_statistics(strategy, steps)
    torch.testing.assert_close(state["0.running_mean"], mean)
    torch.testing.assert_close(state["0.running_var"], variance)
    assert state["0.num_batches_tracked"] == steps
    assert equal_on_all_ranks(strategy, state["0.running_mean"])


def test_state_dict_averages_after_a_backward(strategy: ms.Strategy) -> None:
    model = build(strategy, normalized)
    for steps in (1, 2, 3):
        strategy.run(lambda: model(mine(strategy)).sum().backward())
        check_state(strategy, model, steps)


def test_state_dict_averages_without_a_backward(strategy: ms.Strategy) -> None:
    model = build(strategy, normalized)
    for steps in (1, 2):
        strategy.run(lambda: (model(mine(strategy)), None)[1])
        check_state(strategy, model, steps)


def test_after_a_backward_one_rank_may_read_alone(strategy: ms.Strategy) -> None:
    model = build(strategy, normalized)
    strategy.run(lambda: model(mine(strategy)).sum().backward())
    if strategy.extended.communicator.rank == 0:
        mean, _ = averaged_statistics(strategy)
        torch.testing.assert_close(model.state_dict()["0.running_mean"], mean)
    assert equal_on_all_ranks(strategy, model[0].running_mean)


def test_buffers_are_each_replicas_own_until_then(strategy: ms.Strategy) -> None:
    model = build(strategy, normalized)

    def step() -> torch.Tensor:
        model(mine(strategy))
        return model[0].running_mean.clone()

    extended = strategy.extended
    results = strategy.experimental_local_results(strategy.run(step))
    for i, result in enumerate(results):
        expected = even_batches(strategy)[extended.first_replica_id + i].mean(0) * MOMENTUM
        torch.testing.assert_close(result, expected)


def test_evaluation_reads_the_averages(strategy: ms.Strategy) -> None:
    model = build(strategy, normalized)
    strategy.run(lambda: model(mine(strategy)).sum().backward())
    model.eval()
    x, _ = next(batches())
    results = strategy.experimental_local_results(strategy.run(lambda: model[0](x)))
    mean, variance = averaged_statistics(strategy)
    expected = (x - mean) / (variance + model[0].eps).sqrt()
    for result in results:
        torch.testing.assert_close(result, expected)


def test_loaded_buffers_reach_every_replica(strategy: ms.Strategy) -> None:
    model = build(strategy, normalized)
    strategy.run(lambda: model(mine(strategy)).sum().backward())
    state = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    read = strategy.run(lambda: model[0].running_mean.clone())
    for result in strategy.experimental_local_results(read):
        assert result.tolist() == [3.0] * FEATURES
    model[0].running_mean = torch.full((FEATURES,), 4.0, dtype=torch.float64)
    read = strategy.run(lambda: model[0].running_mean.clone())
    for result in strategy.experimental_local_results(read):
        assert result.tolist() == [4.0] * FEATURES


class Counting(torch.nn.Module):
    """Buffers of each kind: written in place, replaced, whole numbers, and one that nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, 2)
        self.register_buffer("sums", torch.zeros(2))
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("examples", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.arange(3.0))

    def forward(self, x: torch.Tensor, replica: int) -> torch.Tensor:
        with torch.no_grad():
            self.sums += replica
            self.last = torch.tensor(float(replica), dtype=self.sums.dtype)
            self.examples += replica + 1
        return self.linear(x)


@pytest.mark.parametrize("with_backward", [True, False])
def test_float_buffers_are_averaged_and_integers_are_replica_0s(
    strategy: ms.Strategy, with_backward: bool
) -> None:
    model = build(strategy, Counting)
    before = model.constant

    def step() -> None:
        context = ms.get_replica_context()
        assert context is not None
        output = model(mine(strategy), context.replica_id_in_sync_group)
        if with_backward:
            output.sum().backward()

    strategy.run(step)
    strategy.run(step)
    n = strategy.num_replicas_in_sync
    state = model.state_dict()
    assert state["sums"].tolist() == [n - 1.0, n - 1.0]
    assert state["last"].item() == (n - 1) / 2
    assert state["examples"].item() == 2
    assert state["constant"].tolist() == [0, 1, 2]
    assert model.constant is before


class Numbers(torch.nn.Module):
    """Integers at the ends of their ranges, which travel as bytes."""

    def __init__(self, floats: torch.dtype | None, length: int) -> None:
        super().__init__()
        self.floats = floats
        kinds = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
        self.ends = [torch.iinfo(kind) for kind in kinds]
        for kind, ends in zip(kinds, self.ends, strict=True):
            self.register_buffer(ends.dtype, torch.zeros(3, 2, dtype=kind).t())
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("bytes", torch.zeros(length, dtype=torch.uint8))
        if floats is not None:
            self.register_buffer("sums", torch.zeros(2, dtype=floats))

    def forward(self, replica: int) -> None:
        for ends in self.ends:
            written = self._buffers[ends.dtype]
            assert written is not None
            written += 1 if replica else torch.tensor([[ends.min], [ends.max]], dtype=written.dtype)
        self.flags |= torch.tensor([True, False, True, True, False]) ^ bool(replica)
        if self.floats is not None:
            self.sums += replica
        self.bytes[-1] = replica + 7


@pytest.mark.parametrize(
    ("floats", "length"),
    [(None, 3), (torch.bfloat16, 3), (torch.float32, 3), (torch.float32, 70_000)],
)
def test_integers_of_every_width_are_exact(
    strategy: ms.Strategy, floats: torch.dtype | None, length: int
) -> None:
    """Few are among the floats' numbers, and many go by themselves."""
    with strategy.scope():
        model = Numbers(floats, length)

    def step() -> None:
        context = ms.get_replica_context()
        assert context is not None
        model(context.replica_id_in_sync_group)

    strategy.run(step)
    state = model.state_dict()
    for ends in model.ends:
        assert state[ends.dtype].tolist() == [[ends.min] * 3, [ends.max] * 3]
    assert state["flags"].tolist() == [True, False, True, True, False]
    assert state["bytes"][-2:].tolist() == [0, 7]
    if floats is not None:
        assert state["sums"].tolist() == [(strategy.num_replicas_in_sync - 1) / 2] * 2


def calls_of(strategy: ms.Strategy, step: Any) -> int:
    """How many collectives `step` makes."""
    contract = strategy.extended.communicator.contract
    before: int = contract.calls
    step()
    return contract.calls - before


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_buffers_travel_in_one_message(deterministic: bool) -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum", deterministic=deterministic)
    with strategy.scope():
        model = torch.nn.BatchNorm1d(FEATURES)
    strategy.run(lambda: model(torch.randn(4, FEATURES)).detach())
    assert calls_of(strategy, model.state_dict) == 1
    assert calls_of(strategy, model.state_dict) == 0
    assert model.num_batches_tracked == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_sync_batch_norm_takes_one_collective_in_each_direction(deterministic: bool) -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum", deterministic=deterministic)
    with strategy.scope():
        model = ms.convert_sync_batchnorm(torch.nn.BatchNorm1d(FEATURES))
    x = torch.randn(4, FEATURES, requires_grad=True)

    def forwards(count: int) -> torch.Tensor:
        y = x
        for _ in range(count):
            y = model(y)
        return y.square().sum()

    def both() -> None:
        torch.autograd.grad(forwards(3), x)  # calls no hooks

    def forwards_only() -> None:
        forwards(3)

    def of_weights() -> None:
        """The gradient of an input that needs none is not made."""
        torch.autograd.grad(model(x.detach()).square().sum(), model.weight)

    for step, calls in ((both, 6), (forwards_only, 3), (of_weights, 1)):
        assert calls_of(strategy, lambda step=step: strategy.run(step)) == calls


def test_sync_batch_norm_of_values_far_from_zero(strategy: ms.Strategy) -> None:
    """A mean of squares would lose the variance in float32."""
    whole = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(2)) + 1000
    with strategy.scope():
        model = ms.convert_sync_batchnorm(torch.nn.BatchNorm1d(FEATURES))
    output = strategy.gather(strategy.run(lambda: model(own(whole)).detach()), axis=0)
    expected = torch.nn.BatchNorm1d(FEATURES).double()(whole.double()).detach()
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-4)
    variance = model.state_dict()["running_var"].double()
    torch.testing.assert_close(variance, 0.9 + 0.1 * whole.double().var(0), rtol=1e-5, atol=0)


def test_instance_norm_statistics(strategy: ms.Strategy) -> None:
    """Its writes count as writes, but it counts no batches."""

    def make() -> torch.nn.Module:
        return torch.nn.InstanceNorm1d(FEATURES, track_running_stats=True, affine=True)

    model = build(strategy, make)
    strategy.run(lambda: model(mine(strategy)[:, :, None].expand(-1, -1, 3)).sum().backward())
    expected = torch.stack([x.mean(0) for x in even_batches(strategy)]).mean(0) * MOMENTUM
    torch.testing.assert_close(model.state_dict()["running_mean"], expected)


def test_a_buffer_that_two_modules_share(strategy: ms.Strategy) -> None:
    def make() -> torch.nn.Module:
        model = torch.nn.ModuleList([Counting(), Counting()])
        model[1].sums = model[0].sums
        return model

    torch.manual_seed(0)
    with strategy.scope():
        model = make()

    def step() -> None:
        context = ms.get_replica_context()
        assert context is not None
        x = mine(strategy).float()
        model[0](x, context.replica_id_in_sync_group).sum().backward()

    strategy.run(step)
    average = (strategy.num_replicas_in_sync - 1) / 2
    assert model.state_dict()["1.sums"].tolist() == [average, average]
    assert model[1].sums is model[0].sums


@pytest.mark.parametrize("momentum", [0.1, None])
def test_sync_batch_norm_trains_as_on_the_whole_batch(
    strategy: ms.Strategy, momentum: float | None
) -> None:
    def make() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 3),
            torch.nn.Unflatten(1, (3, 1, 1)),
            torch.nn.BatchNorm2d(3, momentum=momentum),
            torch.nn.Flatten(),
            torch.nn.BatchNorm1d(3, affine=False, momentum=momentum),
            torch.nn.Tanh(),
            torch.nn.Linear(3, 2),
        )

    pair = Pair(strategy, make)
    assert ms.convert_sync_batchnorm(pair.model) is pair.model
    for _ in range(3):
        pair.train(plain_step, steps=1)
        torch.testing.assert_close(dict(pair.model.state_dict()), dict(pair.alone.state_dict()))
    pair.model.eval()
    pair.alone.eval()
    x, _ = next(pair.batches)
    for result in strategy.experimental_local_results(strategy.run(lambda: pair.model(x))):
        torch.testing.assert_close(result, pair.alone(x))


@pytest.mark.parametrize("examples", [2, BATCH])
def test_sync_batch_norm_outputs_and_gradients(strategy: ms.Strategy, examples: int) -> None:
    """Replicas have different numbers of examples, some none; each example counts once."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(examples, 3, 2, generator=generator, dtype=torch.float64)
    upstream = torch.randn(examples, 3, 2, generator=generator, dtype=torch.float64)
    alone = torch.nn.BatchNorm1d(3).double()
    torch.nn.init.uniform_(alone.weight, generator=generator)
    with strategy.scope():
        model = ms.convert_sync_batchnorm(torch.nn.BatchNorm1d(3).double())
    model.load_state_dict(alone.state_dict())

    def step() -> Any:
        x = own(whole).clone().requires_grad_()
        y = model(x)
        (y * own(upstream)).sum().backward()
        return y.detach(), x.grad

    output, input_gradient = strategy.run(step)
    x = whole.clone().requires_grad_()
    y = alone(x)
    (y * upstream).sum().backward()
    torch.testing.assert_close(strategy.gather(output, axis=0), y.detach())
    torch.testing.assert_close(strategy.gather(input_gradient, axis=0), x.grad)
    torch.testing.assert_close(model.weight.grad, alone.weight.grad)
    torch.testing.assert_close(model.bias.grad, alone.bias.grad)
    torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()))


def test_sync_batch_norm_without_momentum_is_the_mean_of_all_batches(strategy: ms.Strategy) -> None:
    """A third in float32 would be seen."""
    alone = torch.nn.BatchNorm1d(FEATURES, momentum=None).double()
    with strategy.scope():
        model = ms.convert_sync_batchnorm(torch.nn.BatchNorm1d(FEATURES, momentum=None).double())
    several = batches()
    for _ in range(3):
        x = next(several)[0].double()
        alone(x)
        strategy.run(lambda x=x: model(own(x)).detach())
    for name in ("running_mean", "running_var"):
        found, expected = model.state_dict()[name], alone.state_dict()[name]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_sync_batch_norm_of_narrow_inputs(strategy: ms.Strategy) -> None:
    x, _ = next(batches())
    layer = torch.nn.BatchNorm1d(FEATURES)
    with strategy.scope():
        model = ms.convert_sync_batchnorm(torch.nn.BatchNorm1d(FEATURES))
    expected = layer(x.float()).detach()

    def step() -> torch.Tensor:
        y = model(own(x).bfloat16())
        assert y.dtype == torch.bfloat16
        return y.detach()

    gathered = strategy.gather(strategy.run(step), axis=0)
    torch.testing.assert_close(gathered.float(), expected, rtol=0.02, atol=0.02)


def test_sync_batch_norm_needs_more_than_one_value(strategy: ms.Strategy) -> None:
    with strategy.scope():
        model = ms.convert_sync_batchnorm(torch.nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"more than 1 value per channel"):
        strategy.run(lambda: model(own(torch.ones(1, 3))))


def test_conversion_keeps_parameters_and_leaves_the_rest(strategy: ms.Strategy) -> None:
    pair = Pair(strategy, lambda: torch.nn.Sequential(normalized(), torch.nn.LayerNorm(2)))
    names = list(pair.model.state_dict())
    parameters = list(pair.model.parameters())
    pair.model[0].eval()
    ms.convert_sync_batchnorm(pair.model)
    assert not pair.model[0][0].training
    assert type(pair.model[0][0]).__name__ == "SyncBatchNorm"
    assert list(pair.model.state_dict()) == names
    assert all(a is b for a, b in zip(parameters, pair.model.parameters(), strict=True))
    with pytest.raises(ValueError, match="LazyBatchNorm1d does not know its channels"):
        ms.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())


def test_two_forwards_may_wait_for_two_backwards(strategy: ms.Strategy) -> None:
    """As in torch, though the first backward has averaged the statistics meanwhile."""
    model = build(strategy, normalized)

    def step() -> None:
        x = mine(strategy)
        first, second = loss_of(model(x), x[:, :2]), loss_of(model(x * 2), x[:, :2])
        first.backward()
        second.backward()

    strategy.run(step)
    assert model.state_dict()["0.num_batches_tracked"] == 2


class WithAuxiliary(torch.nn.Module):
    """As classifiers have one that only helps while they are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.auxiliary = normalized(), normalized()
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result if self.auxiliary is None else result + self.auxiliary(x)


def without_auxiliary(model: Any) -> Any:
    model.auxiliary = None
    return model


def test_modules_that_are_let_go_before_a_backward(one_per_rank: ms.Strategy) -> None:
    strategy = one_per_rank
    again = lambda model: strategy.prepare(copy.deepcopy(model))  # noqa: E731
    for let_go in (without_auxiliary, ms.convert_sync_batchnorm, again):
        model = let_go(build(strategy, WithAuxiliary))
        gc.collect()
        strategy.run(lambda model=model: model(mine(strategy)).sum().backward())
        assert equal_on_all_ranks(strategy, model.state_dict()["body.0.running_mean"])


def test_a_module_that_one_rank_alone_still_has(one_per_rank: ms.Strategy) -> None:
    """Python frees what refers to itself when it likes: here after a forward, and before its backward."""
    strategy = one_per_rank
    model: Any = build(strategy, WithAuxiliary)
    kept = [model.auxiliary] if strategy.is_first else []

    def step() -> None:
        loss = model(mine(strategy)).sum()
        model.auxiliary = None
        gc.collect()
        loss.backward()

    strategy.run(step)
    assert len(kept) == strategy.is_first
    mean, _ = averaged_statistics(strategy)
    torch.testing.assert_close(model.state_dict()["body.0.running_mean"], mean)


class Ruled(torch.nn.Linear):
    """A buffer for each rule of `reduce_buffers`, written from the replica's own data."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 2)
        self.register_buffer("least", torch.zeros(2))
        self.register_buffer("greatest", torch.tensor(0, dtype=torch.int8))
        self.register_buffer("seen", torch.tensor(10))
        self.register_buffer("total", torch.full((2,), 10.0))
        self.register_buffer("tags", torch.zeros(2))
        self.register_buffer("state", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = replica_id() + 1
        self.least.clamp_(max=-value)
        self.greatest.clamp_(min=value)
        self.seen += value
        self.total = self.total + value
        self.tags.fill_(value + 0.1)
        self.state.fill_(value)
        output: torch.Tensor = super().forward(x)
        return output


def ruled(strategy: ms.Strategy) -> torch.nn.Module:
    model = build(strategy, Ruled)
    rules = {"least": "min", "greatest": "max", "seen": "sum"}
    ms.reduce_buffers(torch.nn.ModuleList([model]), **rules, total="sum", tags="first")
    ms.reduce_buffers(model, state="local")
    return model


@pytest.mark.parametrize("replicas", [1, 2])
def test_rules_of_buffers(replicas: int, notices: list[str]) -> None:
    """A sum counts each amount once, whenever it is made, and goes on from a value that the program sets."""
    devices = [f"cpu:{i}" for i in range(replicas)]
    strategy = ms.MultiWorkerMirroredStrategy(devices=devices, gradients="sum")
    model = ruled(strategy)
    n = strategy.num_replicas_in_sync
    each_step = n * (n + 1) // 2

    def step(with_backward: bool) -> torch.Tensor:
        output = model(mine(strategy)).sum()
        if with_backward:
            output.backward()
        return model.state.clone()

    def check(expected: int) -> None:
        state = model.state_dict()
        assert state["least"].tolist() == [-n, -n]
        assert state["greatest"].item() == n
        assert state["seen"].item() == expected
        assert state["total"].tolist() == [expected, expected]
        assert state["tags"].tolist() == [1.1, 1.1]

    states = strategy.run(step, (True,))
    check(10 + each_step)
    strategy.run(step, (False,))
    check(10 + 2 * each_step)
    for with_backward in (False, False, True):
        strategy.run(step, (with_backward,))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    check(10 + 5 * each_step)
    model.seen.zero_()
    model.total = torch.zeros(2, dtype=torch.float64)
    strategy.run(step, (True,))
    check(each_step)
    model.load_state_dict(saved)
    strategy.run(step, (False,))
    check(10 + 6 * each_step)
    first = strategy.extended.first_replica_id
    for i, state in enumerate(strategy.experimental_local_results(states)):
        assert state.tolist() == [first + i + 1] * 2
    assert not [notice for notice in notices if "reduce_buffers" in notice]


def test_sums_in_a_block(one_per_rank: ms.Strategy) -> None:
    """With parts of several sizes, accumulated gradients, an evaluation, and a counter that is set back in an epoch."""
    strategy = one_per_rank
    model = ruled(strategy)
    n = strategy.num_replicas_in_sync
    each_step = n * (n + 1) // 2
    examples = torch.utils.data.TensorDataset(torch.ones(9, FEATURES, dtype=torch.float64))
    loader = strategy.prepare(torch.utils.data.DataLoader(examples, batch_size=4))
    with strategy.replica():
        for i, (x,) in enumerate(loader):
            with strategy.no_sync() if i == 1 else contextlib.nullcontext():
                model(x).sum().backward()
            if i == 0:
                model.seen.zero_()
        assert model.seen.item() == 2 * each_step
        assert model.total.tolist() == [10 + 3 * each_step] * 2
        model.total.zero_()
        with torch.no_grad():
            for (x,) in loader:
                model(x)
        assert model.seen.item() == 5 * each_step
        assert model.total.tolist() == [3 * each_step] * 2


class OfData(torch.nn.Module):
    """Buffers without a rule, and buffers that a name, a base class or an argument tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, 2)
        for name in ("seen", "steps", "greatest", "running_mean", "cache", "table"):
            saved = name != "cache"
            self.register_buffer(name, torch.tensor(0.0), persistent=saved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.steps += 1
        self.greatest.fill_(replica_id())
        self.running_mean.lerp_(x.mean(), 0.1)
        self.cache = x.sum()
        output: torch.Tensor = self.linear(x)
        return output


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("declares", [False, True])
def test_a_notice_names_buffers_without_a_rule(declares: bool, notices: list[str]) -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.replica():
        model = strategy.prepare(OfData())
        if declares:
            ms.reduce_buffers(model, seen="sum", greatest="mean")
        n = strategy.num_replicas_in_sync
        examples = torch.utils.data.TensorDataset(torch.ones(9 * n, FEATURES))
        loader = strategy.prepare(torch.utils.data.DataLoader(examples, batch_size=3 * n))
        for (x,) in loader:
            model(x).sum().backward()
    found = [notice for notice in notices if "reduce_buffers" in notice]
    assert len(found) == (strategy.is_first and not declares)
    for notice in found:
        assert "write OfData.seen, OfData.greatest from" in notice
        assert "(model, seen=…)" in notice
    assert model.seen.item() == (9 * n if declares else 9)
    assert model.steps.item() == 3


class MinMaxObserver(torch.nn.Module):
    """Has the names of torch.ao's class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(-float("inf")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.min_val.clone()
        self.min_val.copy_(torch.minimum(low, torch.tensor(-1.0 * replica_id())))
        self.max_val.copy_(torch.maximum(self.max_val, torch.tensor(1.0 * replica_id())))
        return x


class MovingAverageMinMaxObserver(MinMaxObserver):
    pass


def test_observers_of_torch_have_rules(one_per_rank: ms.Strategy, notices: list[str]) -> None:
    strategy = one_per_rank
    with strategy.scope():
        model = torch.nn.ModuleList([MinMaxObserver(), MovingAverageMinMaxObserver()])
    for _ in range(2):
        strategy.run(lambda: [observer(torch.ones(1)) for observer in model] and None)
        state = model.state_dict()
    last = strategy.num_replicas_in_sync - 1
    assert [state["0.min_val"].item(), state["0.max_val"].item()] == [-last, last]
    assert -last <= state["1.min_val"].item() <= -last / 2
    assert not notices or not any("reduce_buffers" in notice for notice in notices)


class Frozen(torch.nn.BatchNorm1d):
    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


def test_update_bn_computes_statistics_of_all_ranks(one_per_rank: ms.Strategy) -> None:
    """As on one rank, with parts of several sizes. A loader that each rank reads to its end is left alone."""
    strategy = one_per_rank
    model = torch.nn.Sequential(normalized(), torch.nn.BatchNorm1d(2), Frozen(2).train()).double()
    strategy.mirror(model)
    data = [[x, y] for (x, y), _ in zip(batches(), range(2), strict=False)]
    whole = torch.utils.data.TensorDataset(*(torch.cat(part) for part in zip(*data, strict=True)))
    plain = torch.utils.data.DataLoader(whole, batch_size=BATCH)
    alone = AveragedModel(model)
    update_bn(plain, alone)
    loader = strategy.prepare(plain)

    def check(several: Any) -> None:
        averaged = AveragedModel(model)
        update_bn(several, averaged)
        torch.testing.assert_close(dict(averaged.state_dict()), dict(alone.state_dict()))
        assert not any("forward" in vars(module) for module in averaged.modules())

    check(loader)
    with strategy.replica():
        check(loader)
        check(batch for batch in loader)
        check(plain)
        if strategy.is_first:
            check(plain)
        with pytest.raises(ZeroDivisionError):
            update_bn((1 // 0 for _ in range(1)), model)
        assert not any("forward" in vars(module) for module in model.modules())
