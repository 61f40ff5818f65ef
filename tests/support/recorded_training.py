"""A small training with all kinds of input; tests/data has the checkpoint and the trace of an earlier version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager

FOLDER = Path(__file__).parents[1] / "data"
STEPS = 3
_EXAMPLES = 48
_BATCH = 4


def _examples_of_file(number: int) -> Iterator[np.ndarray]:
    return iter(np.arange(6 * number, 6 * number + 6))


class RecordedTraining:
    """Called by: every rank. Args: seed: of the model."""

    def __init__(self, seed: int) -> None:
        self.strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
        torch.manual_seed(seed)
        with self.strategy.scope():
            linear = torch.nn.Linear(2, 3)
            self.model = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(3))
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
            self.steps = ms.Variable(0)
            self.seen = ms.Variable(
                0.0,
                synchronization=ms.VariableSynchronization.ON_READ,
                aggregation=ms.VariableAggregation.SUM,
            )
        options = ms.InputOptions(experimental_auto_shard_policy=ms.AutoShardPolicy.DATA)
        arrays = ms.input.BatchedDataset(np.arange(_EXAMPLES), _BATCH, shuffle=True)
        numbers: Any = range(_EXAMPLES)
        loader: Any = torch.utils.data.DataLoader(numbers, _BATCH, shuffle=True)
        files = ms.input.FileDataset(range(8), _examples_of_file, _BATCH, shuffle=True)
        distribute = self.strategy.experimental_distribute_dataset
        self.inputs: dict[str, Any] = {
            "arrays": distribute(arrays),
            "loader": distribute(loader),
            "files": distribute(files, options),
        }
        self.checkpoint = Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            steps=self.steps,
            seen=self.seen,
            **self.inputs,
        )
        self.manager = CheckpointManager(self.checkpoint, FOLDER / "checkpoints")

    def train(self) -> None:
        inputs = [iter(dataset) for dataset in self.inputs.values()]
        for _ in range(STEPS):
            batches = tuple(next(batches_of_one) for batches_of_one in inputs)
            self.strategy.run(self._step, args=(batches,))
            self.steps.assign_add(1)

    def _step(self, batches: Any) -> None:
        of_all_inputs = torch.stack([torch.as_tensor(batch).float() for batch in batches])
        numbers = of_all_inputs.mean(0) / _EXAMPLES
        self.optimizer.zero_grad()
        outputs = self.model(torch.stack([numbers, -numbers], 1))
        outputs.square().mean().backward()
        self.optimizer.step()
        self.seen.assign_add(float(len(batches[0])))

    def results(self) -> dict[str, Any]:
        """What has come of it, equal on all ranks, however many there are; reads the next step of each input."""
        parameters = self.model.state_dict()
        moments = []
        for state in self.optimizer.state_dict()["state"].values():
            rounded = {name: _rounded(state[name]) for name in sorted(state)}
            moments.append(rounded)
        return {
            "model": {name: _rounded(value) for name, value in parameters.items()},
            "moments": moments,
            "steps": int(self.steps.numpy()),
            "seen": float(self.seen.numpy()),
            "next": {name: self._next(dataset) for name, dataset in self.inputs.items()},
        }

    def _next(self, dataset: Any) -> list[int]:
        batch = next(iter(dataset))
        mine = np.asarray(self.strategy.experimental_local_results(batch)[0])
        everyone = self.strategy.extended.communicator.all_gather_object(
            mine.tolist(), label="the next step"
        )
        return sorted(number for numbers in everyone for number in numbers)


def _rounded(value: torch.Tensor) -> Any:
    """state_dict() averages buffers over ranks."""
    return value.double().numpy().round(6).tolist()
