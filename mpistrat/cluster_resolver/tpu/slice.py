"""The description of a slice of TPU chips: its hosts, the chips of each host, and this host's worker id."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

Bounds = tuple[int, int, int]

# "v4-16", "v5litepod-16", "v5p-8", "v6e-4", "tpu7x-32": a generation, and the slice's number of cores or chips
_ACCELERATOR_TYPE = re.compile(r"(?:v|tpu)([0-9]{1,2})([A-Za-z]{0,7})-(?!0+$)([0-9]{1,6})")
_COUNTED_BY_CORES = ("2", "3", "4", "5p", "7x")  # v4-16 is 16 cores on 8 chips
_COUNTED_BY_CHIPS = ("5e", "5lite", "5litepod", "6e")  # v5litepod-16 is 16 chips
# By generation; other generations have 1.
_UNITS_OF_CHIP = {7: 2}
_CORES_OF_CHIP = {2: 2, 3: 2, 7: 2}


@dataclass(frozen=True)
class TPUSlice:
    """A TPU slice as one of its hosts sees it. Equal on all hosts of the slice except for `worker_id`.

    The hosts form a box of `host_bounds`, and each host's chips form a box of `chips_per_host_bounds`. A v4-16 has
    (1, 1, 2) hosts with (2, 2, 1) chips each, so (2, 2, 2) chips in all.

    Attributes:
        accelerator_type: the type, such as "v4-16".
        host_bounds: number of hosts along each of three axes.
        chips_per_host_bounds: number of chips of a host along each of three axes.
        worker_id: the number of this host in the slice, from 0.
        addresses: names or IP addresses of all hosts, by worker id; may be empty for one host.
        name, zone, project: the names of the TPU, of its zone and of its project; "" if not known.
    Raises: ValueError if the type cannot be read, or if the numbers contradict each other.
    """

    accelerator_type: str
    host_bounds: Bounds
    chips_per_host_bounds: Bounds
    worker_id: int = 0
    addresses: tuple[str, ...] = ()
    name: str = ""
    zone: str = ""
    project: str = ""

    def __post_init__(self) -> None:
        kind = self.accelerator_type
        hosts = self.num_hosts
        addresses = self.addresses
        expected = _possible_chips(kind)
        chips = hosts * self.chips_per_host
        if chips not in expected:
            right = " or ".join(str(number) for number in expected)
            raise ValueError(
                f"{kind} has {right} chips, but {hosts} hosts "
                f"(bounds {bounds_text(self.host_bounds)}) of {self.chips_per_host} chips (bounds "
                f"{bounds_text(self.chips_per_host_bounds)}) have {chips}: the bounds "
                "of hosts times those of each host's chips must give the chips of the slice"
            )
        if not 0 <= self.worker_id < hosts:
            raise ValueError(
                f"worker id {self.worker_id} is not one of the {hosts} hosts of a {kind}, 0..{hosts - 1}"
            )
        if len(addresses) != hosts and (addresses or hosts > 1):
            raise ValueError(
                f"{len(addresses)} addresses {list(addresses)!r:.200} for the {hosts} hosts of a "
                f"{kind}: give one for each host, in the order of their worker ids"
            )

    @property
    def version(self) -> int:
        """The generation: 4 for a "v4-16"."""
        return int(_parts(self.accelerator_type)[0])

    @property
    def num_hosts(self) -> int:
        return math.prod(self.host_bounds)

    @property
    def chips_per_host(self) -> int:
        return math.prod(self.chips_per_host_bounds)

    @property
    def units_per_host(self) -> int:
        """The number of chips of each host, as TPU_VISIBLE_CHIPS counts them: in generation 7, each half is a chip."""
        return self.chips_per_host * _UNITS_OF_CHIP.get(self.version, 1)

    @property
    def cores_per_host(self) -> int:
        """The number of XLA devices of each host: two per chip in the generations 2, 3 and 7, else one."""
        return self.chips_per_host * _CORES_OF_CHIP.get(self.version, 1)


def parse_bounds(text: str) -> Bounds:
    """Return the three numbers in a text such as "2,2,1": (2, 2, 1).

    Raises: ValueError if `text` is not three numbers from 1 to 9999 with commas between.
    """
    if not re.fullmatch(r"[1-9][0-9]{0,3}(,[1-9][0-9]{0,3}){2}", text):
        raise ValueError(
            f"bounds must be three numbers from 1 on, such as '2,2,1', got {text!r:.80}"
        )
    x, y, z = map(int, text.split(","))
    return x, y, z


def bounds_text(bounds: tuple[int, ...]) -> str:
    return ",".join(str(bound) for bound in bounds)


def bounds_of_type(accelerator_type: str) -> tuple[Bounds, Bounds] | None:
    """Return the boxes of a v2 or v3 slice: (bounds of the hosts, bounds of each host's chips).

    A v2 or v3 host has 2 x 2 chips. The hosts form a square or half a square: a v3-64 has 8 hosts, (2, 4, 1).
    Args: accelerator_type: the slice's type, such as "v3-64".
    Returns: None for other generations, because their type does not determine the bounds.
    Raises: ValueError if the type cannot be read.
    """
    version, _, number = _parts(accelerator_type)
    if int(version) > 3:
        return None
    doublings = max(number // 8, 1).bit_length() - 1
    of_shorter_side = doublings // 2
    hosts = (2**of_shorter_side, 2 ** (doublings - of_shorter_side), 1)
    return hosts, (2, 2, 1)


def _parts(accelerator_type: str) -> tuple[str, str, int]:
    """Return (generation, variant, number of cores or chips) of a type: ("5", "litepod", 16) for "v5litepod-16".

    Raises: ValueError if the type cannot be read.
    """
    match = _ACCELERATOR_TYPE.fullmatch(accelerator_type)
    if match is None:
        raise ValueError(
            f"{accelerator_type!r:.80} is no accelerator type: expected one such as v4-16, v5litepod-16 or v5p-8"
        )
    return match[1], match[2], int(match[3])


def _possible_chips(accelerator_type: str) -> tuple[int, ...]:
    version, variant, number = _parts(accelerator_type)
    family = f"{int(version)}{variant.lower()}"
    if family in _COUNTED_BY_CHIPS:
        return (number,)
    if family in _COUNTED_BY_CORES:
        return (max(number // 2, 1),)
    return (max(number // 2, 1), number)  # the table lacks newer generations
