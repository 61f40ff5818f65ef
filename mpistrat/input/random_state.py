"""Saves and restores the random generators that samplers draw from, so that an epoch can be repeated in its order."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.utils.data as data

from mpistrat.arrays import default_device
from mpistrat.input import generator_states
from mpistrat.machine.devices import torch_accelerator


def samplers_of(loader: data.DataLoader[Any]) -> list[Any]:
    """Return the loader's samplers and their inner samplers, each once."""
    found: dict[int, Any] = {}
    for sampler in (loader.sampler, loader.batch_sampler):
        while sampler is not None and id(sampler) not in found:
            found[id(sampler)] = sampler
            sampler = getattr(sampler, "sampler", None)
    return [*found.values()]


class RandomState:
    """The generators that a loader's samplers may use: torch's, Python's and NumPy's, and the generators given to them.

    Attributes:
        schema: the form of a state, for `checkpoint.schema`.
        began: the generators' states when the last epoch began, picklable; None before the first epoch.
    """

    schema: ClassVar[dict[str, Any]] = {
        "torch": generator_states.of_torch,
        "python": generator_states.of_python,
        "numpy": generator_states.of_numpy,
        "own": [generator_states.of_torch_device],
    }

    def __init__(self, loader: data.DataLoader[Any]) -> None:
        self._of_owners: list[torch.Generator] = []
        for owner in (loader, *samplers_of(loader)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                self._of_owners.append(generator)
        # Samplers without a generator draw from the generator of the default device.
        default: Any = default_device()
        self._devices = [default] if getattr(default, "type", None) == torch_accelerator() else []
        self.began: dict[str, Any] | None = None
        self._begin_at = dict[str, Any]()
        self._in_epoch = False

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether `state` has a generator state of the default device if this program draws from one, and else none.

        If False, samplers draw another order than the program that saved `state`.
        """
        return len(state.get("devices", ())) == len(self._devices)

    def begin_at(self, state: dict[str, Any] | None, steps: int) -> None:
        """Let the next epoch begin with the generators in `state`, a value of `began` or `now()`.

        Args:
            state: None leaves the generators as they are.
            steps: number of steps of this epoch that are done. With 0 the state was saved between two epochs. If the
                program then seeds a generator, or draws from it, before the epoch, its own numbers count.
        """
        present = self.capture()
        saved = state or {}
        self.put_back({**present, "own": saved.get("own", present["own"])})
        self._begin_at = saved
        self._in_epoch = bool(steps)
        self.remember()
        generator_states.loaded.add(self)

    def remember(self) -> None:
        """Remember the present states, to see later whether the program has used a generator since."""
        self._restored = self.capture()

    @contextmanager
    def of_epoch(self) -> Iterator[None]:
        """A context around `iter(loader)` and the first batch, where samplers draw their order. It sets `began`.

        After `begin_at(state)` it sets the generators to `state`, and at its end puts the global generators back. But a
        generator that is in `state` already goes on from there, as do the samplers' own: the state was saved between
        two epochs, and this is the first draw after it.
        """
        self.began = self.now()
        if not self._begin_at:
            yield
            return
        before = {**self.capture(), "own": self.began["own"]}
        self._begin_at = {}
        self.put_back(self.began)
        try:
            yield
        finally:
            drawn = self.capture()
            for name, began in self.began.items():
                if _text(began) != _text(before[name]):
                    drawn[name] = before[name]
            self.put_back(drawn)

    def now(self) -> dict[str, Any]:
        """Return the states at the next epoch's beginning: those of `begin_at`, or else the present states."""
        present = self.capture()
        for name, saved in self._begin_at.items():
            if self._in_epoch or _text(present[name]) == _text(self._restored[name]):
                present[name] = saved
        return present

    def capture(self) -> dict[str, Any]:
        """Return the present states of the generators."""
        name, words, *others = cast("Any", np.random.get_state())
        return {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": [name, words.tolist(), *others],  # torch.load refuses NumPy arrays
            "own": [generator.get_state() for generator in self._of_owners],
            "devices": [torch.get_device_module(d).get_rng_state(d) for d in self._devices],
        }

    def put_back(self, state: dict[str, Any]) -> None:
        """Set the generators to `state`, a result of `capture`, or a saved one."""
        torch.set_rng_state(state["torch"])
        for device, device_state in zip(self._devices, state.get("devices", ()), strict=False):
            torch.get_device_module(device).set_rng_state(device_state, device)
        random.setstate(state["python"])
        np.random.set_state(tuple(state["numpy"]))
        for generator, generator_state in zip(self._of_owners, state["own"], strict=True):
            generator.set_state(generator_state)


def _text(generator_state: Any) -> str:
    return json.dumps(generator_state, default=torch.Tensor.tolist)
