"""What torch trains on many ranks by itself, on the backend "mpistrat": equal to one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as distributed_checkpoint
from mpi4py import MPI
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from support.training.plain_training import (
    FEATURES,
    MOST,
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
pytestmark = pytest.mark.usefixtures("default_group")
STEPS = 3
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def train(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any] = clipped_step,
    rank: int = RANK,
    size: int = SIZE,
) -> None:
    for batch in batches(STEPS):
        step(module, optimizer, *part_of(batch, rank, size))


def test_distributed_data_parallel() -> None:
    module = network()
    # The small buckets leave one after the other while backward() runs.
    train(ddp := DistributedDataParallel(module, bucket_cap_mb=0.001), adamw(ddp))
    assert_close(whole_state(module), trained_alone(STEPS)[0])


@pytest.mark.filterwarnings("ignore")
def test_fully_sharded_data_parallel() -> None:
    def step(module: Any, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(x), y).backward()
        module.clip_grad_norm_(MOST)
        optimizer.step()

    sharded = FullyShardedDataParallel(
        network(), use_orig_params=True, device_id=torch.device("cpu")
    )
    train(sharded, adamw(sharded), step)
    with FullyShardedDataParallel.summon_full_params(sharded):
        state = {
            name.removeprefix("_fsdp_wrapped_module."): parameter.detach().clone()
            for name, parameter in sharded.named_parameters()
        }
    assert_close(state, trained_alone(STEPS)[0])


def fully_sharded(module: Any, **arguments: Any) -> Any:
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, **arguments)
    return fully_shard(module, **arguments)


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fully_shard(reshard: bool) -> None:
    module = fully_sharded(network(), reshard_after_forward=reshard)
    train(module, adamw(module))
    assert_close(whole_state(module), trained_alone(STEPS)[0])


def test_tensor_parallel() -> None:
    module = parallelize_module(network(), init_device_mesh("cpu", (SIZE,)), PLAN)
    plain = [p for p in module.parameters() if not isinstance(p, DTensor)]
    sharded = [p for p in module.parameters() if isinstance(p, DTensor)]
    optimizers = [torch.optim.AdamW(group, lr=0.05) for group in (sharded, plain)]
    alone = network()
    optimizers.append(adamw(alone))
    for x, y in batches(STEPS):
        for each in (module, alone):
            torch.nn.functional.mse_loss(each(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(whole_state(module), whole_state(alone))


@pytest.mark.mpi(min_size=4)
def test_fully_shard_and_tensor_parallel_in_a_mesh_of_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("dp", "tp"))
    module = network()
    plan = {**PLAN, "4": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(module, mesh["tp"], plan)
    fully_sharded(module, mesh=mesh["dp"])
    train(module, adamw(module), rank=mesh["dp"].get_local_rank(), size=2)
    assert_close(whole_state(module), trained_alone(STEPS)[0])


def test_meshes_have_groups_of_their_ranks() -> None:
    rows = 2 if SIZE == 4 else 1
    mesh = init_device_mesh("cpu", (rows, SIZE // rows), mesh_dim_names=("a", "b"))
    row, column = divmod(RANK, SIZE // rows)
    for name, index, ranks in (
        ("a", row, range(column, SIZE, SIZE // rows)),
        ("b", column, range(row * SIZE // rows, (row + 1) * SIZE // rows)),
    ):
        group = mesh.get_group(name)
        assert mesh.get_local_rank(name) == dist.get_rank(group) == index
        total = torch.tensor([RANK])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(ranks)


def test_dtensors_change_their_layout() -> None:
    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(42.0).view(7, 6)  # seven rows: not equally many for all
    tensor = distribute_tensor(whole + 100 * RANK, mesh, [Shard(0)])  # rank 0's values
    assert torch.equal(tensor.full_tensor(), whole)
    columns = tensor.redistribute(placements=[Shard(1)])
    parts = [*whole.chunk(SIZE, 1), whole[:, :0]]  # of six columns the last of four ranks has none
    assert torch.equal(columns.to_local(), parts[RANK])
    assert torch.equal(columns.full_tensor(), whole)
    product = tensor.t() @ tensor
    torch.testing.assert_close(product.full_tensor(), whole.t() @ whole)
    assert float(tensor.sum().full_tensor()) == float(whole.sum())


def test_checkpoints_of_torch(directory: Path) -> None:
    module = fully_sharded(network())
    train(module, adamw(module))
    distributed_checkpoint.save({"model": module.state_dict()}, checkpoint_id=directory)
    other = fully_sharded(torch.nn.Sequential(*[type(m)(*_sizes(m)) for m in network()]))
    state = {"model": other.state_dict()}
    distributed_checkpoint.load(state, checkpoint_id=directory)
    assert_close(whole_state(other), whole_state(module), most=0)


def _sizes(module: torch.nn.Module) -> list[int]:
    return [module.in_features, module.out_features] if hasattr(module, "in_features") else []


def test_ranks_with_fewer_batches_join_in() -> None:
    module = network()
    ddp = DistributedDataParallel(module)
    optimizer = adamw(ddp)
    with Join([ddp]):
        for x, y in list(batches(STEPS + RANK)):
            clipped_step(ddp, optimizer, x, y)
    mine = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    last = mine.clone()
    dist.broadcast(last, SIZE - 1)
    assert torch.equal(mine, last)


def test_the_optimizers_state_is_sharded() -> None:
    module = network()
    ddp = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.05)
    train(ddp, optimizer)
    assert_close(whole_state(module), trained_alone(STEPS)[0])
    kept = sum(len(group["params"]) for group in optimizer.optim.param_groups)
    total = torch.tensor(kept)
    dist.all_reduce(total)
    assert total == len(list(module.parameters()))


@pytest.mark.mpi(min_size=2)
def test_a_pipeline() -> None:
    layers = [
        torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.Tanh())
        for _ in range(SIZE)
    ]
    for i, layer in enumerate(layers):
        torch.nn.init.constant_(layer[0].weight, 0.1 * (i + 1))
    alone = torch.nn.Sequential(*layers)
    x = next(batches(1))[0]
    for parameter in alone.parameters():
        dist.broadcast(parameter.detach(), 0)
    torch.nn.functional.mse_loss(alone(x), torch.ones_like(x)).backward()
    expected = [p.grad.clone() for p in layers[RANK].parameters()]
    alone.zero_grad()
    stage = PipelineStage(layers[RANK], RANK, SIZE, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=3, loss_fn=torch.nn.functional.mse_loss)
    if RANK == 0:
        schedule.step(x)
    elif RANK == SIZE - 1:
        schedule.step(target=torch.ones_like(x), losses=[])
    else:
        schedule.step()
    for parameter, gradient in zip(layers[RANK].parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_collectives_in_compiled_graphs() -> None:
    mesh: DeviceMesh = init_device_mesh("cpu", (SIZE,))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = functional.all_reduce(x * 2, "sum", mesh)
        rows = functional.all_gather_tensor(x, 0, mesh)
        part = functional.reduce_scatter_tensor(rows, "sum", 0, mesh)
        return total + dist.get_world_size(), rows, part

    x = torch.full((2, 3), float(RANK + 1))
    total, rows, part = compiled(x)
    everyone = torch.arange(1.0, SIZE + 1)
    assert torch.equal(total, torch.full((2, 3), 2 * float(everyone.sum()) + SIZE))
    assert torch.equal(rows, everyone.repeat_interleave(2)[:, None].expand(-1, 3))
    assert torch.equal(part, x * SIZE)


@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")
def test_graphs_end_at_collectives_that_are_not_functional() -> None:
    @torch.compile(backend="aot_eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.broadcast(y, SIZE - 1)
        return y + 1

    assert torch.equal(compiled(torch.full((3,), float(RANK))), torch.full((3,), 2.0 * SIZE - 1))


@pytest.mark.slow
def test_a_compiled_model_in_distributed_data_parallel() -> None:
    module = network()
    ddp = DistributedDataParallel(module)
    train(torch.compile(ddp, backend="aot_eager"), adamw(ddp))
    assert_close(whole_state(module), trained_alone(STEPS)[0])
