"""A training step on a GPU beside plain PyTorch; with several ranks, beside DistributedDataParallel on gloo.

    mpiexec -n 1 python benchmarks/gpu_training.py
    mpiexec -n 2 python benchmarks/gpu_training.py    # two ranks share the GPU: a test of the way, not of speed

Batches lie on the GPU already. A call is 10 steps and the wait for the GPU at their end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import mpistrat as ms
from mpistrat.tools.bench.peers import torch_gloo
from mpistrat.tools.bench.report import report
from mpistrat.tools.bench.rounds import all_ranks, compare, medians

STEPS = 10


def mlp() -> torch.nn.Module:
    """Many small kernels: what costs time is starting them, so what mpistrat does in Python shows most."""
    layers: list[torch.nn.Module] = []
    for _ in range(24):
        layers += [torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))


class Transformer(torch.nn.Module):
    """An encoder of 25 M parameters that classifies sequences of 128."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = torch.nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.encoder(x).mean(1))
        return result


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "MLP, 24 small layers": (mlp, (64, 512)),
    "transformer, 25 M": (Transformer, (32, 128, 512)),
}


class Contestant:
    """The same model, batch and optimizer for all."""

    def __init__(self, name: str, device: str) -> None:
        make, shape = MODELS[name]
        torch.manual_seed(0)
        self.model = make().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(all_ranks().rank)
        self.x = torch.randn(shape, generator=generator).to(device)
        self.y = torch.randint(0, 10, shape[:1], generator=generator).to(device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()


def plain(name: str, device: str) -> Callable[[], object]:
    return Contestant(name, device).step


def with_mpistrat(strategy: ms.Strategy, name: str, device: str) -> Callable[[], object]:
    with strategy.scope():
        contestant = Contestant(name, device)
    return lambda: strategy.run(contestant.step)


def with_ddp(name: str, device: str) -> Callable[[], object]:
    contestant = Contestant(name, device)
    contestant.model = torch.nn.parallel.DistributedDataParallel(
        contestant.model, gradient_as_bucket_view=True
    )
    return contestant.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="prefix of the file to write")
    parser.add_argument("--device", default="cuda", help="cpu: only tries the program")
    arguments = parser.parse_args()
    kind = arguments.device
    ranks = all_ranks().size
    strategy = ms.MultiWorkerMirroredStrategy(
        gradients="mean", devices=["cpu:0"] if kind == "cpu" else None
    )
    device = strategy.extended.worker_devices[0]

    def steps(step: Callable[[], object]) -> Callable[[], object]:
        def call() -> None:
            for _ in range(STEPS):
                step()
            if kind == "cuda":
                torch.cuda.synchronize(device)

        return call

    rows: list[dict[str, Any]] = []
    torch_gloo.start()
    for name in MODELS:
        contestants = {
            "plain PyTorch, one rank" if ranks > 1 else "plain PyTorch": plain(name, device),
            "mpistrat": with_mpistrat(strategy, name, device),
        }
        if ranks > 1:
            contestants["DDP, gloo"] = with_ddp(name, device)
        rounds = compare({who: steps(step) for who, step in contestants.items()}, repeat=2)
        times = medians(rounds)
        rows += [
            {
                "model": name,
                "training step": who,
                "ms": us / 1000 / STEPS,
                "mpistrat / this": times["mpistrat"] / us,
            }
            for who, us in times.items()
        ]
    path = arguments.json and f"{arguments.json}gpu_training.json"
    report(f"training step on {kind}", rows, path)


if __name__ == "__main__":
    main()
