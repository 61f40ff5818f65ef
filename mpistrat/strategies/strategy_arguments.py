"""The arguments that the constructors of several strategies take."""

from __future__ import annotations

import dataclasses

from mpistrat.cross_device_ops import CrossDeviceOps
from mpistrat.options import CommunicationOptions

GRADIENTS = ("sum", "mean")
CHECKS = ("always", "never")


@dataclasses.dataclass(frozen=True)
class StrategyArguments:
    """The arguments of a strategy's constructor, as `MirroredStrategy` describes them.

    Raises: ValueError for arguments of the wrong kind.
    """

    options: CommunicationOptions | None = None
    gradients: str | None = None
    check: str = "always"
    torch_distributed: bool = False
    deterministic: bool = False
    shared_parameters: bool = False
    cross_device_ops: CrossDeviceOps | None = None

    def __post_init__(self) -> None:
        for name in ("torch_distributed", "deterministic", "shared_parameters"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.60}")
        options, gradients, check = self.options, self.gradients, self.check
        deterministic, cross_device_ops = self.deterministic, self.cross_device_ops
        if not (isinstance(check, str) and check in CHECKS):
            raise ValueError(f"check must be one of {CHECKS}, got {check!r:.60}")
        if options is not None and not isinstance(options, CommunicationOptions):
            raise ValueError(
                f"communication_options must be CommunicationOptions, got {options!r:.60}"
            )
        if gradients is not None and not (isinstance(gradients, str) and gradients in GRADIENTS):
            raise ValueError(
                "gradients must be 'sum' (scale the loss with compute_average_loss) or 'mean' (as DDP), or "
                f"None; got {gradients!r:.60}"
            )
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise ValueError(
                f"cross_device_ops must be a CrossDeviceOps, got {cross_device_ops!r:.60}"
            )
        if deterministic and cross_device_ops is not None:
            raise ValueError(
                "deterministic=True fixes the order in which replicas are added up; with a cross_device_ops of your "
                "own that order is yours: give one of them"
            )
        if deterministic and options is not None and (options.wire_dtype or options.wire_format):
            raise ValueError(
                "deterministic=True keeps every bit of a sum, which wire_dtype and wire_format leave out: give one of "
                "them"
            )
