"""What a program written for torchrun finds and may ask for, under `mpistrat run` on two ranks of one node."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import init_process_group

folder = Path(sys.argv[1])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def adds_up(group: dist.ProcessGroup | None = None) -> None:
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value, group=group)
    assert value.item() == 3.0


def is_ours(group: dist.ProcessGroup) -> bool:
    return type(group).__name__ == "MpistratProcessGroup"


def refused(**arguments: int) -> str:
    try:
        init_process_group("gloo", **arguments)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"init_process_group took {arguments}")


assert (__name__, Path(sys.path[0])) == ("__main__", Path(__file__).parent)
assert size == 2
assert int(os.environ["LOCAL_RANK"]) == rank
assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
assert dist.is_torchelastic_launched()
assert "got world_size=3, but MPI has world_size=2" in refused(world_size=3)
assert f"got rank={1 - rank}, but MPI has rank={rank}" in refused(rank=1 - rank)

for arguments in (
    {},
    {"backend": "gloo", "init_method": "env://", "rank": rank, "world_size": size},
    {"backend": "nccl", "init_method": "tcp://203.0.113.1:1", "rank": rank, "world_size": size},
    {"backend": "mpi"},
    {"backend": "cpu:gloo,cuda:nccl", "init_method": f"file://{folder}/never"},
    {"backend": "cpu:gloo", "rank": rank, "world_size": size}
    | {"store": dist.FileStore(str(folder / "own"), size)},
):
    init_process_group(**arguments, timeout=timedelta(seconds=77))
    asked = arguments.get("backend", "gloo")
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == (asked, rank, size)
    assert is_ours(dist.group.WORLD)
    assert dist.group.WORLD.communicator.contract.watch.timeout == 77
    adds_up()
    dist.destroy_process_group()
assert not (folder / "never").exists()

# A group of gloo's is ours, too, and so is the store at the address and port that torchrun's variables name.
dist.distributed_c10d.init_process_group("nccl")
gloo = dist.new_group(backend="gloo")
assert dist.get_backend(gloo) == "gloo"
assert is_ours(gloo)
adds_up(gloo)
dist.monitored_barrier(gloo)
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(*address, size, is_master=False)
store.set(f"from {rank}", "here")
assert store.get(f"from {1 - rank}") == b"here"
dist.destroy_process_group()
print(f"rank {rank} is content with {sys.argv[2:]}", flush=True)
