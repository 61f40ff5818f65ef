"""What was trained under TPUStrategy goes on elsewhere, with other numbers of cores, and on the CPU; and back."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.xla.child_programs import answer

TESTS = str(Path(__file__).parents[1])
# Trains two steps, saves, and two more; or restores, and trains these.
PROGRAM = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
import mpistrat as ms
from support.xla.trained_models import batches

strategy = {strategy}
torch.manual_seed(int({restores}))
with strategy.scope():
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Dropout({dropout}), torch.nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    counter = ms.Variable(0.0, aggregation=ms.VariableAggregation.MEAN)
def step(inputs, targets):
    loss = ((model(inputs) - targets) ** 2).mean() / strategy.num_replicas_in_sync
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    counter.assign_add(torch.ones((), device=inputs.device))
checkpoint = ms.checkpoint.Checkpoint(model=model, optimizer=optimizer, counter=counter)
manager = ms.checkpoint.CheckpointManager(checkpoint, {folder!r})
for number, batch in enumerate(strategy.experimental_distribute_dataset(batches())):
    if number == 2 and {restores}:
        assert manager.restore_or_initialize() is not None
    if number >= 2 or not {restores}:
        strategy.run(step, args=batch)
    if number == 1 and not {restores}:
        manager.save(2)
torch.save(model.state_dict(), {folder!r} + ".pt")
print(json.dumps([[p.detach().cpu().flatten().tolist() for p in model.parameters()], float(counter.numpy())]))
"""
TPU = 'ms.TPUStrategy(gradients="sum")'
CPU = 'ms.MirroredStrategy(["cpu:0", "cpu:1"], gradients="sum")'


def trained(
    strategy: str, folder: Path, restores: bool, cores: int = 1, dropout: float = 0.0
) -> Any:
    program = PROGRAM.format(
        strategy=strategy, folder=str(folder), restores=restores, dropout=dropout, tests=TESTS
    )
    return answer(program, CPU_NUM_DEVICES=str(cores))


def assert_close(left: Any, right: Any) -> None:
    (parameters, count), (expected, expected_count) = left, right
    for parameter, other in zip(parameters, expected, strict=True):
        assert parameter == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert count == expected_count == 4


def test_from_one_core_to_two_and_to_the_cpu(tmp_path: Path) -> None:
    expected = trained(TPU, tmp_path / "c", restores=False)
    on_host = torch.load(tmp_path / "c.pt", map_location="cpu")
    assert [t.flatten().tolist() for t in on_host.values()] == expected[0]
    assert_close(trained(TPU, tmp_path / "c", restores=True, cores=2), expected)
    assert_close(trained(CPU, tmp_path / "c", restores=True), expected)


def test_from_the_cpu_to_two_cores(tmp_path: Path) -> None:
    expected = trained(CPU, tmp_path / "c", restores=False)
    assert_close(trained(TPU, tmp_path / "c", restores=True, cores=2), expected)


@pytest.mark.parametrize("cores", [1, 2])
def test_random_numbers_go_on(tmp_path: Path, cores: int) -> None:
    expected = trained(TPU, tmp_path / "c", restores=False, cores=cores, dropout=0.5)
    assert_close(trained(TPU, tmp_path / "c", restores=True, cores=cores, dropout=0.5), expected)
