"""A training step on a GPU beside plain PyTorch; with several ranks that have a GPU each, beside DDP and FSDP2 on NCCL.

    mpiexec -n 1 python benchmarks/gpu_training.py
    mpiexec -n 4 python benchmarks/gpu_training.py    # on four GPUs; where ranks share one, not a test of speed

Batches lie on the GPU already. A turn is twice `--steps`, from an idle GPU to an idle GPU. How the first rank's host
spends a step (`host_times`) is measured in steps of their own, which take their batches from a loader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from host_times import host_ms
from program import program, report

from mpistrat.tools.bench.command import device_named
from mpistrat.tools.bench.models import Model
from mpistrat.tools.bench.peers import torch_distributed
from mpistrat.tools.bench.rounds import CannotTakePart, all_ranks, compare, medians
from mpistrat.tools.bench.training import with_mpistrat
from mpistrat.tools.bench.work import Step, Work, alone


def mlp() -> torch.nn.Module:
    """Many small kernels: what costs time is starting them, so what mpistrat does in Python shows most."""
    layers: list[torch.nn.Module] = []
    for _ in range(24):
        layers.append(torch.nn.Linear(512, 512))
        layers.append(torch.nn.BatchNorm1d(512))
        layers.append(torch.nn.ReLU())
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


def contestants(work: Work, left_out: dict[str, str]) -> dict[str, Step]:
    """Args: left_out: gets the reason why torch's own backend does not take part."""
    steps = {"mpistrat": with_mpistrat(work)}
    if all_ranks().size == 1:
        return {"plain PyTorch": alone(work), **steps}
    try:
        steps |= torch_distributed.training_steps(work)
    except CannotTakePart as reason:
        left_out["torch.distributed"] = str(reason)
    return {"plain PyTorch, one rank": alone(work), **steps}


def main() -> None:
    parser = program(__doc__)
    parser.add_argument("--device", default="auto", help="as of mpistrat-bench (auto)")
    parser.add_argument("--steps", type=int, default=10, help="of half a turn (10)")
    arguments = parser.parse_args()
    device = device_named(arguments.device)
    left_out: dict[str, str] = {}

    def steps(step: Step) -> Callable[[], None]:
        def call() -> None:
            for _ in range(arguments.steps):
                step()

        return call

    rows: list[dict[str, Any]] = []
    for name, model in MODELS.items():
        work = Work(model, model.examples_per_rank, all_ranks().rank, device.name)
        calls = {who: steps(step) for who, step in contestants(work, left_out).items()}
        times = medians(compare(calls, 2, arguments.rounds, device.wait))
        of_host = host_ms(work, arguments.steps, arguments.rounds, device.wait)
        rows += [
            {
                "model": name,
                "training step": who,
                "ms": us / 1000 / arguments.steps,
                "mpistrat / this": times["mpistrat"] / us,
                **of_host.get(who.partition(",")[0], {}),
            }
            for who, us in times.items()
        ]
    title = f"training step on {device.kind}"
    report(title, rows, arguments.json("gpu_training"), left_out, device)


if __name__ == "__main__":
    main()
