"""A strategy with one replica on one device."""

from __future__ import annotations

from mpistrat.machine.devices import check_device
from mpistrat.strategies.replicated import ReplicatedExtended
from mpistrat.strategies.strategy_parts import one_replica
from mpistrat.strategy import Strategy


class OneDeviceStrategy(Strategy):
    """One replica on one device, for a program that also runs on many devices. It communicates with no other rank.

    Args:
        device: "cpu", "cpu:0", "cuda:1", …

    Example:
        >>> strategy = ms.OneDeviceStrategy("cpu")
        >>> strategy.run(lambda x: 2 * x, args=(np.arange(3),))
        array([0, 2, 4])
    """

    def __init__(self, device: str) -> None:
        parts = one_replica(self, check_device(device))
        super().__init__(ReplicatedExtended(self, parts))
