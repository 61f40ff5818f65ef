"""Whether gradients leave while `backward()` runs: as asked for, else as measured.

On a device they do: it sums up some gradients while it computes others. On the host overlap gains where a message waits
(a network), and may lose where a reduction is work for the cores that backward needs. So both ways are timed there over
the first steps, and the faster one stays.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpistrat.communicators import reducing
from mpistrat.communicators.communication_thread import CommunicationThread, takes_a_core
from mpistrat.cross_device_ops.packing import LAYOUT, Packer
from mpistrat.machine.cpu_share import cpu_share
from mpistrat.pytorch.gradients.buckets import Buckets, HostBuckets
from mpistrat.pytorch.gradients.device_buckets import DeviceBuckets, SideStream
from mpistrat.pytorch.gradients.wires import Wires
from mpistrat.replicas.torch_modules import ModuleParts

if TYPE_CHECKING:
    from mpistrat.pytorch.gradients.agreement import AgreedGradients, ReplicaBackward

_Parameters = Sequence[torch.Tensor | None]  # by slot
_Carrier = CommunicationThread | SideStream

# Below, in bytes of all gradients, there is nothing to hide.
SMALLEST = 1 << 20
# Backwards of each way that are timed; before each as many that are not.
_TIMED, _UNTIMED = 5, 2
# Overlap stays if it takes less than this part of the time of reducing afterwards.
_GAIN = 0.97


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What a rank knows of itself. `kinds`: of the devices on which parameters are; "several" where one has several."""

    asked: bool | None
    thread_multiple: bool
    kinds: frozenset[str]
    nbytes: int
    cpus: frozenset[int]
    threads: int


class Overlap:
    """Decides for each backward, the same on all ranks.

    Called by: one replica per rank, equally often on all.
    Args:
        shares: whether the ranks of a node share parameters.

    Attributes:
        may_come: it is not decided yet, or decided for.
    """

    def __init__(self, parts: ModuleParts, packer: Packer, wires: Wires, *, shares: bool) -> None:
        self._communicator, self._packer, self._wires = parts.group.communicator, packer, wires
        options = parts.ops.options
        self._asked, self._nbytes = options.overlap, options.bytes_per_pack
        self._carrier: _Carrier | None = None
        self._devices: frozenset[torch.device] | None = None  # of what is expected
        self._communicates = False  # the program, inside some backward()
        self._differ = False  # ranks have used different parameters in some backward()
        self._expected: tuple[int, ...] | None = None  # slots, if the last two backwards agreed
        self._last: tuple[int, ...] = ()
        self._like: dict[int, torch.Tensor] = {}  # those slots' parameters, without memory
        self._buckets: Buckets | None = None  # of the next backward
        self._made_for: list[Any] = []  # the scale, and the layouts of parameters
        self._seconds: tuple[list[float], list[float]] = ([], [])  # sequential, overlapped
        self._started = 0.0
        self._overlaps: bool | None = None
        self.may_come = True
        self._why = "not measured yet"
        self._has_wire = options.wire_dtype is not None or options.wire_format is not None
        why_not = _why_never(parts, shares)
        if why_not:
            self._decline(why_not)

    def forget(self) -> None:
        """Slots have got other numbers. Called by: all ranks."""
        self._expected, self._last, self._like, self._buckets = None, (), {}, None

    def begin(self, parameters: _Parameters, scale: float | None) -> Buckets | None:
        """The buckets of the backward that begins; None if its gradients are reduced afterwards.

        Not collective: a rank that skips this backward is found out at its end.
        """
        carrier = self._carrier
        if carrier is None or not self._expected:
            return None
        turn = self._overlaps is None and len(self._seconds[0]) == _UNTIMED + _TIMED
        buckets = None
        if self._overlaps or turn:
            # A model that the program has dropped goes when Python collects it, on each rank at another time.
            own = {s: meta if (p := parameters[s]) is None else p for s, meta in self._like.items()}
            made_for = [scale, *map(LAYOUT, own.values())]
            if self._buckets is None or self._made_for != made_for:
                if _devices_of(parameters, self._expected) - (self._devices or frozenset()):
                    return None  # they were moved
                rest = self._wires, _without_memory(own), scale, self._nbytes
                if isinstance(carrier, SideStream):
                    self._buckets = DeviceBuckets(carrier, *rest)
                else:
                    self._buckets = HostBuckets(carrier, self._packer, *rest)
                self._made_for = made_for
            # Those of a backward that fails do not come back: what is under way uses them.
            buckets, self._buckets = self._buckets, None
            buckets.begin(own)
        self._started = time.perf_counter()
        return buckets

    def end(self, step: ReplicaBackward, agreed: AgreedGradients) -> None:
        """The backward `step` has ended, in which the slots `agreed.dense` got gradients on some rank. Collective."""
        if self._overlaps is None and self._started:
            self._seconds[step.buckets is not None].append(time.perf_counter() - self._started)
            self._decide()
        self._started = 0.0
        self._buckets = step.buckets or self._buckets
        last, self._last = self._last, tuple(agreed.dense)
        # Where parameters take turns, those of the other turn would be sent for nothing.
        self._expect(last if last == self._last else None, step.parameters)
        self._communicates |= agreed.communicates
        self._differ |= not agreed.alike
        if self._communicates and isinstance(self._carrier, SideStream):
            # Buckets on a device cannot leave beside the program's own calls then.
            if self._carrier.thread is not None:
                why_not = "two threads must not use a device's groups and MPI at a time"
            elif self._differ:
                why_not = "its ranks use different parameters, which would interleave them in different orders"
            else:
                return
            self._carrier = None
            self._decline(f"the program communicates inside backward(), and {why_not}")

    def _expect(self, last: tuple[int, ...] | None, parameters: _Parameters) -> None:
        """Collective."""
        self._expected = last
        if not last:
            return
        devices = _devices_of(parameters, last)
        # A rank may have dropped all that is expected.
        moved = self._devices is None or bool(devices - self._devices)
        if not moved and self._like.keys() == set(last):
            return
        self._like = _without_memory({s: parameters[s] for s in last})
        self._buckets = None
        if moved:
            self._devices = devices
            self._carry()
        if isinstance(self._carrier, CommunicationThread):
            # Has the ranks share the window, which is collective, now that all of them are here.
            nbytes = sum([parameter.nbytes for parameter in self._like.values()])
            self._carrier.communicator.memory.window_buffer(nbytes)

    def state(self) -> dict[str, Any]:
        """Which gradients leave in the next backward, for `load`; the same on all ranks."""
        return {"last": self._last, "expected": self._expected}

    def load(self, state: Mapping[str, Any], parameters: _Parameters) -> None:
        """Collective."""
        if self.may_come:
            self._last = state["last"]
            self._expect(state["expected"], parameters)

    def explain(self) -> str:
        how = "while backward() runs" if self._overlaps else "when backward() has ended"
        return f"gradients are reduced {how}: {self._why}"

    def _carry(self) -> None:
        """Make what carries buckets; nothing, for ever, if gradients are to be reduced afterwards. Collective."""
        communicator, devices = self._communicator, self._devices or frozenset()
        kinds = frozenset(device.type for device in devices)
        facts = _Facts(
            self._asked,
            communicator.thread_multiple,
            frozenset(["several"]) if len(devices) > 1 else kinds,
            sum(p.numel() * p.element_size() for p in self._like.values()),
            frozenset(os.sched_getaffinity(0)),
            torch.get_num_threads(),
        )
        everyone = communicator.all_gather_object(
            facts, label="overlap of gradients with backward()"
        )
        why_not = _why_not(everyone, communicator.on_one_node)
        self._carrier = None
        if why_not:
            self._decline(why_not)
            return
        (kind,) = frozenset().union(*(rank.kinds for rank in everyone)) or {"cpu"}
        if self._asked:
            self._overlaps, self._why = True, "as asked for"
        elif kind != "cpu":
            self._overlaps, self._why = True, "a device does both at a time"
        elif self._has_wire:
            # A trial would lose what is held back of the buffers that are given up.
            self._overlaps, self._why = True, "as wire formats are better off"
        natively = communicator.ordered_by_streams
        if kind != "cpu" and natively and not self._wires.wait_for_host(natively):
            self._carrier = SideStream(next(iter(devices), torch.device(kind)), communicator)
            return
        thread = self._carrier = CommunicationThread.of_same_ranks(communicator)
        if kind != "cpu":
            if communicator.use_devices_in is not None:
                communicator.use_devices_in(thread.communicator)
            device = next(iter(devices), torch.device(kind))
            self._carrier = SideStream(device, thread.communicator, thread)
            self._why += "; a thread of each rank waits for the sums, and backward() for the thread"

    def _decline(self, why: str) -> None:
        """Reduce all gradients when backward() has ended. Called by all ranks, if one does."""
        self.may_come, self._overlaps, self._why, self._buckets = False, False, why, None
        if self._asked and self._communicator.rank == 0:
            warnings.warn(
                f"overlap=True, but gradients are reduced when backward() has ended: {why}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _decide(self) -> None:
        sequential, overlapped = self._seconds
        if len(overlapped) < _UNTIMED + _TIMED:
            return
        medians = np.array([statistics.median(way[_UNTIMED:]) for way in (sequential, overlapped)])
        self._communicator.all_reduce(medians, reducing("max", "times of backward()"))
        self._overlaps = self.may_come = bool(medians[1] < _GAIN * medians[0])
        self._why = (
            f"measured {medians[1] * 1e3:.3g} ms with overlap, {medians[0] * 1e3:.3g} ms without"
        )


def _why_never(parts: ModuleParts, shares: bool) -> str:
    """Why gradients of this strategy cannot leave while backward runs; empty if they may."""
    reasons = (
        ("parameters are shared", shares),
        ("a step is recorded first, and then computed", parts.replicas.records_steps),
        ("several replicas of a rank take turns", parts.replicas.count > 1),
        # What is accumulated once more after its bucket has left would be added in another order.
        ("deterministic=True", parts.group.deterministic),
        (
            "a cross_device_ops of the program's own sees all gradients first",
            parts.ops.custom is not None,
        ),
    )
    return next((why for why, holds in reasons if holds), "")


def _why_not(everyone: Sequence[_Facts], on_one_node: bool) -> str:
    """Why gradients cannot leave, or had better not leave, while backward runs; empty if they may."""
    asked = [facts.asked for facts in everyone]
    nbytes = everyone[0].nbytes
    kinds: frozenset[str] = frozenset().union(*(facts.kinds for facts in everyone))
    masks = [facts.cpus for facts in everyone]
    busy = any(
        takes_a_core(on_one_node, float(cpu_share(f.cpus, masks)), f.threads) for f in everyone
    )
    reasons = (
        ("as asked for", False in asked),
        (
            "MPI was started without MPI_THREAD_MULTIPLE",
            not all(f.thread_multiple for f in everyone),
        ),
        ("parameters are on several devices", len(kinds) > 1 or "several" in kinds),
        ("parameters are on an XLA device", "xla" in kinds),
        ("", None not in asked or not kinds <= {"cpu"}),
        (f"{nbytes} bytes are too few", nbytes < SMALLEST),
        ("no core of the node is free, and memory does not wait", busy),
    )
    return next((why for why, holds in reasons if holds), "")


def _without_memory(parameters: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """The parameters on "meta", by slot, without those that the program has dropped."""
    return {s: p.detach().to("meta") for s, p in parameters.items() if p is not None}


def _devices_of(parameters: _Parameters, slots: Sequence[int]) -> frozenset[torch.device]:
    """On which those of `slots` are that the program still has."""
    return frozenset([p.device for slot in slots if (p := parameters[slot]) is not None])
