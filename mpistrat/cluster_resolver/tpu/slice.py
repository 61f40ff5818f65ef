"""A slice of TPU chips: how many hosts, how many chips each, and which of the hosts this is."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

Bounds = tuple[int, int, int]

# "v4-16", "v5litepod-16", "v5p-8", "v6e-4", "tpu7x-32": a generation, and how many cores or chips the slice has
_ACCELERATOR_TYPE = re.compile(r"(?:v|tpu)([0-9]{1,2})([A-Za-z]{0,7})-([0-9]{1,6})")
_COUNTED_BY_CORES = ("2", "3", "4", "5p", "7x")  # v4-16 is 16 cores on 8 chips
_COUNTED_BY_CHIPS = ("5e", "5lite", "5litepod", "6e")  # v5litepod-16 is 16 chips
# By generation; of others, one.
_UNITS_OF_CHIP = {7: 2}
_CORES_OF_CHIP = {2: 2, 3: 2, 7: 2}


@dataclass(frozen=True)
class TPUSlice:
    """Equal on all hosts of the slice except for `worker_id`.

    Hosts form a box of `host_bounds`, and the chips of each host one of `chips_per_host_bounds`: a v4-16 is
    (1, 1, 2) hosts of (2, 2, 1) chips, (2, 2, 2) chips in all.

    Attributes:
        worker_id: the number of this host.
        addresses: names or IP addresses of all hosts, in the order of their worker ids; may be empty for one host.
        name, zone, project: of the TPU, where they are known.
    Raises: ValueError when the type cannot be read, or the numbers contradict each other.
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
        expected = _possible_chips(self.accelerator_type)
        if self.num_hosts * self.chips_per_host not in expected:
            raise ValueError(
                f"{self.accelerator_type} has {' or '.join(map(str, expected))} chips, but {self.num_hosts} hosts "
                f"(bounds {bounds_text(self.host_bounds)}) of {self.chips_per_host} chips (bounds "
                f"{bounds_text(self.chips_per_host_bounds)}) have {self.num_hosts * self.chips_per_host}: the bounds "
                "of hosts times those of each host's chips must give the chips of the slice"
            )
        if not 0 <= self.worker_id < self.num_hosts:
            raise ValueError(
                f"worker id {self.worker_id} is not one of the {self.num_hosts} hosts of a {self.accelerator_type}, "
                f"0..{self.num_hosts - 1}"
            )
        if len(self.addresses) != self.num_hosts and (self.addresses or self.num_hosts > 1):
            raise ValueError(
                f"{len(self.addresses)} addresses {list(self.addresses)!r:.200} for the {self.num_hosts} hosts of a "
                f"{self.accelerator_type}: give one for each host, in the order of their worker ids"
            )

    @property
    def version(self) -> int:
        """The generation: 4 for a v4-16."""
        return int(_parts(self.accelerator_type)[0])

    @property
    def num_hosts(self) -> int:
        return math.prod(self.host_bounds)

    @property
    def chips_per_host(self) -> int:
        return math.prod(self.chips_per_host_bounds)

    @property
    def units_per_host(self) -> int:
        """What TPU_VISIBLE_CHIPS counts: chips; halves of chips from the 7th generation on, which are devices each."""
        return self.chips_per_host * _UNITS_OF_CHIP.get(self.version, 1)

    @property
    def cores_per_host(self) -> int:
        """XLA devices of each host: two for a chip of the generations 2, 3 and 7, else one."""
        return self.chips_per_host * _CORES_OF_CHIP.get(self.version, 1)


def parse_bounds(text: str) -> Bounds:
    """(2, 2, 1) of "2,2,1". Raises: ValueError for anything but three numbers from 1 on."""
    if not re.fullmatch(r"[1-9][0-9]{0,3}(,[1-9][0-9]{0,3}){2}", text):
        raise ValueError(
            f"bounds must be three numbers from 1 on, such as '2,2,1', got {text!r:.80}"
        )
    x, y, z = map(int, text.split(","))
    return x, y, z


def bounds_text(bounds: tuple[int, ...]) -> str:
    return ",".join(map(str, bounds))


def bounds_of_type(accelerator_type: str) -> tuple[Bounds, Bounds] | None:
    """Bounds of hosts, and of each host's chips, where the type alone tells them: v2 and v3. Else None.

    Their hosts have 2 x 2 chips, and are a square or half of one: a v3-64 has 8, (2, 4, 1).
    """
    version, _, number = _parts(accelerator_type)
    if int(version) > 3:
        return None
    doublings = max(number // 8, 1).bit_length() - 1
    return (2 ** (doublings // 2), 2 ** (doublings - doublings // 2), 1), (2, 2, 1)


def _parts(accelerator_type: str) -> tuple[str, str, int]:
    """("5", "litepod", 16) of "v5litepod-16"."""
    match = _ACCELERATOR_TYPE.fullmatch(accelerator_type)
    if not match or int(match[3]) < 1:
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
    return (max(number // 2, 1), number)  # a generation that is newer than this table
