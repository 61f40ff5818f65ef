"""Records the function that `run` calls on XLA devices; XLA computes the recorded step after the function has ended."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mpistrat.replicas.group import ReplicaGroup
from mpistrat.xla import step_errors
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
                explained = step_errors.early_read(step_of_rank, error, [*left])
            elif ON_HOST in text:
                explained = step_errors.array_on_host(step_of_rank, error, brought(), self._device)
            elif INFERENCE_MODE in text:
                explained = step_errors.inference_mode(step_of_rank, error)
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
