"""Calls of torch.distributed as contestants."""

import sys
import types

import numpy as np
import pytest

from mpistrat.tools.bench.command_line import TORCH_CALLS
from mpistrat.tools.bench.peers import torch_distributed
from mpistrat.tools.bench.rounds import CannotTakePart
from mpistrat.tools.bench.torch_collectives import CALLS, TorchCollective, compare_call


def test_the_command_line_names_every_call() -> None:
    assert tuple(CALLS) == TORCH_CALLS


class Copy(TorchCollective):
    def __call__(self) -> None:
        self.received.copy_(self.sent)

    def expected(self) -> np.ndarray:
        return self.operand(self.rank, self.count)


class BrokenCopy(Copy):
    def __call__(self) -> None:
        super().__call__()
        self.received[:3] += 1


def test_wrong_elements_are_counted() -> None:
    calls = {"gloo": Copy(None, 1024), "mpistrat": BrokenCopy(None, 1024)}
    row = compare_call("copy", calls, num_rounds=2)
    assert (row["call"], row["bytes"], row["wrong"]) == ("copy", 1024, 3)
    assert row["gloo / mpistrat"] == row["gloo us"] / row["mpistrat us"]
    assert {name: len(times) for name, times in row["samples"].items()} == dict.fromkeys(calls, 2)


@pytest.mark.parametrize("reason", ["ranks 0 and 1 share a GPU", ""])
def test_torchs_own_backend_of_ranks_that_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """It takes no part, but where `shared_gpu` says nothing against it, as with a host's name for each rank."""
    gpu_transports = types.ModuleType("gpu_transports")
    gpu_transports.Gpu, gpu_transports.shared_gpu = lambda node, name: name, lambda gpus: reason  # type: ignore[attr-defined]
    name = "mpistrat.communicators.transports.accelerator.gpu_transports"
    monkeypatch.setitem(sys.modules, name, gpu_transports)
    two_ranks = types.SimpleNamespace(all_gather_object=lambda own: [own, own])
    monkeypatch.setattr(torch_distributed, "all_ranks", lambda: two_ranks)
    monkeypatch.setattr(torch_distributed, "seen_accelerators", lambda: ("GPU-1",))
    if reason:
        with pytest.raises(CannotTakePart, match=f"{reason}, which its backend refuses"):
            torch_distributed.backend_of_torch("cuda:0")
    else:
        assert torch_distributed.backend_of_torch("cuda:0") == "nccl"
