"""The arguments that the constructors of several strategies take."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpistrat.cross_device_ops import CrossDeviceOps
from mpistrat.options import CommunicationOptions
from mpistrat.wire_formats import name_of

GRADIENTS = ("sum", "mean")
CHECKS = ("always", "never")


@dataclasses.dataclass(frozen=True)
class StrategyArguments:
    """The arguments of a strategy's constructor, checked. The docstring of `MirroredStrategy` describes them.

    `options` is its `communication_options`; the other names are the same.

    Raises: ValueError if an argument is of the wrong kind, or if `deterministic` excludes another argument.
    """

    options: CommunicationOptions | None = None
    gradients: str | None = None
    check: str = "always"
    torch_distributed: bool = False
    deterministic: bool = False
    shared_parameters: bool = False
    cross_device_ops: CrossDeviceOps | None = None

    def __post_init__(self) -> None:
        gradients = self.gradients
        for name in ("torch_distributed", "deterministic", "shared_parameters"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.60}")
        if not _is_one_of(CHECKS, self.check):
            raise ValueError(f"check must be one of {CHECKS}, got {self.check!r:.60}")
        if not isinstance(self.options, CommunicationOptions | None):
            raise ValueError(
                f"communication_options must be CommunicationOptions, got {self.options!r:.60}"
            )
        if gradients is not None and not _is_one_of(GRADIENTS, gradients):
            raise ValueError(
                "gradients must be 'sum' (scale the loss with compute_average_loss) or 'mean' (as DDP), or "
                f"None; got {gradients!r:.60}"
            )
        if not isinstance(self.cross_device_ops, CrossDeviceOps | None):
            raise ValueError(
                f"cross_device_ops must be a CrossDeviceOps, got {self.cross_device_ops!r:.60}"
            )
        if self.deterministic:
            self._check_deterministic()

    def _check_deterministic(self) -> None:
        if self.cross_device_ops is not None:
            raise ValueError(
                "deterministic=True fixes the order in which replicas are added up, and a cross_device_ops of your own "
                "chooses another order: give one of them"
            )
        if self.has_wire_format:
            raise ValueError(
                "deterministic=True keeps every bit of a sum, and wire_dtype and wire_format leave bits out: give one "
                "of them"
            )

    @property
    def has_wire_format(self) -> bool:
        """Whether `options` ask for a wire format: to send sums with fewer bits than float32."""
        options = self.options
        return bool(options and (options.wire_dtype or options.wire_format))

    def check_shared_parameters(self, replicas: int) -> None:
        """Check that ranks can share the parameters of torch modules. Args: replicas: number of replicas of this rank.

        Raises: ValueError for several replicas, with `deterministic`, or with a wire format.
        """
        if replicas > 1:
            raise ValueError(
                f"shared_parameters=True takes one replica per rank, got {replicas} devices; the replicas of one rank "
                "share their parameters anyway"
            )
        if self.deterministic:
            raise ValueError(
                "shared_parameters=True adds up in the order of the ranks, deterministic=True in the order of a tree: "
                "leave one of them out"
            )
        if self.has_wire_format:
            raise ValueError(
                "shared_parameters=True sends sums between nodes as they are; leave out wire_dtype and wire_format"
            )

    def __str__(self) -> str:
        """Return the arguments that must be equal on all ranks, as a text that `strategy_parts.agree` compares."""
        text = f"gradients={self.gradients!r}"
        for name in ("shared_parameters", "torch_distributed"):
            if getattr(self, name):
                text += f", {name}=True"
        text += f", {self.options}"
        if self.options is not None and self.options.wire_format is not None:
            text += f" {name_of(self.options.wire_format)}"
        return text


def _is_one_of(names: tuple[str, ...], value: Any) -> bool:
    return isinstance(value, str) and value in names
