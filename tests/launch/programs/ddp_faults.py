"""DDP as torch's documentation has it, for any launcher that sets RANK and MASTER_ADDR; its last rank goes wrong."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def goes_wrong(fault: str) -> None:
    Path("fault").write_text(str(time.time()))
    if fault == "stuck":
        time.sleep(600)  # stuck
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "shape":
        dist.all_reduce(torch.ones(5))  # shape
    else:
        raise ValueError("wrong on this rank only")  # raises


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        loss = model(torch.ones(4, 8)).square().mean()
        if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            goes_wrong(sys.argv[1])
        optimizer.zero_grad()
        loss.backward()  # gradients
        optimizer.step()
        dist.all_reduce(loss.detach())  # loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
