"""`mpistrat verify`: its page, and programs that it cannot compare."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support import console
from support.documentation import TOP
from support.harness.mpi_launcher import Job, Launcher, run_job


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Its programs need not import torch."""
    folder = tmp_path_factory.mktemp("bin")
    with console.forked_programs(folder, Launcher.named("MPICH").environment()) as environment:
        yield {**environment, "FORKED_PYTHON": str(folder / "python")}


def verify(environment: Mapping[str, str], folder: Path, program: str, *words: str) -> Job:
    (folder / "train.py").write_text(program)
    command = ["mpistrat", "verify", *words, "train.py"]
    return run_job(command, environment, 90, folder)


def test_its_page(environment: Mapping[str, str], tmp_path: Path) -> None:
    jobs = console.run(TOP / "docs" / "verify.md", tmp_path, environment)
    assert [job.returncode for job in jobs] == [0, 0, 1, 0, 1]
    assert not (tmp_path / "model.pt").exists()


VARIABLES = """
import numpy as np
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
x = np.loadtxt("x.txt")
with strategy.scope():
    w = ms.Variable(np.array(0.0), aggregation=ms.VariableAggregation.SUM)


def step(batch):
    w.assign_sub(0.025 * np.sum(batch * (w.value() - 3.0) * batch))


for _ in range(3):
    for batch in strategy.experimental_distribute_dataset(ms.input.BatchedDataset(x, 8)):
        strategy.run(step, args=(batch,))
open("result.txt", "w").write(str(float(w.value())))
"""


def test_variables_of_numpy(environment: Mapping[str, str], tmp_path: Path) -> None:
    """It reads the user's file, and its own file is not the user's."""
    (tmp_path / "x.txt").write_text("\n".join(str(n / 16) for n in range(16)))
    job = verify(environment, tmp_path, VARIABLES)
    assert job.returncode == 0, job.output
    assert job.stdout.startswith(
        "EQUAL up to rounding: 2 ranks compute as 1 rank in 6 of 6 steps.\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "x.txt"]


def test_a_file_that_is_there(environment: Mapping[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "x.txt"
    kept.write_text("mine")
    job = verify(environment, tmp_path, "open('x.txt', 'a').write('more')")
    assert job.returncode == 2
    assert f"NOT COMPARED: the program wants to write {kept}, which was there" in job.stdout
    assert kept.read_text() == "mine"


REFUSES = """
import mpistrat as ms
strategy = ms.MultiWorkerMirroredStrategy()
assert strategy.num_replicas_in_sync > 1, "I need two ranks"
with strategy.scope():
    variable = ms.Variable(0.0)
variable.assign(1.0)
"""


def test_a_program_that_refuses_one_rank(environment: Mapping[str, str], tmp_path: Path) -> None:
    job = verify(environment, tmp_path, REFUSES)
    assert job.returncode == 2
    assert "NOT COMPARED: the program runs on several ranks, and refuses 1 rank" in job.stdout
    assert "I need two ranks" in job.stdout


DISTRIBUTED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for features, target in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(features), target).backward()
    optimizer.step()
"""


def test_torch_distributed(environment: Mapping[str, str], tmp_path: Path) -> None:
    """One rank has other batches, so that the reference is as many ranks on gloo."""
    job = verify(environment, tmp_path, DISTRIBUTED, "--run")
    assert job.returncode == 0, job.output
    assert "2 ranks compute as 2 ranks on gloo in 4 of 4 steps." in job.stdout
