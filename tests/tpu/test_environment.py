"""What the XLA strategy takes for granted of torch_xla: a release that changes any of it fails here first."""

from pathlib import Path

import pytest

from support.xla.child_programs import Child, answer

DEVICES = """
import json, torch, torch_xla
import torch_xla.runtime as xr
devices = [torch_xla.device(i) for i in range(xr.addressable_device_count())]
values = [torch.full((3,), i + 1.0).to(device) * 2 for i, device in enumerate(devices)]
torch_xla.sync()
print(json.dumps({
    "type": xr.device_type(),
    "devices": [str(value.device) for value in values],
    "sums": [value.sum().item() for value in values],
}))
"""

SHARDED = """
import json, numpy, torch, torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xr
xr.use_spmd()
mesh = spmd.Mesh(numpy.arange(4), (2, 2), ("rows", "columns"))
left, right = torch.arange(32.0).reshape(8, 4), torch.arange(24.0).reshape(4, 6)
sharded = spmd.mark_sharding(left.to("xla"), mesh, ("rows", "columns"))
shards = [[shard.data.shape, shard.data.flatten()[0].item()] for shard in sharded.local_shards]
product = sharded.global_tensor @ right.to("xla")
print(json.dumps({
    "devices": xr.global_runtime_device_count(),
    "shards": shards,
    "sum": product.sum().item(),
    "expected": (left @ right).sum().item(),
}))
"""

ACROSS_RANKS = """
import json, torch, torch_xla
import torch_xla.core.xla_model as xm, torch_xla.runtime as xr
mine = torch.full((3,), {operand}, device="xla")
summed = xm.all_reduce(xm.REDUCE_SUM, mine)
torch_xla.sync()
print(json.dumps({{"world": xr.world_size(), "ordinal": xr.global_ordinal(), "sum": summed.tolist()}}))
"""

PROCESS_GROUP = """
import json, torch, torch_xla
import torch.distributed as dist
import torch_xla.distributed.xla_backend
dist.init_process_group("xla", init_method="file://{store}", rank={rank}, world_size=2)
value = torch.full((3,), 1.0 + dist.get_rank(), device="xla")
dist.all_reduce(value)
print(json.dumps({{"world": dist.get_world_size(), "sum": value.tolist()}}), flush=True)
"""


def test_torch_and_torch_xla_are_of_the_same_minor_release() -> None:
    import torch
    import torch_xla

    minors = [module.__version__.split(".")[:2] for module in (torch, torch_xla)]
    assert minors[0] == minors[1]


def test_the_cpu_device_answers() -> None:
    assert answer(DEVICES) == {"type": "CPU", "devices": ["xla:0"], "sums": [6.0]}


def test_four_virtual_devices_in_one_process() -> None:
    assert answer(DEVICES, CPU_NUM_DEVICES="4") == {
        "type": "CPU",
        "devices": ["xla:0", "xla:1", "xla:2", "xla:3"],
        "sums": [6.0, 12.0, 18.0, 24.0],
    }


def test_sharded_over_virtual_devices_a_product_is_right() -> None:
    """SPMD reduces inside XLA over one process's devices, its CPU devices too."""
    answers = answer(SHARDED, CPU_NUM_DEVICES="4")
    assert answers["devices"] == 4
    assert answers["shards"] == [[[4, 2], first] for first in (0.0, 2.0, 16.0, 18.0)]
    assert answers["sum"] == answers["expected"]


def test_a_process_group_of_cpu_devices_reduces_nothing(tmp_path: Path) -> None:
    """It says that there are two, and each keeps its own operand without an error: results must be probed."""
    programs = [PROCESS_GROUP.format(store=tmp_path / "store", rank=rank) for rank in (0, 1)]
    with Child(programs[0]) as first, Child(programs[1]) as second:
        assert first.answer() == {"world": 2, "sum": [1.0] * 3}
        assert second.answer() == {"world": 2, "sum": [2.0] * 3}


@pytest.mark.mpi
def test_ranks_are_strangers_to_torch_xla() -> None:
    """Each takes its CPU device for the whole world: what crosses ranks there goes over MPI."""
    from mpi4py import MPI

    operand = 1.0 + MPI.COMM_WORLD.rank
    answers = answer(ACROSS_RANKS.format(operand=operand))
    assert answers == {"world": 1, "ordinal": 0, "sum": [operand] * 3}
