"""Records the function that `run` calls on XLA devices; XLA computes the recorded step after the function has ended."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mpistrat import arrays, nest
from mpistrat.liveness.call_site import raised_at
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.values import DistributedValues
from mpistrat.xla.compilations import Compilations, name_of
from mpistrat.xla.runtime import EARLY_READ, INFERENCE_MODE, ON_HOST, Runtime


class RecordedSteps:
    """Records the steps of one strategy on this rank. A step is one call of the function that a program gives to `run`.

    Args:
        step: takes the step's name; returns a context manager that records its block and starts the graph.

    Attributes:
        compilations: counts the graphs that XLA compiled for these steps.
    """

    def __init__(
        self,
        runtime: Runtime,
        group: ReplicaGroup,
        step: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._runtime = runtime
        self._step = step
        self._rank = group.communicator.rank
        self._device = group.worker_devices[0]
        self._first_replica_id = group.first_replica_id
        self.compilations = Compilations(self._rank)
        # The torch seed that XLA's generator follows, and the state of a torch generator right after that seed.
        self._seed: int | None = None
        self._seeded_state = b""

    def record(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        call: Callable[[], Any],
        brought: Callable[[], Any],
    ) -> Any:
        """Record one step and start its computation on the device.

        Called by: `RecordedReplicas.call`, for each `run`.
        Args:
            fn: the program's function; only errors and the counts of compilations use it.
            args, kwargs: the arguments that the program gave to `run`; the counts of compilations use their shapes.
            call: calls `fn` for all replicas of this rank.
            brought: returns the arguments as `fn` gets them, for an error about arrays that are not on the device.
        Returns: the result of `call`; the device may still be computing the result's tensors.
        Raises: RuntimeError if `fn` reads a value, computes with a tensor of the host, or uses torch.inference_mode().
        """
        name = name_of(fn)
        self._follow_seed()
        before = 0
        on_host = self._runtime.graphs.fallbacks()
        try:
            with _as_no_grad(), self._step(name):
                before = self._runtime.graphs.num_compilations()
                result = call()
        except RuntimeError as error:
            step_of_rank = f"rank {self._rank}: {name}"
            text = str(error)
            if EARLY_READ in text:
                left = self._runtime.graphs.fallbacks() - on_host
                explained = early_read(step_of_rank, error, [*left])
            elif ON_HOST in text:
                explained = array_on_host(step_of_rank, error, brought(), self._device)
            elif INFERENCE_MODE in text:
                explained = inference_mode(step_of_rank, error)
            else:
                raise
            # The tensor that the program tried to read has lost its value. XLA computes nothing more while a frame of
            # the error's traceback holds the tensor.
            traceback.clear_frames(error.__traceback__)
            raise RuntimeError(explained) from error
        graphs = self._runtime.graphs.num_compilations() - before
        self.compilations.note(fn, (args, kwargs), graphs)
        return result

    @property
    def random_state(self) -> int:
        """The state of XLA's random-number generator, an integer; `set_random_state` takes it."""
        self._follow_seed()
        return self._runtime.random_state()

    def set_random_state(self, state: int) -> None:
        self._remember_seed()
        self._runtime.seed(state)

    def _follow_seed(self) -> None:
        """Seed XLA's generator if the program has called `torch.manual_seed` since the last call of this method.

        XLA's seed is torch's seed plus the rank's first replica id, so that ranks draw different numbers. Called
        before each step, and before the state is read.
        """
        if self._seed != torch.initial_seed():
            self._remember_seed()
        elif _state_of(torch.default_generator) != self._seeded_state:
            return
        self._runtime.seed(torch.initial_seed() + self._first_replica_id)
        if _state_of(torch.default_generator) == self._seeded_state:
            # Moves torch's state, so that the same seed is noticed when the program sets it again.
            torch.rand((), device="cpu")

    def _remember_seed(self) -> None:
        self._seed = torch.initial_seed()
        self._seeded_state = _state_of(torch.Generator().manual_seed(self._seed))


def _state_of(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()  # compared faster than tensors


@contextlib.contextmanager
def _as_no_grad() -> Iterator[None]:
    """Return a context manager around a step: if the program is in `torch.inference_mode()`, inside is `no_grad()`.

    torch_xla does not support inference mode.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def early_read(step: str, error: BaseException, on_host: Sequence[str]) -> str:
    """Return the error text for a step that read a value before its end.

    Args:
        step: the rank and the step's name, such as "rank 0: train_step".
        on_host: names of the operations that XLA left to the host in this step.
    """
    left = f". XLA leaves to the host: {', '.join(on_host)}" if on_host else ""
    return (
        f"{step} asks inside run for a value, or for a shape that depends on values{_where(error)}: item(), "
        "float(), print, `if tensor`, nonzero(), a boolean mask, torch.compile, a GradScaler and LBFGS ask. But run "
        "records operations first and computes them later. Return the tensor and read it after run, and use "
        f"torch.where for masks{left}"
    )


def inference_mode(step: str, error: BaseException) -> str:
    """Return the error text for a step that used torch.inference_mode() inside `run`."""
    return (
        f"{step} uses torch.inference_mode() inside run{_where(error)}, which torch_xla is not made for: use "
        f"torch.no_grad() there, or inference_mode() around run ({error})"
    )


def array_on_host(step: str, error: BaseException, arguments: Any, device: str) -> str:
    """Return the error text for a step that computed with an array that is not on `device`.

    The text names the arguments that are not on XLA devices, or says that no argument is the cause.

    Args:
        step: the rank and the step's name, such as "rank 0: train_step".
        arguments: a nest of one replica's arguments. Distributed values among them count as being on the device.
        device: the rank's device, such as "xla:0".
    """
    leaves = [
        leaf
        for leaf in nest.flatten(arguments)
        if arrays.is_array(leaf) or isinstance(leaf, DistributedValues)
    ]
    found = [
        f"argument array {i} ({arrays.described(leaf)})"
        for i, leaf in enumerate(leaves)
        if arrays.is_array(leaf) and not arrays.is_on_xla(leaf)
    ]
    which = f": {', '.join(found)}" if found else ", which is none of its arguments"
    return (
        f"{step} computes with an array of the host{_where(error)}{which}. A distributed dataset brings batches to the "
        f"device; bring other tensors there by .to({device!r}), strategy.extended.worker_devices[0], and make them "
        f"there with device= ({error})"
    )


def _where(error: BaseException) -> str:
    where = raised_at(error)
    if where:
        return f", at {where}"
    return ""
