"""What torch and its libraries ask of a group is answered as by gloo's."""

import datetime
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

CPU = torch.device("cpu")
# Of gloo alone; and what its groups say for themselves.
ITS_OWN = {"backend", "options", "supports_splitting"}
RECORDED = "recorded"


class Recording:
    """Stands around a group of gloo's, or its backend, and notes in `asked` the kind, the name and the answer."""

    asked: dict[tuple[str, str], Any]

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        value = getattr(own["inner"], name)
        if not callable(value):
            own["asked"][own["kind"], name] = value
            return Part(value, name, own["asked"]) if name == "options" else value

        # Of Python: torch takes its own functions for those that are not replaced.
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = value(*args, **kwargs)
            own["asked"][own["kind"], name] = None if args or kwargs else answer
            return Part(answer, "backend", own["asked"]) if name == "_get_backend" else answer

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "__dict__")["inner"], name, value)


class Part(Recording):
    def __init__(self, inner: Any, kind: str, asked: dict[tuple[str, str], Any]) -> None:
        self.__dict__.update(inner=inner, kind=kind, asked=asked)


class Group(Recording, dist.ProcessGroup):  # type: ignore[misc]
    def __init__(self, inner: Any, asked: dict[tuple[str, str], Any]) -> None:
        dist.ProcessGroup.__init__(self, inner.rank(), inner.size())  # type: ignore[call-arg]
        self.__dict__.update(inner=inner, kind="group", asked=asked)


def recorded(program: Any) -> dict[tuple[str, str], Any]:
    """What `program` asks of a group of one rank, and gloo's answers."""
    asked: dict[tuple[str, str], Any] = {}

    def create(options: Any, _: Any) -> Group:
        of_group = options.store, options.group_rank, options.group_size
        inner = dist.ProcessGroup(*of_group)
        gloo = dist.ProcessGroupGloo(*of_group, options.timeout)
        for device in ("cpu", "cuda"):
            inner._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
        inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return Group(inner, asked)

    dist.Backend.register_backend(RECORDED, create, extended_api=True, devices=["cpu"])
    dist.init_process_group(RECORDED, store=dist.HashStore(), rank=0, world_size=1)
    try:
        program()
    finally:
        dist.destroy_process_group()
    return asked


def train_and_save(folder: Path) -> None:
    """DDP, FSDP2, DTensor, checkpoints, and what `torch.distributed` itself asks."""
    torch.manual_seed(0)
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    wrapped(torch.ones(2, 4)).sum().backward()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("a",))
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, device="meta")
    for module in (model, other):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    parameters = get_model_state_dict(model, options=whole)
    moments = get_optimizer_state_dict(model, optimizer, options=whole)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, parameters, options=from_rank_0)
    set_optimizer_state_dict(model, optimizer, moments, options=from_rank_0)
    assert torch.equal(other.weight.full_tensor(), model.weight.full_tensor())  # type: ignore[operator]
    saved = {"model": get_model_state_dict(model)}
    dcp.save(saved, checkpoint_id=folder)
    dcp.load(saved, checkpoint_id=folder)
    rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    (rows @ rows.redistribute(mesh, [Replicate()])).full_tensor()
    for group in (dist.group.WORLD, dist.new_group()):
        assert isinstance(group, dist.ProcessGroup)
        dist.all_gather_object([None] * dist.get_world_size(), 1, group)
        assert c10d._get_pg_default_device(group) == CPU
        assert c10d._get_object_coll_device(group) == "cpu"
        assert {"cpu", "cuda"} <= set(c10d._device_capability(group))
        dist.get_backend_config(group)
        with dist._coalescing_manager(group):
            dist.all_reduce(torch.ones(2), group=group)
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", group))
        backend: Any = group._get_backend(CPU)
        assert backend.options._timeout == datetime.timedelta(minutes=30)
        # torch 2.9 has neither.
        assert not getattr(backend, "supports_shrinking", False)
        assert not backend.supports_tensor_alloc(CPU)
        for name in ("backend", "global_ranks_in_group", "group_name"):
            getattr(backend.options, name)
        group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        group._set_sequence_number_for_group()
        assert not getattr(group, "use_pg_for_symm_mem_rendezvous", False)
        assert isinstance(group.get_group_store(), dist.Store)
    dist.barrier()


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what it asks itself
        yield


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("quiet")
def test_as_gloo_answers(tmp_path: Path) -> None:
    asked = recorded(lambda: train_and_save(tmp_path / "gloo"))
    assert len(asked) > 20
    dist.init_process_group("mpistrat", init_method="mpi://")
    try:
        folder = [tmp_path / "ours"]
        dist.broadcast_object_list(folder, 0)
        train_and_save(folder[0])
        group: Any = dist.group.WORLD
        of = {"group": group, "backend": group._get_backend(CPU)}
        of["options"] = of["backend"].options
        for (kind, name), answer in asked.items():
            ours = getattr(of[kind], name)
            if not callable(ours) and name not in ITS_OWN:
                assert isinstance(ours, type(answer)), name
                if isinstance(answer, (bool, datetime.timedelta)):
                    assert ours == answer, name
    finally:
        dist.destroy_process_group()
