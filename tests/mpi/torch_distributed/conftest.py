"""A default group of the backend "mpistrat" over all ranks."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def default_group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("mpistrat", init_method="mpi://")
    yield dist.group.WORLD
    dist.destroy_process_group()
