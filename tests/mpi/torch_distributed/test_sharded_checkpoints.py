"""Checkpoints of models that torch shards: each rank writes its parts, which any number of ranks and any mesh reads."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager
from mpistrat.checkpoint.manifest import read_manifest, sealed
from support.rank_errors import errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
several_ranks = pytest.mark.mpi(min_size=2)
pytestmark = pytest.mark.usefixtures("default_group")

Layout = Callable[[torch.nn.Sequential], None]


class Training:
    """A model on the first `ranks` ranks, spread over them by `layout`, with an optimizer that has stepped.

    `comm` is None on the other ranks, which have no part in it.
    """

    def __init__(self, ranks: int, layout: Layout, steps: int = 1, seed: int = 0) -> None:
        self.comm = WORLD.Split(0 if ranks > RANK else MPI.UNDEFINED)
        if self.comm == MPI.COMM_NULL:
            return
        self.strategy = ms.MultiWorkerMirroredStrategy(comm=self.comm, gradients="mean")
        torch.manual_seed(seed)
        with self.strategy.scope():
            self.model = torch.nn.Sequential(
                torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 5)
            )
        layout(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for step in range(steps):
            for i, parameter in enumerate(self.model.parameters()):
                parameter.grad = torch.zeros_like(parameter) + (step + i + 1)
            self.optimizer.step()
        with self.strategy.scope():
            self.checkpoint = Checkpoint(model=self.model, optimizer=self.optimizer)

    def values(self) -> dict[str, torch.Tensor]:
        """All values, whole."""
        found = dict(_whole("model", self.model.state_dict()))
        return found | dict(_whole("optimizer", self.optimizer.state_dict()["state"]))


def _whole(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _whole(f"{path}.{key}", inner)
    else:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        yield path, whole.detach().clone()


def mesh_of(*shape: int) -> DeviceMesh:
    """Over the first ranks. Called by: all."""
    names = ("dp", "tp")[-len(shape) :]
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def fsdp(mesh: DeviceMesh) -> Layout:
    def layout(model: torch.nn.Sequential) -> None:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)

    return layout


def tensor_parallel(mesh: DeviceMesh) -> Layout:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return lambda model: parallelize_module(model, mesh, plan)


def both(mesh: DeviceMesh) -> Layout:
    def layout(model: torch.nn.Sequential) -> None:
        tensor_parallel(mesh["tp"])(model)
        fsdp(mesh["dp"])(model)

    return layout


def plain(model: torch.nn.Sequential) -> None:
    pass


def layouts() -> dict[str, tuple[int, Layout]]:
    """By name: how many ranks take part, and how. Called by: all, for meshes are made."""
    found: dict[str, tuple[int, Layout]] = {"plain on 1": (1, plain)}
    for ranks in range(1, SIZE + 1):
        found[f"fsdp on {ranks}"] = ranks, fsdp(mesh_of(ranks))
    found["tensor parallel"] = SIZE, tensor_parallel(mesh_of(SIZE))
    if SIZE >= 2:
        found["replicated and sharded"] = 2, fsdp(mesh_of(2, 1))
    if SIZE == 4:
        found["2-D"] = 4, both(mesh_of(2, 2))
    return found


@pytest.fixture(scope="module")
def known(default_group: None) -> dict[str, tuple[int, Layout]]:
    return layouts()


def check_moves(directory: Path, known: dict[str, tuple[int, Layout]], names: list[str]) -> None:
    """From each layout to the next: what the first one saved is what the next one has."""
    expected: dict[str, torch.Tensor] = {}
    for i, name in enumerate(names):
        training = Training(*known[name], steps=0 if i else 2, seed=i)
        if training.comm != MPI.COMM_NULL:
            manager = CheckpointManager(training.checkpoint, directory)
            if i:
                assert manager.restore_or_initialize() is not None
            values = training.values()
            if i:
                assert_equal(values, expected)
            expected = values
            manager.save(i, wait=False)
            manager.wait()
        expected = WORLD.bcast(expected)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def test_from_any_mesh_to_any_other(known: dict[str, tuple[int, Layout]], directory: Path) -> None:
    names = [f"fsdp on {min(SIZE, 2)}", f"fsdp on {SIZE}", "tensor parallel", "plain on 1"]
    names += [name for name in ("2-D", "replicated and sharded") if name in known]
    check_moves(directory, known, [*names, f"fsdp on {SIZE}"])


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_all_pairs(known: dict[str, tuple[int, Layout]], directory: Path) -> None:
    for first in known:
        for second in known:
            check_moves(
                directory / f"{first} to {second}".replace(" ", "-"), known, [first, second]
            )


def test_each_rank_writes_its_part_alone(
    known: dict[str, tuple[int, Layout]], directory: Path
) -> None:
    training = Training(*known[f"fsdp on {SIZE}"])
    checkpoint = Checkpoint(model=training.model, optimizer=training.optimizer)
    assert SIZE == 1 or checkpoint.strategy is training.strategy
    path = Path(CheckpointManager(checkpoint, directory).save(3))
    files = read_manifest(str(path)).files
    weights = sum(p.numel() * 4 for p in training.model.parameters())
    parts = [files[f"rank-{rank:05}-parts.safetensors"][0] for rank in range(SIZE)]
    assert "model.safetensors" not in files
    assert files["optimizer.safetensors"][0] < 1000  # counters of steps
    assert 3 * weights <= sum(parts) < 3 * weights + 4000 * SIZE  # with AdamW's two moments
    assert max(parts) < 3 * weights / SIZE + 4000
    tree = json.loads((path / "state.json").read_text())["model"]["dict"]["0.weight"]
    assert tree == {"sharded": "0.weight", "shape": [12, 6], "dtype": "float32"}


@several_ranks
def test_what_is_replicated_is_written_once(
    known: dict[str, tuple[int, Layout]], directory: Path
) -> None:
    training = Training(*known["tensor parallel"])
    path = CheckpointManager(training.checkpoint, directory).save(3)
    parts = json.loads(Path(path, f"rank-{RANK:05}-parts.json").read_text())["dict"]["model"]
    assert ("2.bias" in parts["dict"]) == (RANK == 0)
    assert parts["dict"]["0.bias"]["dict"]["offset"] == [12 // SIZE * RANK]


@several_ranks
def test_a_checkpoint_with_a_damaged_part_is_passed_over(
    known: dict[str, tuple[int, Layout]], directory: Path
) -> None:
    training = Training(*known[f"fsdp on {SIZE}"])
    manager = CheckpointManager(training.checkpoint, directory)
    first = manager.save(1)
    second = Path(manager.save(2))
    name = f"rank-{SIZE - 1:05}-parts.safetensors"
    if RANK == 0:
        content = bytearray((second / name).read_bytes())
        content[-1] ^= 1
        (second / name).write_bytes(content)
    WORLD.Barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert manager.restore_or_initialize() == first
    assert [name in str(warning.message) for warning in caught] == [True] * (RANK == 0)
    errors = errors_of_ranks(lambda: manager.restore(second))
    assert all(f"{name} is damaged" in message for _, message, _ in errors), errors


@several_ranks
def test_a_checkpoint_without_a_part_is_refused_before_anything_is_loaded(
    known: dict[str, tuple[int, Layout]], directory: Path
) -> None:
    training = Training(*known[f"fsdp on {SIZE}"])
    manager = CheckpointManager(training.checkpoint, directory)
    path = Path(manager.save(1))
    if RANK == 0:
        content = json.loads((path / "manifest.json").read_text())["content"]
        for end in ("json", "safetensors"):
            del content["files"][f"rank-{SIZE - 1:05}-parts.{end}"]
        (path / "manifest.json").write_bytes(sealed(content))
    WORLD.Barrier()
    other = Training(*known[f"fsdp on {SIZE}"], seed=1)
    before = other.values()
    manager = CheckpointManager(other.checkpoint, directory)
    errors = errors_of_ranks(lambda: manager.restore(path))
    assert any("no rank has saved all of " in message for _, message, _ in errors), errors
    assert all(name for name, _, _ in errors), errors
    assert_equal(other.values(), before)


def test_other_objects_have_sharded_tensors_too(
    known: dict[str, tuple[int, Layout]], directory: Path
) -> None:
    class Holder:
        def __init__(self, value: float) -> None:
            mesh = mesh_of(SIZE)
            whole = torch.full((5, 2), value)
            self.state = {
                "a": {"b": distribute_tensor(whole, mesh, [Shard(0)])},
                "a.b": (distribute_tensor(whole + 1, mesh, [Shard(1)]), 3),
                "same": distribute_tensor(whole + 2, mesh, [Replicate()]),
            }

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    with ms.MultiWorkerMirroredStrategy().scope():
        holder = Holder(1.0)
        manager = CheckpointManager(Checkpoint(holder=holder), directory)
        manager.save(1)
        holder.state = Holder(5.0).state
        manager.restore_or_initialize()
    found = holder.state
    assert found["a.b"][1] == 3
    assert found["a"]["b"].placements == (Shard(0),)
    for value, tensor in ((1, found["a"]["b"]), (2, found["a.b"][0]), (3, found["same"])):
        assert torch.equal(tensor.full_tensor(), torch.full((5, 2), float(value)))
