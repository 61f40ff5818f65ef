"""One default group of the backend "mpistrat" over all ranks, for a file of tests that asks for it."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def default_group() -> Iterator[None]:
    dist.init_process_group("mpistrat", init_method="mpi://")
    yield
    dist.destroy_process_group()
