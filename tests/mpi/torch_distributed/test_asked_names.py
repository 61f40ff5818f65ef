"""Under `mpistrat run`, torch answers with the backend that the program asked for, and makes groups of ours."""

import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import _init_utils
from torch.distributed.nn import functional
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from mpistrat.torch_distributed.default_backend import replace_functions
from mpistrat.torch_distributed.default_group import move_default_group
from mpistrat.torch_distributed.next_group import asked_name
from mpistrat.torch_distributed.process_group import MpistratProcessGroup

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
CPU = torch.device("cpu")
REPLACED = ("init_process_group", "get_backend", "get_backend_config", "new_group")
ALL = list(range(SIZE))


@pytest.fixture(scope="module", autouse=True)
def as_under_run() -> Iterator[None]:
    """Replace the functions that `mpistrat run` replaces, and put torch's own back at the end."""
    with pytest.MonkeyPatch.context() as patch:
        for name in REPLACED:
            original = getattr(dist, name)
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is original:
                    patch.setattr(module, name, original)
        replace_functions(keeps_backend=False)
        yield


@pytest.fixture
def asked(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The name that the program asks for, "gloo" without a parameter; and the default group that it gets."""
    name = getattr(request, "param", "gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own functions
        dist.init_process_group(name)
        yield name
        dist.destroy_process_group()


def is_ours(group: Any) -> bool:
    """Whether the group is ours, and works."""
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    return isinstance(group, MpistratProcessGroup) and int(ones) == dist.get_world_size(group)


@pytest.mark.parametrize(
    ("asked", "config"),
    [
        ("gloo", "cpu:gloo,cuda:gloo"),
        ("NCCL", "cuda:nccl"),
        ("mpi", "cpu:mpi,cuda:mpi"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("mpistrat", "cpu:mpistrat,cuda:mpistrat,xpu:mpistrat"),
        (dist.Backend.GLOO, "cpu:gloo,cuda:gloo"),
    ],
    indirect=["asked"],
)
def test_the_default_group(asked: str, config: str) -> None:
    name = asked.lower()
    world: Any = dist.group.WORLD
    assert dist.get_backend() == c10d.get_backend() == dist.get_backend(world) == name
    assert world.name() == name
    assert dist.get_backend_config() == config
    assert (dist.get_backend() is dist.Backend.GLOO) is (name == "gloo")
    for backend in (None, dist.get_backend(), "gloo", "cpu:gloo,cuda:nccl", "mpistrat"):
        group = dist.new_group(backend=backend)
        assert is_ours(group)
        assert dist.get_backend(group) == (backend or name)


@pytest.mark.parametrize("asked", [None], indirect=True)
def test_no_backend(asked: None) -> None:
    """torch's own answer is "undefined"; programs that test the name know only the names of backends."""
    default = torch.accelerator.current_accelerator(check_available=True) or CPU
    assert dist.get_backend() == dist.get_default_backend_for_device(default)
    assert is_ours(dist.new_group(backend=dist.get_backend()))


def test_what_needs_no_group() -> None:
    assert dist.is_gloo_available()
    assert dist.is_backend_available("gloo")
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    assert dist.get_default_backend_for_device("cuda") == "nccl"


@pytest.mark.usefixtures("asked")
def test_groups_of_some_ranks() -> None:
    first = dist.new_group([0], backend="nccl")
    if RANK == 0:
        assert is_ours(first)
        assert dist.get_backend(first) == "nccl"
    else:
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.get_backend(first)
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.get_backend_config(first)


@pytest.mark.usefixtures("asked")
def test_groups_that_torch_makes() -> None:
    make = dist.device_mesh.init_device_mesh
    mesh = make("cpu", (1, SIZE), mesh_dim_names=("a", "b"))
    groups = [
        *mesh.get_all_groups(),
        dist.new_subgroups(1)[0],
        dist.new_subgroups_by_enumeration([[rank] for rank in ALL], backend="gloo")[0],
        _init_utils._init_inter_node_process_group(dist.group.WORLD, 1),  # of FSDP's hybrid shards
        c10d._find_or_create_pg_by_ranks_and_tag("", ALL, SIZE),  # of functional collectives
    ]
    assert all(is_ours(group) for group in groups)
    assert {dist.get_backend(group) for group in groups} == {"gloo"}
    # As gloo's: torch splits groups of NCCL only.
    with pytest.raises(RuntimeError, match="not safe to split"):
        dist.split_group(split_ranks=[ALL])


def test_a_program_that_chooses_another_backend() -> None:
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=RANK, world_size=SIZE)
    assert dist.get_backend() == "fake"
    assert dist.get_backend(dist.new_group()) == "fake"
    dist.destroy_process_group()


@pytest.mark.usefixtures("asked")
def test_a_helper_that_wraps_for_known_names_only() -> None:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(2, 1)
    if dist.get_backend() in ("nccl", "gloo", "mpi"):
        model = DistributedDataParallel(model)
    model(torch.full((1, 2), float(RANK))).sum().backward()
    for parameter in model.parameters():
        mean = 1.0 if parameter.dim() == 1 else sum(ALL) / SIZE
        assert torch.allclose(parameter.grad, torch.full_like(parameter, mean))


# torch's own functions that compare the name.


@pytest.mark.parametrize("asked", ["gloo", "nccl"], indirect=True)
@pytest.mark.usefixtures("asked")
def test_monitored_barrier() -> None:
    dist.monitored_barrier()
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo, timeout=timedelta(seconds=60), wait_all_ranks=True)


@pytest.mark.usefixtures("asked")
def test_steps_of_sharded_optimizers_in_hooks_are_not_refused() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    assert callable(hook_with_zero_step(allreduce_hook, model, optimizer))


@pytest.mark.parametrize("asked", ["gloo", "nccl"], indirect=True)
@pytest.mark.usefixtures("asked")
def test_differentiable_collectives() -> None:
    leaf = torch.ones(2, 3, requires_grad=True)
    weights = torch.arange(6.0).reshape(3, 2)
    gathered = functional._all_gather_base(torch.empty(2 * SIZE, 3), leaf)
    (gathered.reshape(SIZE, 2, 3) * torch.arange(SIZE).reshape(SIZE, 1, 1)).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((2, 3), float(RANK * SIZE)))
    leaf.grad = None
    torch.stack(
        [(part.t() * weights).sum() for part in functional.all_gather(leaf)]
    ).sum().backward()
    assert torch.equal(leaf.grad, weights.t() * SIZE)
    tensors = [torch.full((2,), float(rank), requires_grad=True) for rank in ALL]
    received = functional.all_to_all([torch.empty(2) for _ in ALL], tensors)
    torch.stack([(rank + 1) * part.sum() for rank, part in enumerate(received)]).sum().backward()
    assert all(part.tolist() == [RANK, RANK] for part in received)
    assert all(tensor.grad.tolist() == [RANK + 1, RANK + 1] for tensor in tensors)


@pytest.mark.parametrize("asked", ["nccl"], indirect=True)
@pytest.mark.usefixtures("asked")
def test_nobody_uses_cuda_for_the_name_of_nccl() -> None:
    """torch would do so after an error of a call, in the profiler, and to debug. Without CUDA that is an error."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    received = [None] * SIZE
    dist.all_gather_object(received, RANK)
    dist.set_debug_level(level)
    assert received == ALL
    with pytest.raises(ValueError, match="different dtypes"):
        dist.all_gather([torch.ones(1)], torch.ones(1, dtype=torch.int64))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_ours(dist.group.WORLD)


@pytest.mark.usefixtures("asked")
def test_the_device_of_a_tensor_without_shards() -> None:
    """It is the CPU by the name alone."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    tensor = sharded_tensor.ones(ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in ALL]), 1, 2)
    assert (tensor.device, tensor._get_preferred_device()) == (CPU, CPU)


@pytest.mark.mpi(min_size=3)
@pytest.mark.usefixtures("asked")
def test_inside_a_compiled_function() -> None:
    @torch.compile(backend="eager")
    def longer(tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return tensor + len(dist.get_backend()) + len(dist.get_backend(group))

    group = dist.new_group(backend="mpi")
    assert longer(torch.zeros(1), group).item() == len("gloo") + len("mpi")


@pytest.mark.usefixtures("asked")
def test_a_group_that_is_made_anew_keeps_the_name() -> None:
    """As after the loss of a rank."""
    move_default_group(MPI.COMM_WORLD, again=asked_name())
    assert dist.get_backend() == "gloo"
    assert is_ours(dist.group.WORLD)
