"""Models that torch shards, trained by a strategy: equal to one process, and what is not sharded stays mirrored."""

import contextlib
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint
from mpistrat.fault_tolerance import (
    DivergenceSentinel,
    PreemptionCheckpointHandler,
    TerminationConfig,
)
from mpistrat.liveness.ending.job_end import job_end
from mpistrat.pytorch.watch.mirrored_state import mirrored_state
from support.training.plain_training import (
    EXAMPLES,
    FEATURES,
    adamw,
    assert_close,
    batches,
    clipped_step,
    network,
    part_of,
    trained_alone,
    whole_state,
)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several_ranks = pytest.mark.mpi(min_size=2)
pytestmark = pytest.mark.usefixtures("default_group")
STEPS = 4


def sharded(module: torch.nn.Sequential) -> Any:
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    return fully_shard(module)


def assert_mirrored(strategy: ms.Strategy, number: int) -> None:
    """Of the parameters that there are; one rank mirrors none."""
    made = strategy.extended.modules.made
    parameters = made.registry.parameters() if made is not None else []
    found = sum(parameter is not None for parameter in parameters)
    assert found == (number if SIZE > 1 else 0)


@pytest.mark.parametrize("where", ["in the scope", "after the scope"])
def test_a_fully_sharded_model_equals_one_process(where: str) -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = network()
        if where == "in the scope":
            optimizer = adamw(sharded(model))
    if where == "after the scope":
        optimizer = adamw(sharded(model))
    assert_mirrored(strategy, 0)

    examples = torch.utils.data.ConcatDataset(
        [torch.utils.data.TensorDataset(*batch) for batch in batches(STEPS)]
    )
    loader = torch.utils.data.DataLoader(examples, EXAMPLES)
    losses = []
    for batch in strategy.experimental_distribute_dataset(loader):
        loss = strategy.run(lambda x, y: clipped_step(model, optimizer, x, y), batch)
        losses.append(float(strategy.reduce(ms.ReduceOp.MEAN, loss, axis=None)))

    expected, expected_losses = trained_alone(STEPS)
    assert_close(whole_state(model), expected)
    assert losses == pytest.approx(expected_losses, rel=1e-5)


class Mixed(torch.nn.Module):
    """The first layer stays plain; batch norm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, FEATURES)
        self.norm = torch.nn.BatchNorm1d(FEATURES)
        self.rest = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.norm(self.first(x)))


def accumulating_step(model: Any, optimizers: list[Any], strategy: Any, x: Any, y: Any) -> None:
    """Two backwards, the first of which sends nothing of what is mirrored."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    for i, scale in enumerate((0.25, 0.75)):
        with strategy.no_sync() if i == 0 else contextlib.nullcontext():
            (scale * torch.nn.functional.mse_loss(model(x), y)).backward()
    for optimizer in optimizers:
        optimizer.step()


def test_what_is_not_sharded_stays_mirrored_and_reduced() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    with strategy.scope():
        torch.manual_seed(RANK)
        model = Mixed().eval()  # of batch norm whole batches have other statistics
    alone = Mixed().eval()
    alone.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    sharded(model.rest)
    optimizers = [adamw(model)]
    batch_of = [part_of(batch, RANK, SIZE) for batch in batches(STEPS)]
    for x, y in batch_of:
        strategy.run(lambda x, y: accumulating_step(model, optimizers, strategy, x, y), (x, y))
    optimizer = adamw(alone)
    for x, y in batches(STEPS):
        accumulating_step(alone, [optimizer], ms.get_strategy(), x, y)
    assert_close(whole_state(model), whole_state(alone))
    assert_mirrored(strategy, 4)  # of the first layer and of batch norm
    names = [thing.name for thing in mirrored_state(strategy).values()]
    assert not any("rest" in name for name in names), names
    assert any("exp_avg of Mixed.first.weight" in name for name in names) or SIZE == 1, names


def test_buffers_are_averaged_beside_sharded_parameters() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    with strategy.scope():
        model = Mixed()
    sharded(model.rest)
    x = torch.full((4, FEATURES), float(RANK)) + torch.arange(4.0)[:, None]
    strategy.run(lambda: model(x).sum().backward())
    mean = dist_mean(model.norm.running_mean)
    assert torch.equal(model.norm.running_mean, mean)


def dist_mean(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / SIZE


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tensor_parallel_equals_one_process(compiled: bool) -> None:
    """All ranks have the same examples; the last layer is plain."""
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    with strategy.scope():
        model = network()
    mesh = init_device_mesh("cpu", (SIZE,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizers = [
        torch.optim.AdamW(list(layers.parameters()), lr=0.05) for layers in (model[:4], model[4:])
    ]
    forward = torch.compile(model, backend="aot_eager") if compiled else model

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.nn.functional.mse_loss(forward(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for x, y in batches(STEPS):
        strategy.run(step, (x, y))
    alone = network()
    optimizer = adamw(alone)
    for x, y in batches(STEPS):
        torch.nn.functional.mse_loss(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(whole_state(model), whole_state(alone))
    assert_mirrored(strategy, 2)


@pytest.mark.slow
def test_a_compiled_fully_sharded_model_equals_one_process() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    with strategy.scope():
        model = network()
    optimizer = adamw(sharded(model))
    forward = torch.compile(model, backend="aot_eager")
    for batch in batches(STEPS):
        x, y = part_of(batch, RANK, SIZE)
        strategy.run(lambda x, y: clipped_step(forward, optimizer, x, y), (x, y))
    assert_close(whole_state(model), trained_alone(STEPS)[0])


def test_whole_parameters_of_a_forward_are_not_mirrored() -> None:
    """After a forward without a backward, the outermost sharded module shows plain parameters."""
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    with strategy.scope():
        model = network()
        fully_shard(model)
    with torch.no_grad():
        model(torch.ones(2, FEATURES))
    with strategy.scope():
        other = torch.nn.Linear(2, 2)
    strategy.mirror(model)
    assert_mirrored(strategy, len(list(other.parameters())))


@several_ranks
def test_strategies_that_cannot_leave_parameters_to_torch() -> None:
    for arguments, why in (
        ({"shared_parameters": True}, "shared_parameters=True"),
        ({"devices": ["cpu:0", "cpu:1"]}, "this rank has 2 replicas"),
    ):
        strategy = ms.MultiWorkerMirroredStrategy(gradients="mean", **arguments)
        with strategy.scope():
            model = network()
        optimizer = adamw(sharded(model))
        with pytest.raises(RuntimeError, match=f"is sharded over ranks.*{why}"):
            strategy.run(optimizer.step)


@several_ranks
def test_a_loss_whose_gradients_are_summed_gets_a_warning() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = network()
    optimizer = adamw(sharded(model))

    def step() -> None:
        ms.compute_average_loss(model(torch.ones(2, FEATURES)).sum(1)).backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            strategy.run(step)
    messages = [str(w.message) for w in caught if "set_gradient_divide_factor" in str(w.message)]
    assert len(messages) == (RANK == 0)


@several_ranks
def test_the_sentinel_compares_what_is_mirrored_alone() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    with strategy.scope():
        model = Mixed().eval()
    sharded(model.rest)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sentinel = DivergenceSentinel(strategy, every=1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, FEATURES) * RANK).sum().backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step)
    sentinel.check()
    with torch.no_grad():
        model.first.weight[0, 0] += RANK
    with pytest.raises(ms.errors.DivergenceError, match=r"Mixed\.first\.weight"):
        sentinel.check()


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(job_end(), "leaves_together", False)  # the tests go on
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_preempted_job_saves_its_parts(signals: None, directory: Path) -> None:
    class Left(Exception):
        pass

    def leave() -> None:
        raise Left

    def training() -> tuple[Any, Any, Any, Any]:
        strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
        with strategy.scope():
            model = network()
        optimizer = adamw(sharded(model))
        with strategy.scope():
            checkpoint = Checkpoint(model=model, optimizer=optimizer)
        config = TerminationConfig(exit_fn=leave)
        handler = PreemptionCheckpointHandler(
            strategy.cluster_resolver, checkpoint, directory, config
        )
        return strategy, model, optimizer, handler

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        strategy.run(lambda: clipped_step(model, optimizer, x, y))

    strategy, model, optimizer, handler = training()
    own = [part_of(batch, RANK, SIZE) for batch in batches(20)]
    with contextlib.suppress(Left):
        for batch in own:
            if RANK == SIZE - 1 and handler.total_run_calls == 1:
                signal.raise_signal(signal.SIGTERM)
            handler.run(step, *batch)
    left_at, state = handler.total_run_calls, whole_state(model)
    assert 1 <= left_at < len(own)
    strategy, model, optimizer, handler = training()
    assert handler.total_run_calls == left_at
    assert_close(whole_state(model), state, most=0)
    handler.run(step, *own[left_at])
    assert_close(whole_state(model), trained_alone(left_at + 1)[0])


@several_ranks
def test_optimizers_of_sharded_parameters_that_differ() -> None:
    """Sharded over all ranks: by their shapes. What torch has sharded over some ranks is theirs alone."""
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    model = sharded(network())
    parameters = list(model.parameters())
    own = parameters[::-1] if RANK == SIZE - 1 else parameters
    optimizer = torch.optim.AdamW([{"params": [p]} for p in own])
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 of AdamW .* is torch.float32\["):
        strategy.prepare(model, optimizer)
    meshes = [init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("stage", "data"))["data"]]
    stage = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(1 + RANK)])
    fully_shard(stage, mesh=meshes[0])
    strategy.prepare(stage, torch.optim.AdamW(stage.parameters()))
