"""What tests/tpu/CHECKLIST.md asks of a TPU: `mpiexec … python tests/tpu/programs/pod.py QUESTION`.

With PJRT_DEVICE=CPU it answers, too. Each answer is a line of JSON.
"""

import argparse
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mpistrat as ms
from mpistrat import xla

VARIABLES = (
    "CLOUD_TPU_TASK_ID",
    "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_VISIBLE_CHIPS",
)


def environment(_: str) -> dict[str, Any]:
    """PJRT's variables of each rank, and how XLA finds the devices."""
    topology = ms.tpu.initialize_tpu_system()
    variables = {name: os.environ.get(name) for name in VARIABLES}
    return {**variables, "mesh": topology.mesh_shape, "per rank": topology.num_tpus_per_task}


def logical_devices(_: str) -> dict[str, Any]:
    """How far a product over all cores of a rank, 2 x n/2 parts, is from that of one."""
    topology = ms.tpu.initialize_tpu_system()
    assignment = ms.tpu.DeviceAssignment.build(topology, computation_shape=topology.mesh_shape)
    strategy = ms.TPUStrategy(experimental_device_assignment=assignment, gradients="sum")
    cores = assignment.num_cores_per_replica
    left, right = torch.randn(64, 256), torch.randn(256, 128)

    def step(batch: torch.Tensor) -> torch.Tensor:
        parts = strategy.experimental_split_to_logical_devices(batch, [2, cores // 2])
        return parts @ right.to(batch.device)

    (batch,) = strategy.experimental_distribute_dataset([left])
    product = strategy.run(step, args=(batch,)).cpu()
    expected = left @ right
    return {"cores": cores, "difference": float((product - expected).norm() / expected.norm())}


def bfloat16(_: str) -> dict[str, Any]:
    """The sum over n replicas of the gradients 256, 1, 1, …: 256 where 16 bits were added up."""
    strategy = ms.TPUStrategy(gradients="sum")
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).sum()
        loss.backward()
        return loss

    inputs = torch.ones(replicas, 1, dtype=torch.bfloat16)
    inputs[0] = 256
    (batch,) = strategy.experimental_distribute_dataset([inputs])
    strategy.run(step, args=(batch,))
    expected = torch.tensor(255.0 + replicas).bfloat16()
    return {"replicas": replicas, "sum": float(model.weight.grad), "expected": float(expected)}


def sums(_: str) -> dict[str, Any]:
    """Where sums over ranks go, and whether rank 0 may read a result alone."""
    ms.tpu.initialize_tpu_system()
    runtime = importlib.import_module("torch_xla.runtime")
    runtime.world_size()  # torch_xla keeps this answer, which is 1
    strategy = ms.TPUStrategy(gradients="mean")
    (batch,) = strategy.experimental_distribute_dataset([torch.ones(strategy.num_replicas_in_sync)])

    def step(x: torch.Tensor) -> torch.Tensor:
        return ms.get_replica_context().all_reduce("sum", x)

    for _ in range(3):
        mean = strategy.reduce("mean", strategy.run(step, args=(batch,)), axis=None)
        pending = xla.start().are_pending([mean])
        if strategy.is_first:
            mean.tolist()
    return {
        "by XLA": "by XLA's collectives" in strategy.extended.explain(),
        "world": runtime.world_size(),
        "pending": any(pending),
        "mean": mean.tolist(),
        "expected": [float(strategy.num_replicas_in_sync)],
    }


def prefetch(_: str) -> dict[str, Any]:
    """A step with a batch of its own, over one with the batch before it: the least of three epochs."""
    strategy = ms.TPUStrategy(gradients="mean")
    with strategy.scope():
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    loader = [torch.randn(256, 1024) for _ in range(30)]
    dataset = strategy.experimental_distribute_dataset(loader)
    (same, *_) = dataset

    def seconds(batches: Any) -> float:
        xla.start().wait()
        started = time.perf_counter()
        for batch in batches:
            strategy.run(step, args=(batch,))
        xla.start().wait()
        return time.perf_counter() - started

    seconds([same] * 3)
    ratios = [seconds(dataset) / seconds([same] * len(loader)) for _ in range(3)]
    return {"ratio": round(min(ratios), 3)}


def checkpoint(folder: str) -> dict[str, Any]:
    """Of one step; where the folder has one, it is restored instead."""
    strategy = ms.TPUStrategy(gradients="mean")
    with strategy.scope():
        model = nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters())
        saved = ms.checkpoint.Checkpoint(model=model, optimizer=optimizer)
    manager = ms.checkpoint.CheckpointManager(saved, folder)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    found = manager.restore_or_initialize()
    if found is None:
        (batch,) = strategy.experimental_distribute_dataset([torch.randn(64, 8)])
        strategy.run(step, args=(batch,))
        manager.save()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.state_dict().values(), *moments]
    content = b"".join(torch.as_tensor(t).cpu().numpy().tobytes() for t in tensors)
    return {"restored": found is not None, "digest": hashlib.sha256(content).hexdigest()[:16]}


QUESTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    question.__name__: question
    for question in (environment, logical_devices, bfloat16, sums, prefetch, checkpoint)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("folder", nargs="?", default="pod-checkpoint")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    answer = QUESTIONS[arguments.question](arguments.folder)
    sys.stdout.write(json.dumps(answer, default=str) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
