"""Gradients that a program uses inside `backward()`, before they are reduced: its ranks would drift apart."""

from __future__ import annotations

import torch

from mpistrat.pytorch.modules.registry import Registry


class Arrivals:
    """The gradients that arrive in one backward of one replica.

    Args:
        registry: of the mirrored parameters.

    Attributes:
        made_in_run: names of parameters, made inside `run`, that have got gradients.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # Each parameter, its version, and whether it has its gradient still: buckets take gradients.
        self._seen: list[tuple[torch.Tensor, int, bool]] = []
        self.made_in_run: list[str] = []

    def add(self, parameter: torch.Tensor) -> None:
        """The gradient of `parameter` has arrived, and no hook of the program has seen it."""
        self._seen.append((parameter, parameter._version, parameter.grad is not None))

    def check(self, written: frozenset[int], *, in_run: bool) -> None:
        """The engine has ended, and nothing is reduced yet.

        Args:
            written: ids of the parameters whose memory was written through `.data`.
            in_run: inside `run`, and not in a `replica()`, where whole programs live.
        Raises:
            RuntimeError: a parameter was updated, or its gradient is gone, or no strategy keeps it equal.
        """
        for parameter, version, had_gradient in self._seen:
            is_gone = had_gradient and parameter.grad is None
            if is_gone or parameter._version != version or id(parameter) in written:
                happened = "lost its gradient" if is_gone else "was changed"
                raise RuntimeError(
                    f"parameter {self._registry.name_of(parameter)} {happened} inside backward(), before gradients are "
                    "reduced over replicas: with a gradient of its own each rank would make another update. Update "
                    "parameters after backward(); or call backward() inside strategy.no_sync(), and give the hook's "
                    "gradient to get_replica_context().all_reduce first"
                )
        if in_run and self.made_in_run:
            raise RuntimeError(
                f"backward() inside run reached {self.made_in_run[0]}, of a module that was made inside run: it is no "
                "variable of the strategy, so nothing keeps it equal on all ranks. Build the module before run, in "
                "strategy.scope(); or use torch.autograd.grad where each replica is to have a module of its own"
            )
