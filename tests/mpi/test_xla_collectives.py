"""Whether XLA's sums over ranks are believed: stand-ins for its runtime, over MPI, sum or lie. Needs no torch_xla."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI

from mpistrat.communicators.construction import communicator_for
from mpistrat.xla import transport
from mpistrat.xla.transport import use_xla, wrong_sum

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


class StandIn:
    """Of `Runtime`: tensors on the host, `all_reduce` as given, and why it is `unconnected`."""

    kind = "TPU"

    def __init__(
        self, sums: Callable[[Any], Any], known: int = SIZE, own: int = 1, unconnected: str = ""
    ) -> None:
        self._sums = sums
        self.num_all_devices, self.num_devices = known, own
        self._unconnected = unconnected

    def connect(self) -> str:
        return self._unconnected

    def device(self, index: int) -> str:
        return "cpu"

    def put(self, tensors: list[Any], device: str) -> list[Any]:
        return tensors

    def fetch(self, tensors: list[Any]) -> list[Any]:
        return tensors

    def all_reduce(self, op: str, tensors: list[Any]) -> list[Any]:
        return [self._sums(tensor) for tensor in tensors]


def honest(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, total.numpy())
    return total


def answer(runtime: StandIn) -> str:
    """What is wrong, equal on all ranks."""
    communicator = communicator_for(MPI.COMM_WORLD, "always", "test")
    wrong = wrong_sum(communicator, runtime)  # type: ignore[arg-type]
    assert communicator.all_gather_object(wrong) == [wrong] * SIZE
    return wrong


@pytest.mark.mpi
def test_a_right_sum_is_believed() -> None:
    assert answer(StandIn(honest)) == ""


@pytest.mark.mpi
def test_an_operand_that_comes_back_is_not() -> None:
    """As of XLA's CPU device. Of one rank it is the sum."""
    assert ("XLA's sum over the ranks was" in answer(StandIn(lambda tensor: tensor))) == (SIZE > 1)


@pytest.mark.mpi
def test_no_rank_believes_what_is_wrong_on_one() -> None:
    last = SIZE - 1

    def nan_on_the_last(tensor: torch.Tensor) -> torch.Tensor:
        return honest(tensor) * (float("nan") if last == RANK else 1.0)

    assert answer(StandIn(nan_on_the_last)).startswith(
        f"XLA's sum over the ranks was [nan, nan] on rank {last}"
    )


@pytest.mark.mpi
@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_error_is_an_answer(kind: type[Exception]) -> None:
    def fails(tensor: torch.Tensor) -> torch.Tensor:
        raise kind("no collectives\nand more")

    assert "was no value (no collectives) on rank 0" in answer(StandIn(fails))


@pytest.mark.mpi
def test_nothing_is_summed_where_devices_are_not_known() -> None:
    """Each of two ranks with two devices knows its own: as many as there are ranks."""
    wrong = answer(StandIn(never, known=2 * SIZE - 1, own=2))
    assert wrong == f"XLA on rank 0 knows of {2 * SIZE - 1} of the ranks' {2 * SIZE} devices"


def never(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a sum that others do not take part in")


@pytest.mark.mpi(min_size=2)
def test_the_first_rank_tells_why_xla_does_not_sum(capfd: pytest.CaptureFixture[str]) -> None:
    """Once, with what to do. On the CPU device, which never connects ranks, nothing is told."""
    alone = "the program has called torch_xla.runtime.use_spmd()"
    answers = {
        f"because XLA on rank 0 knows of 1 of the ranks' {SIZE} devices. Start one rank per chip": (
            StandIn(never, known=1)
        ),
        f"because XLA sums over all {2 * SIZE} devices of the job, of which these ranks have {SIZE}. Build the "
        "strategy over all ranks.": StandIn(never, known=2 * SIZE),
        f"because {alone} (rank {SIZE - 1}). Leave that call out.": (
            StandIn(never, unconnected=alone if RANK == SIZE - 1 else "")
        ),
        "was expected. Install the same torch_xla and libtpu on all hosts": StandIn(lambda t: t),
    }
    transport.tell_once.cache_clear()
    for text, runtime in answers.items():
        for kind in ("CPU", "TPU", "TPU"):
            runtime.kind = kind
            communicator = communicator_for(MPI.COMM_WORLD, "always", "test")
            assert use_xla(communicator, runtime)  # type: ignore[arg-type]
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == (RANK == 0)
        for line in lines:
            assert line.startswith("mpistrat: values on TPUs go through host memory and MPI, not")
            assert text in line
