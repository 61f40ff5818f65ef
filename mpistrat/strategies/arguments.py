"""The arguments that the constructors of several strategies take."""

from __future__ import annotations

from mpistrat.cross_device_ops import CrossDeviceOps
from mpistrat.options import CommunicationOptions

GRADIENTS = ("sum", "mean")
CHECKS = ("always", "never")


def check_strategy_arguments(
    options: CommunicationOptions | None,
    gradients: str | None,
    cross_device_ops: CrossDeviceOps | None = None,
    check: str = "always",
    deterministic: bool = False,
    torch_distributed: bool = False,
) -> None:
    """ValueError for arguments of the wrong kind."""
    if not isinstance(torch_distributed, bool):
        raise ValueError(f"torch_distributed must be True or False, got {torch_distributed!r:.60}")
    if not isinstance(deterministic, bool):
        raise ValueError(f"deterministic must be True or False, got {deterministic!r:.60}")
    if not (isinstance(check, str) and check in CHECKS):
        raise ValueError(f"check must be one of {CHECKS}, got {check!r:.60}")
    if options is not None and not isinstance(options, CommunicationOptions):
        raise ValueError(f"communication_options must be CommunicationOptions, got {options!r:.60}")
    if gradients is not None and not (isinstance(gradients, str) and gradients in GRADIENTS):
        raise ValueError(
            "gradients must be 'sum' (scale the loss with compute_average_loss) or 'mean' (as DDP), or "
            f"None; got {gradients!r:.60}"
        )
    if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
        raise ValueError(f"cross_device_ops must be a CrossDeviceOps, got {cross_device_ops!r:.60}")
    if deterministic and cross_device_ops is not None:
        raise ValueError(
            "deterministic=True fixes the order in which replicas are added up; with a cross_device_ops of your own "
            "that order is yours: give one of them"
        )
    if deterministic and options is not None and (options.wire_dtype or options.wire_format):
        raise ValueError(
            "deterministic=True keeps every bit of a sum, which wire_dtype and wire_format leave out: give one of them"
        )
