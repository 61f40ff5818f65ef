"""Counts the TPU chips of this host, without a TPU library and before PJRT is configured."""

from __future__ import annotations

import contextlib
from pathlib import Path

_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"  # Google's PCI vendor id
_CORES = {  # number of XLA devices, by PCI device id
    "0x0027": 2,  # v2, v3
    "0x005e": 1,  # v4
    "0x0062": 1,  # v5p
    "0x0063": 1,  # v5e
    "0x006f": 1,  # v6e
    "0x0076": 1,  # half a chip of v7x
}


def local_cores(devices: Path = _DEVICES) -> int:
    """Return the number of XLA devices (cores) of this host's TPU chips; 0 if the host has no known TPU chip.

    Args: devices: the folder of sysfs with an entry for each PCI device.
    """
    found = 0
    for device in devices.glob("*"):
        with contextlib.suppress(OSError):  # the device was just removed, or may not be read
            if (device / "vendor").read_text().strip() == _GOOGLE:
                found += _CORES.get((device / "device").read_text().strip(), 0)
    return found
