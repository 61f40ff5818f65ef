"""`torch.compile` of models, losses and steps: the numbers of eager steps, and each gradient is reduced."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import config
from torch._dynamo.utils import counters

import mpistrat as ms
from support.training.whole_batch import (
    BATCH,
    FEATURES,
    Pair,
    assert_same_parameters,
    batches,
    build,
    equal_on_all_ranks,
    in_run,
    loss_of,
    own,
    plain_step,
    small_net,
)

pytestmark = [
    pytest.mark.time_limit(120),
]

WAYS: dict[str, dict[str, Any]] = {
    "k1": {},
    "k2": {"devices": ["cpu:0", "cpu:1"]},
    "shared": {"shared_parameters": True},
    "overlap": {"communication_options": ms.CommunicationOptions(overlap=True, bytes_per_pack=1)},
    "deterministic": {"deterministic": True},
}


def ways(*usual: str) -> pytest.MarkDecorator:
    """A test for each of WAYS, of which only some are usual."""
    params = [pytest.param(w, marks=() if w in usual else pytest.mark.slow) for w in WAYS]
    return pytest.mark.parametrize("way", params)


def strategy_of(way: str) -> ms.Strategy:
    return ms.MultiWorkerMirroredStrategy(gradients="sum", **WAYS[way])


class Graphs:
    """A backend that runs graphs as they are, and keeps where their operations stand in the program."""

    def __init__(self) -> None:
        self.count = 0
        self.places: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.count += 1
        self.places += [node.stack_trace or "" for node in graph.graph.nodes]
        return graph.forward

    def compile(self, function: Any, **options: Any) -> Any:
        return torch.compile(function, backend=self, **options)

    def are_of(self, file: str) -> bool:
        """Whether an operation stands in `file` of the package, or was called from there."""
        return any(f"/mpistrat/{file}" in place for place in self.places)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def breaks() -> Counter[str]:
    return Counter({reason.split("\n")[0]: n for reason, n in counters["graph_break"].items()})


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def with_batch_norm() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)
    )


@ways("k1", "k2", "shared")
def test_a_compiled_step(way: str) -> None:
    """With a collective of the program's own in it."""
    strategy, graphs = strategy_of(way), Graphs()
    pair = Pair(strategy)
    losses: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []

    @graphs.compile
    def compiled(model: Any, optimizer: Any, x: Any, y: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        summed: torch.Tensor = ms.get_replica_context().all_reduce("sum", loss.detach())
        return 2 * summed

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        if in_run():
            losses.append(compiled(model, optimizer, x, y))
        else:
            replicas = strategy.extended.num_local_replicas
            expected.extend([2 * loss_of(model(x), y).detach()] * replicas)
            plain_step(model, optimizer, x, y)

    pair.train(step, steps=4)
    assert graphs.places
    assert not graphs.are_of("")
    torch.testing.assert_close(losses, expected)


def warnings_of(step: Callable[[], Any]) -> list[str]:
    """What three steps warn of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            step()
    return [str(warning.message) for warning in found]


def test_no_more_graphs_breaks_and_warnings_than_torch_alone_has(one_per_rank: ms.Strategy) -> None:
    pair, mine, theirs = Pair(one_per_rank, optimizer=adam), Graphs(), Graphs()
    x, y = next(pair.batches)
    compiled = theirs.compile(plain_step)
    of_torch = warnings_of(lambda: compiled(pair.alone, pair.optimizer_alone, x, y))
    alone = breaks()
    counters.clear()
    step, arguments = mine.compile(plain_step), (pair.model, pair.optimizer, x, y)
    ours = warnings_of(lambda: one_per_rank.run(step, arguments))
    assert mine.count == theirs.count
    assert 0 < breaks().total() <= alone.total(), (breaks(), alone)
    assert len(ours) <= len(of_torch), (ours, of_torch)


@ways()
def test_gradients_that_accumulate_in_a_compiled_step(way: str) -> None:
    strategy, graphs = strategy_of(way), Graphs()

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        if in_run():
            with strategy.no_sync():
                loss_of(model(x), y).backward()
        else:
            loss_of(model(x), y).backward()
        (2 * loss_of(model(x), y)).backward()
        optimizer.step()

    compiled = graphs.compile(step)
    Pair(strategy).train(lambda *args: compiled(*args) if in_run() else step(*args))
    assert graphs.places
    assert not graphs.are_of("")


@ways("k1", "k2")
def test_a_model_and_a_loss_are_whole_graphs(way: str) -> None:
    """Buffers that the forward writes are each replica's own in them, too."""
    strategy, graphs = ms.MultiWorkerMirroredStrategy(**WAYS[way]), Graphs()
    model = build(strategy, with_batch_norm)
    eager = copy.deepcopy(model)
    strategy.mirror(eager)

    def loss_of_replica(output: Any, target: Any) -> Any:
        losses = (output - target).square().mean(1)
        loss = ms.compute_average_loss(losses, global_batch_size=BATCH)
        return loss + ms.scale_regularization_loss(output.square())

    calls = {
        model: (
            graphs.compile(model, fullgraph=True),
            graphs.compile(loss_of_replica, fullgraph=True),
        ),
        eager: (eager, loss_of_replica),
    }
    optimizers = {net: adam(net.parameters()) for net in calls}

    def step(x: Any, y: Any) -> None:
        for net, (forward, loss) in calls.items():
            optimizers[net].zero_grad()
            loss(forward(own(x)), own(y)).backward()
            optimizers[net].step()

    for _, (x, y) in zip(range(4), batches(), strict=False):
        strategy.run(step, (x.repeat(8, 1), y.repeat(8, 1)))
        assert_same_parameters(model, eager)
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert graphs.count >= 2
    assert not breaks()
    if strategy.num_replicas_in_sync > 1:
        assert (
            "the sum of gradients, decided by compute_average_loss" in strategy.extended.explain()
        )


def test_a_model_that_is_compiled_in_the_scope(one_per_rank: ms.Strategy) -> None:
    graphs = Graphs()
    compiled = build(one_per_rank, lambda: graphs.compile(small_net(), fullgraph=True))
    alone = copy.deepcopy(compiled._orig_mod)
    x, y = next(batches())
    one_per_rank.run(lambda: loss_of(compiled(own(x)), own(y)).backward())
    loss_of(alone(x), y).backward()
    assert graphs.count == 1
    assert_same_parameters(compiled._orig_mod, alone)


@pytest.mark.mpi(min_size=2)
def test_a_graph_does_not_write_gradients_itself(one_per_rank: ms.Strategy) -> None:
    """With `trace_autograd_ops` it would, and call neither backward() nor hooks: ranks would differ."""
    if not hasattr(config, "trace_autograd_ops"):
        pytest.skip("torch has no trace_autograd_ops")
    pair, graphs = Pair(one_per_rank), Graphs()

    def backward(model: Any, x: Any, y: Any) -> None:
        loss_of(model(x), y).backward()

    broken, whole = graphs.compile(backward), graphs.compile(backward, fullgraph=True)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        (broken if in_run() else backward)(model, x, y)
        optimizer.step()

    with config.patch(trace_autograd_ops=True):
        pair.train(step)
        x, y = next(pair.batches)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="would not reduce its gradients"):
            one_per_rank.run(whole, (pair.model, x, y))
    assert graphs.places


@pytest.mark.mpi(min_size=2)
@ways("k1")
def test_compiled_autograd(way: str) -> None:
    strategy, graphs = strategy_of(way), Graphs()
    pair, compiled = Pair(strategy), graphs.compile(plain_step)
    with config.patch(compiled_autograd=True):
        pair.train(lambda *args: (compiled if in_run() else plain_step)(*args), steps=4)
        with pytest.raises(RuntimeError, match="outside run reached a mirrored parameter"):
            compiled(pair.model, pair.optimizer, *next(pair.batches))


@ways("k2")
def test_strategies_and_variables_are_left_alone(way: str) -> None:
    strategy, graphs = strategy_of(way), Graphs()
    with strategy.scope():
        total = ms.Variable(torch.zeros(()), aggregation=ms.VariableAggregation.SUM)

    def step(x: torch.Tensor) -> torch.Tensor:
        context = ms.get_replica_context()
        total.assign_add(x)
        y = context.merge_call(lambda _, value: value, (x + 1,))
        gathered: torch.Tensor = context.all_gather(y[None], axis=0)
        return gathered + context.replica_id_in_sync_group

    def outside(x: torch.Tensor) -> Any:
        return 2 * strategy.reduce("sum", strategy.run(step, (x * 2,)), axis=None)

    ones, replicas = torch.ones(()), strategy.num_replicas_in_sync
    compiled = graphs.compile(outside)(ones)
    torch.testing.assert_close(compiled, outside(ones))
    assert total.numpy() == 4 * replicas
    results = strategy.experimental_local_results(strategy.run(graphs.compile(step), (ones,)))
    assert total.numpy() == 5 * replicas
    assert [len(result) for result in results] == [replicas] * len(results)
    assert graphs.places
    assert not graphs.are_of("")


def test_a_distributed_dataset_in_a_compiled_epoch(one_per_rank: ms.Strategy) -> None:
    graphs = Graphs()
    dataset = one_per_rank.experimental_distribute_dataset(
        ms.input.BatchedDataset((torch.arange(24.0),), 12)
    )

    def epoch() -> Any:
        total = torch.zeros(())
        for (batch,) in dataset:
            total = total + batch.sum()
        return total

    expected = epoch()
    assert graphs.compile(epoch)() == expected
    assert not graphs.are_of("")


@pytest.mark.slow
def test_batch_norm_over_all_replicas_in_a_compiled_model(one_per_rank: ms.Strategy) -> None:
    graphs = Graphs()
    model = build(one_per_rank, lambda: ms.convert_sync_batchnorm(with_batch_norm()))
    alone = copy.deepcopy(model)
    compiled = graphs.compile(model)
    x, y = next(batches())
    one_per_rank.run(lambda: loss_of(compiled(own(x)), own(y)).backward())
    loss_of(alone(x), y).backward()
    assert_same_parameters(model, alone)
    assert graphs.count
    assert equal_on_all_ranks(one_per_rank, model[1].running_var)


def test_a_guess_of_the_batch_s_size_where_parts_differ(
    one_per_rank: ms.Strategy, notices: list[str]
) -> None:
    """The first rank says that parts count alike."""
    average = torch.compile(ms.compute_average_loss, backend="eager")
    size = 16 * one_per_rank.num_replicas_in_sync + 1
    one_per_rank.run(lambda: average(one_per_rank.shard(torch.ones(size)).requires_grad_()))
    assert len(notices) == (one_per_rank.is_first and one_per_rank.num_replicas_in_sync > 1)
