"""PyTorch's own tests of its backends: all that gloo passes on CPUs, and all of all_to_all."""

import json
from pathlib import Path

import pytest
from mpi4py import MPI

from support.tests_of_torch import TestsOfTorch

WORLD = MPI.COMM_WORLD
FEWEST_RANKS = json.loads(
    Path(__file__).parents[2].joinpath("data/torch_distributed_tests.json").read_text()
)
pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # torch's tests use what torch would rather not have used
# Of every kind, and quick.
SAMPLE = {
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_all_gather_coalesced_simple",
    "test_all_gather_full_group",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_group_sum",
    "test_all_reduce_sum_async",
    "test_all_to_all_complex",
    "test_all_to_all_single_unequal_split_group",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_group",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_destroy_full_group",
    "test_gather_group",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_irecv",
    "test_reduce_full_group_product",
    "test_scatter_checks",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag_torch_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
}


@pytest.fixture(scope="module")
def tests_of_torch() -> TestsOfTorch:
    return TestsOfTorch(WORLD.rank, WORLD.size)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.mpi(min_size=ranks), *[pytest.mark.slow] * (name not in SAMPLE)],
        )
        for name, ranks in FEWEST_RANKS.items()
    ],
)
def test_of_torch(name: str, tests_of_torch: TestsOfTorch, directory: Path) -> None:
    if WORLD.rank == 0:
        for folder in ("barrier", "test_dir", "init_dir"):
            directory.joinpath(folder).mkdir(parents=True)
    WORLD.Barrier()
    tests_of_torch.run(name, directory)


def test_the_sample_is_of_the_list() -> None:
    assert set(FEWEST_RANKS) >= SAMPLE
