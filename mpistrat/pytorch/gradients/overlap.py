"""Whether gradients are sent while `backward()` runs ("overlap"): as the program chooses, else as measured.

An accelerator gains by overlap, because it sums up some gradients while it computes others. The host gains where
messages wait for a network, and may lose where a reduction takes cores from backward(). So on the host both ways are
timed over the first backwards, and the faster way is kept.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpistrat.communicators import reducing
from mpistrat.communicators.communication_thread import CommunicationThread, takes_a_core
from mpistrat.cross_device_ops.packing import LAYOUT, Packer
from mpistrat.machine.cpu_share import cpu_share
from mpistrat.machine.notices import warn_on_first_rank
from mpistrat.pytorch.gradients.buckets import Buckets, HostBuckets
from mpistrat.pytorch.gradients.device_buckets import DeviceBuckets, SideStream
from mpistrat.pytorch.gradients.wires import Wires
from mpistrat.replicas.torch_modules import ModuleParts

if TYPE_CHECKING:
    from mpistrat.pytorch.gradients.agreement import AgreedGradients, ReplicaBackward

_Parameters = Sequence[torch.Tensor | None]  # by slot; None for a dropped parameter
_Sender = CommunicationThread | SideStream

# With fewer bytes of gradients than this, overlap has nothing to hide.
SMALLEST = 1 << 20
# With and without overlap, five backwards each are timed, after two that are not timed.
_TIMED = 5
_UNTIMED = 2
# Overlap is kept if its time is less than this fraction of the time without it.
_GAIN = 0.97


class Overlap:
    """Decides for each backward whether its gradients are sent while it runs ("overlap"). All ranks decide alike.

    The first backwards on the host are timed, without and with overlap. Overlap is kept if the slowest rank's median
    time with it is less than 97 % of the slowest rank's median time without it.
    Called by: one replica per rank, equally often on all ranks.
    Args:
        parts: the strategy's communicator and options.
        packer: makes flat buffers for buckets on the host.
        wires: make the reductions of buckets.
        shares: whether the ranks of a node share parameters. Then overlap stays off.

    Attributes:
        may_come: whether overlap is on, or not decided yet. False once it is off for good.
    """

    def __init__(self, parts: ModuleParts, packer: Packer, wires: Wires, *, shares: bool) -> None:
        self._communicator = parts.group.communicator
        self._packer = packer
        self._wires = wires
        options = parts.ops.options
        self._asked = options.overlap
        self._nbytes = options.bytes_per_pack
        self._sender: _Sender | None = None
        self._devices: frozenset[torch.device] | None = None  # devices of the expected parameters
        self._communicates = False  # the program, in any backward()
        self._differ = False  # ranks used different parameters in a backward()
        self._expected: tuple[int, ...] | None = None  # slots; None if two backwards differ
        self._last: tuple[int, ...] = ()
        self._like: dict[int, torch.Tensor] = {}  # parameters of `_expected` on "meta"
        self._buckets: Buckets | None = None  # for the next backward
        self._made_for: list[Any] = []  # scale and layouts of `_buckets`
        self._seconds: tuple[list[float], list[float]] = (
            [],  # sequential
            [],  # overlapped
        )
        self._started = 0.0
        self._overlaps: bool | None = None
        self.may_come = True
        self._why = "not measured yet"
        why_not = _why_never(parts, shares)
        if why_not:
            self._decline(why_not)

    def forget(self) -> None:
        """Forget the slots that are expected to get gradients. Called by: every rank, when slots get new numbers."""
        self._expected = None
        self._last = ()
        self._like = {}
        self._buckets = None

    def begin(self, parameters: _Parameters, scale: float | None) -> Buckets | None:
        """Return the buckets for a backward that begins; None if all its gradients are to be reduced afterwards.

        The call is not collective. If a rank skips this backward, the ranks raise CollectiveMismatchError when they
        agree on gradients at the end of the other ranks' backward.
        Args:
            parameters: this rank's parameters by slot; None for a dropped one.
            scale: number that multiplies the sums; None for plain sums.
        """
        if self._sender is None or not self._expected:
            return None
        sequential, _ = self._seconds
        is_trial = self._overlaps is None and len(sequential) == _UNTIMED + _TIMED
        buckets = None
        if self._overlaps or is_trial:
            # Each rank's Python collects a dropped model at another time, so zeros are sent for dropped parameters.
            sent = {}
            for slot, meta in self._like.items():
                parameter = parameters[slot]
                sent[slot] = meta if parameter is None else parameter
            made_for = [scale, *map(LAYOUT, sent.values())]
            if self._buckets is None or self._made_for != made_for:
                if not _devices_of(parameters, self._expected).issubset(self._devices or ()):
                    return None  # the parameters were moved
                how = self._wires, _without_memory(sent), scale, self._nbytes
                if isinstance(self._sender, SideStream):
                    self._buckets = DeviceBuckets(self._sender, *how)
                else:
                    self._buckets = HostBuckets(self._sender, self._packer, *how)
                self._made_for = made_for
            # If the backward fails, the buckets do not come back: their collectives may still use them.
            buckets = self._buckets
            self._buckets = None
            buckets.begin(sent)
        self._started = time.perf_counter()
        return buckets

    def end(self, step: ReplicaBackward, agreed: AgreedGradients) -> None:
        """Record the time and the slots of a backward that has ended, and decide on overlap when all are timed.

        The next backward is expected to use the same slots if the last two backwards did. On an accelerator, overlap
        goes off for good if the program communicates inside backward() and that could interleave with buckets.
        Called by: every rank, after its gradients are summed up. Collective.
        Args:
            step: the backward.
            agreed: the result of the agreement. The slots `agreed.dense` got gradients on some rank.
        """
        if self._overlaps is None and self._started:
            elapsed = time.perf_counter() - self._started
            self._seconds[step.buckets is not None].append(elapsed)
            self._decide()
        self._started = 0.0
        self._buckets = step.buckets or self._buckets
        last = tuple(agreed.dense)
        # If two models take turns, no slots are expected: the buckets of the wrong model would be sent for nothing.
        expected = last if last == self._last else None
        self._last = last
        self._expect(expected, step.parameters)
        self._communicates |= agreed.communicates
        self._differ |= not agreed.alike
        if self._communicates and isinstance(self._sender, SideStream):
            # Then buckets on a device must not interleave with the program's calls.
            if self._sender.thread is not None:
                why_not = "two threads must not use a device's groups and MPI at the same time"
            elif self._differ:
                why_not = "its ranks use different parameters, which would interleave them in different orders"
            else:
                return
            self._sender = None
            self._decline(f"the program communicates inside backward(), and {why_not}")

    def _expect(self, last: tuple[int, ...] | None, parameters: _Parameters) -> None:
        """Prepare buckets for gradients of the slots `last` in the next backward. Collective.

        Args:
            last: the slots; None or empty to send no gradients early.
            parameters: this rank's parameters by slot; None for a dropped one.
        """
        self._expected = last
        if not last:
            return
        devices = _devices_of(parameters, last)
        # A rank may have dropped all of the expected parameters.
        moved = self._devices is None or bool(devices - self._devices)
        if not moved and self._like.keys() == set(last):
            return
        self._like = _without_memory({s: parameters[s] for s in last})
        self._buckets = None
        if moved:
            self._devices = devices
            self._agree_on_sender(devices)
        if isinstance(self._sender, CommunicationThread):
            # Share the window now: this is collective, and all ranks are here.
            self._sender.communicator.memory.window_buffer(_nbytes(self._like.values()))

    def state(self) -> dict[str, Any]:
        """Return the last backward's slots and the slots that the next one is expected to use, for `load`.

        The dict is the same on all ranks. "expected" is None if the last two backwards used different slots.
        """
        return {"last": self._last, "expected": self._expected}

    def load(self, state: Mapping[str, Any], parameters: _Parameters) -> None:
        """Expect the slots of a checkpoint's `state`; do nothing if overlap is off for good. Collective."""
        if self.may_come:
            self._last = state["last"]
            self._expect(state["expected"], parameters)

    def explain(self) -> str:
        how = "while backward() runs" if self._overlaps else "when backward() has ended"
        return f"gradients are reduced {how}: {self._why}"

    def _agree_on_sender(self, devices: frozenset[torch.device]) -> None:
        """Choose the thread or stream that sends buckets, or turn overlap off for good. Collective.

        Overlap is on without timing on an accelerator, with `overlap=True`, and with a wire format.
        Args: devices: the devices of this rank's parameters that are expected to get gradients; may be empty.
        """
        communicator = self._communicator
        facts = (
            self._asked,
            communicator.thread_multiple,
            frozenset([device.type for device in devices]),
            len(devices),
            _nbytes(self._like.values()),
            frozenset(os.sched_getaffinity(0)),
            torch.get_num_threads(),
        )
        of_ranks = communicator.all_gather_object(
            facts, label="overlap of gradients with backward()"
        )
        kinds, why_not = _why_not(of_ranks, communicator.on_one_node)
        self._sender = None
        if why_not:
            self._decline(why_not)
            return
        (kind,) = kinds or {"cpu"}
        why = _first_that_holds(
            ("as asked for", self._asked),
            ("a device computes and communicates at the same time", kind != "cpu"),
            # With and without overlap, buffers have different lengths, so the residuals of the slower way would be
            # lost.
            ("a trial would lose residuals of the wire format", self._wires.has_format),
        )
        if why:
            self._overlaps = True
            self._why = why
        self._sender = self._make_sender(next(iter(devices), torch.device(kind)))

    def _make_sender(self, device: torch.device) -> _Sender:
        """Return the sender for buckets of `device`: a thread on the host, else a `SideStream`. Collective.

        The side stream gets a communication thread if the host has to wait for the sums.
        """
        communicator = self._communicator
        if device.type == "cpu":
            return CommunicationThread.of_same_ranks(communicator)
        if not self._wires.wait_for_host(communicator.ordered_by_streams):
            return SideStream(device, communicator)
        thread = CommunicationThread.of_same_ranks(communicator)
        if communicator.use_devices_in is not None:
            communicator.use_devices_in(thread.communicator)
        self._why += "; a thread of each rank waits for the sums, and backward() for the thread"
        return SideStream(device, thread.communicator, thread)

    def _decline(self, why: str) -> None:
        """Turn overlap off for good, so that all gradients are reduced after backward().

        Rank 0 warns if the program set `overlap=True`.
        Called by: all ranks, or none.
        """
        self.may_come = False
        self._overlaps = False
        self._why = why
        self._buckets = None
        if self._asked:
            warn_on_first_rank(
                self._communicator.rank,
                f"overlap=True, but gradients are reduced when backward() has ended: {why}",
            )

    def _decide(self) -> None:
        sequential, overlapped = self._seconds
        if len(overlapped) < _UNTIMED + _TIMED:
            return
        without_overlap = statistics.median(sequential[_UNTIMED:])
        with_overlap = statistics.median(overlapped[_UNTIMED:])
        medians = np.array([without_overlap, with_overlap])
        self._communicator.all_reduce(medians, reducing("max", "times of backward()"))
        without_overlap, with_overlap = medians.tolist()
        self.may_come = with_overlap < _GAIN * without_overlap
        self._overlaps = self.may_come
        self._why = (
            f"measured {with_overlap * 1e3:.3g} ms with overlap, "
            f"{without_overlap * 1e3:.3g} ms without"
        )


def _why_never(parts: ModuleParts, shares: bool) -> str:
    """Return why this strategy can never send gradients while backward() runs; "" if nothing speaks against it yet."""
    return _first_that_holds(
        ("parameters are shared", shares),
        ("a step is recorded first, and then computed", parts.replicas.records_steps),
        ("several replicas of a rank take turns", parts.replicas.count > 1),
        # A gradient that grows after its bucket was sent would be added in another order.
        ("deterministic=True", parts.group.deterministic),
        (
            "a cross_device_ops of the program's own sees all gradients first",
            parts.ops.custom is not None,
        ),
    )


def _why_not(of_ranks: Sequence[Any], on_one_node: bool) -> tuple[frozenset[str], str]:
    """Look for a reason against sending gradients while backward() runs.

    Args:
        of_ranks: the facts of each rank, from `Overlap._agree_on_sender`.
        on_one_node: whether all ranks are on one node.
    Returns: the device types of all ranks' parameters, and the reason; "" for no reason.
    """
    asked, thread_multiple, of_rank, devices, nbytes, masks, threads = zip(*of_ranks, strict=True)
    kinds: frozenset[str] = frozenset().union(*of_rank)
    busy = any(
        takes_a_core(on_one_node, float(cpu_share(mask, masks)), number)
        for mask, number in zip(masks, threads, strict=True)
    )
    return kinds, _first_that_holds(
        ("as asked for", False in asked),
        ("MPI was started without MPI_THREAD_MULTIPLE", not min(thread_multiple)),
        ("parameters are on several devices", max(len(kinds), *devices) > 1),
        ("parameters are on an XLA device", "xla" in kinds),
        # This entry ends the search with "": the reasons below count only on the host, and if no rank sets `overlap`.
        ("", None not in asked or not kinds <= {"cpu"}),
        (f"{nbytes[0]} bytes are too few", nbytes[0] < SMALLEST),
        ("no core of the node is free, and memory does not wait", busy),
    )


def _first_that_holds(*reasons: tuple[str, Any]) -> str:
    return next((why for why, holds in reasons if holds), "")


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])


def _without_memory(parameters: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """Return the parameters on "meta", by slot, without dropped ones."""
    return {s: p.detach().to("meta") for s, p in parameters.items() if p is not None}


def _devices_of(parameters: _Parameters, slots: Sequence[int]) -> frozenset[torch.device]:
    """Return the devices of the parameters of `slots`, without dropped ones."""
    return frozenset([p.device for slot in slots if (p := parameters[slot]) is not None])
