"""A training step on a GPU beside plain PyTorch; with several ranks, beside DistributedDataParallel on gloo.

    mpiexec -n 1 python benchmarks/gpu_training.py
    mpiexec -n 2 python benchmarks/gpu_training.py    # two ranks share the GPU: a test of the way, not of speed

Batches lie on the GPU already. A call is 10 steps and the wait for the GPU at their end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mpistrat as ms
from mpistrat.tools.bench.arguments import program
from mpistrat.tools.bench.models.model import Model
from mpistrat.tools.bench.peers import torch_gloo
from mpistrat.tools.bench.report import report
from mpistrat.tools.bench.rounds import all_ranks, compare, medians
from mpistrat.tools.bench.work import Step, Work, alone, with_strategy

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


MODELS = {
    "MLP, 24 small layers": Model(mlp, (512,), 10, examples_per_rank=64),
    "transformer, 25 M": Model(Transformer, (128, 512), 10, examples_per_rank=32),
}


def contestants(work: Work, strategy: ms.Strategy) -> dict[str, Step]:
    if all_ranks().size == 1:
        return {"plain PyTorch": alone(work), "mpistrat": with_strategy(work, strategy)[0]}
    return {
        "plain PyTorch, one rank": alone(work),
        "mpistrat": with_strategy(work, strategy)[0],
        **torch_gloo.training_steps(work),
    }


def main() -> None:
    parser = program(__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: only tries the program")
    arguments = parser.parse_args()
    kind = arguments.device
    strategy = ms.MultiWorkerMirroredStrategy(
        gradients="mean", devices=["cpu:0"] if kind == "cpu" else None
    )
    device = strategy.extended.worker_devices[0]

    def steps(step: Step) -> Callable[[], None]:
        def call() -> None:
            for _ in range(STEPS):
                step()
            if kind == "cuda":
                torch.cuda.synchronize(device)

        return call

    rows: list[dict[str, Any]] = []
    for name, model in MODELS.items():
        work = Work(model, model.examples_per_rank, all_ranks().rank, device)
        calls = {who: steps(step) for who, step in contestants(work, strategy).items()}
        times = medians(compare(calls, 2, arguments.rounds))
        rows += [
            {
                "model": name,
                "training step": who,
                "ms": us / 1000 / STEPS,
                "mpistrat / this": times["mpistrat"] / us,
            }
            for who, us in times.items()
        ]
    report(f"training step on {kind}", rows, arguments.json("gpu_training"))


if __name__ == "__main__":
    main()
