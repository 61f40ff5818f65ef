"""Whether buffers on GPUs of several nodes go by node: what may, and what measured costs say."""

import math
from typing import Any

import numpy as np
import pytest

from mpistrat.communicators.collectives.all_gather import AllGather
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.all_reduce_by_tree import AllReduceByTree
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.costs import measurement
from mpistrat.communicators.costs.measurement import SIZES_ON_DEVICE, Costs
from mpistrat.communicators.costs.model import Cost
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.communicators.reduction import SUM, Reduction
from mpistrat.communicators.reduction.tree import ReductionTree
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.communicators.transports.accelerator.hierarchical import (
    ALL_ALIKE,
    BY_NODE,
    SMALLEST,
    HierarchicalDeviceTransport,
    why_not_by_node,
)
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.options import CommunicationImplementation as Way

ALONE = LocalCommunicator()
WAITED: list[Any] = []  # buffers that the host has waited for


class Flat(DeviceTransport):
    ordered_by_streams = True

    def all_reduce(self, collective: AllReduce) -> None: ...


class Library:
    """Of a device whose memory is the host's."""

    name = "a device"

    @staticmethod
    def device() -> Any:
        return np.errstate()

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.empty(shape, dtype)


@pytest.fixture(autouse=True)
def _on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mpistrat.communicators.transports.accelerator.buffers.is_on_gpu", lambda b: True
    )
    monkeypatch.setattr(
        DeviceTransport, "wait_for_current_stream", lambda self, buffer: WAITED.append(buffer)
    )
    monkeypatch.setattr(HierarchicalDeviceTransport, "all_reduce", lambda self, collective: None)


def by_node(monkeypatch: pytest.MonkeyPatch, costs: Costs) -> HierarchicalDeviceTransport:
    def costs_of(ways: dict[str, Any], *args: Any, **how: Any) -> Costs:
        for way in ways.values():
            zeros = how["memory"].zeros(3)
            assert (zeros.dtype, zeros.tolist()) == ("float32", [0, 0, 0])
            way(zeros)
            assert WAITED[-1] is zeros
        return costs

    monkeypatch.setattr(measurement, "costs_of", costs_of)
    args: Any = ALONE, 0, CommunicatorWatch()
    parts = [Flat(*args, f"through {name}") for name in ("a group", "MPI", "a flat group")]
    transport = HierarchicalDeviceTransport(*args, [0, 0, 1, 1], *parts)
    library: Any = Library()
    transport.measure(library, "MPI 1.0")
    return transport


def buffer(nbytes: int) -> AllReduce:
    return AllReduce(np.zeros(nbytes // 4, np.float32))


def mover(transport: Any, collective: Collective) -> Any:
    """The transport whose method moves it."""
    return transport.choose(collective).__self__


def costs(by_node: Cost, all_alike: Cost) -> Costs:
    return Costs({BY_NODE: by_node, ALL_ALIKE: all_alike}, "measured now", sizes=SIZES_ON_DEVICE)


def test_the_cheaper_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = by_node(monkeypatch, costs(Cost(1e-3, 1e-10), Cost(1e-4, 1e-9)))
    assert transport.smallest == 1_000_000
    assert mover(transport, buffer(1_000_000)) is transport
    assert mover(transport, buffer(999_996)) is transport.flat
    assert mover(transport, AllGather(buffer(1_000_000).buffer)) is transport.flat
    assert not transport.ordered_by_streams
    assert (
        "through a flat group; large ones by node, in 1 slices between the nodes, through MPI, from 1000000"
        in (transport.why)
    )
    assert "by node: 1e+03 us + 0.1 ns per byte" in transport.why


def test_a_way_that_is_never_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the host need not wait for what is given to the other."""
    transport = by_node(monkeypatch, costs(Cost(1e-3, 1e-9), Cost(1e-4, 1e-10)))
    assert math.isinf(transport.smallest)
    assert mover(transport, buffer(1 << 26)) is transport.flat
    assert transport.ordered_by_streams
    assert "through MPI, never; of S bytes" in transport.why
    forced = transport.forced[Way.HIERARCHICAL]
    assert isinstance(forced, HierarchicalDeviceTransport)
    assert mover(forced, buffer(1 << 26)) is forced
    assert mover(forced, buffer(4)) is transport.flat
    assert transport.forced[Way.NCCL] is transport.flat


def test_what_wants_all_values_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = by_node(monkeypatch, costs(Cost(1e-4, 1e-10), Cost(1e-3, 1e-9)))
    assert transport.smallest == SMALLEST
    large = buffer(SMALLEST).buffer
    assert mover(transport, Reduce(large, SUM)) is transport
    tree = ReductionTree(2, [[range(1)], [range(1, 2)]])
    assert mover(transport, AllReduceByTree(large, tree=tree)) is transport.flat
    compressed = Reduction(compressor=lambda between, v: None)
    assert mover(transport, AllReduce(large, compressed)) is transport.flat
    assert mover(transport, buffer(SMALLEST - 4)) is transport.flat


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([0, 0, 1, 1], ""),
        ([0, 1, 0, 1], ""),
        ([0, 0], "there is one node"),
        ([0, 1, 2], "each rank is on a node of its own"),
        ([0, 0, 1], "nodes have 1 to 2 ranks"),
    ],
)
def test_which_nodes(nodes: list[int], reason: str) -> None:
    assert why_not_by_node(nodes) == reason
