"""Buffers of two libraries on one accelerator: never under way together."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.transports.accelerator.library_dispatcher import LibraryDispatcher


class FakeTransport:
    ordered_by_streams = True

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.why = name, log, f"through {name}"
        log.append(f"{name} is made")

    def choose(self, collective: Collective) -> Any:
        self.log.append(f"{self.name} is used")
        return self

    def wait_until_idle(self) -> None:
        self.log.append(f"{self.name} is idle")


class CupyArray:
    pass


def test_one_library_has_ended_when_the_other_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    tensor, array = torch.empty(1), CupyArray()
    log: list[str] = []
    on_device: Any = SimpleNamespace(is_cpu=False, is_meta=False, device=torch.device("cuda"))
    monkeypatch.setattr(
        "mpistrat.communicators.transports.accelerator.library_dispatcher.is_torch",
        lambda value: value is on_device,
    )
    monkeypatch.setattr(
        "mpistrat.communicators.transports.accelerator.library_dispatcher.is_on_gpu",
        lambda value: value is on_device or value is array,
    )
    ways = LibraryDispatcher(
        lambda: FakeTransport("torch", log), lambda: FakeTransport("CuPy", log)
    )  # type: ignore[arg-type,return-value]
    assert ways.choose(AllReduce(tensor)) is None  # on the host
    for buffer in (on_device, on_device, array, array, on_device):
        ways.choose(AllReduce(buffer))
    assert log == [
        *("torch is made", "torch is used", "torch is used"),
        *("torch is idle", "CuPy is made", "CuPy is used", "CuPy is used"),
        *("CuPy is idle", "torch is used"),
    ]
    assert ways.ordered_by_streams
    assert ways.explain("HOST") == (
        "tensors on GPUs: through torch\nCuPy arrays on GPUs: through CuPy\nbuffers on the host: HOST"
    )
