"""Values on the cores of a rank: one for each, under one name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpistrat.xla.runtime import Runtime


class CoreValues:
    """What the cores of one rank hold under one name, and how it is summed, spread and read.

    Args:
        groups: the numbers, among all devices that XLA knows, of each rank's cores.
        count: this rank's cores.
        inside: whether a step is being recorded.
    """

    def __init__(
        self,
        runtime: Runtime,
        groups: Sequence[Sequence[int]],
        count: int,
        inside: Callable[[], bool],
    ) -> None:
        self._layouts, self._num_all_devices = runtime.layouts, runtime.num_all_devices
        self._device = runtime.device(0)
        self._groups, self._count, self._inside = groups, count, inside
        self._numbers: Any = None

    def scatter(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The replicas' values, on the host, each on its core: of the shape of one.

        Raises: ValueError when they differ in shape or dtype.
        """
        shape, dtype = values[0].shape, values[0].dtype
        for number, value in enumerate(values):
            if value.shape != shape or value.dtype != dtype:
                raise ValueError(
                    f"the replicas of a rank run one program, so their values must be alike: replica 0 has {dtype} of "
                    f"{list(shape)}, replica {number} of this rank {value.dtype} of {list(value.shape)}. Leave out a "
                    "last batch that cannot be split evenly (DataLoader(drop_last=True)), or start one rank per core"
                )
        rows = [value.detach().cpu().unsqueeze(0) for value in values]
        sharding = self._rows(len(shape))
        whole = self._layouts.from_rows(rows, sharding, (self._num_all_devices, *shape))
        return self._layouts.part_of(whole).reshape(shape)

    def deal_out(self, whole: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor that each core has computed, or could, each to its core."""
        spread = self._layouts.spread_copy(whole, self._rows(whole.ndim - 1))
        return self._layouts.part_of(spread).reshape(whole.shape[1:])

    def rows(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The value of each core of this rank, on all of them. Inside a step, or outside."""
        is_here = (torch.arange(self._count, device=self._device) == self.number()).view(
            self._count, *(1,) * value.ndim
        )
        # A sum in which all cores but one have zeros: to cut a spread tensor apart is what GSPMD does badly, if at all.
        number = value.detach().to(torch.uint8) if value.dtype == torch.bool else value.detach()
        table = self._sum(torch.where(is_here, number.unsqueeze(0), torch.zeros_like(number)))
        if not self._inside():
            table = self.whole(table, table.shape)
        return list(table.to(value.dtype).unbind(0))

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all cores of this rank, on each of them. Inside a step, or outside."""
        return self._sum(self.each_its_own(value.detach()))

    def each_its_own(self, value: torch.Tensor) -> torch.Tensor:
        """`value` as each core's own: an operation with a number that differs between cores tells GSPMD so.

        Where GSPMD has to find that out from later operations, such as a conversion of the dtype, it ends the process.
        """
        return torch.where(self.number() >= 0, value, torch.zeros_like(value))

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        return self._layouts.reduce_over_devices("sum", value, self._groups)

    def number(self) -> torch.Tensor:
        """Which replica of this rank a core is; int64, of no dimension. Inside a step, or outside."""
        if self._numbers is None:
            numbers = [torch.tensor([i], device="cpu") for i in range(self._count)]
            shape = (self._num_all_devices,)
            self._numbers = self._layouts.from_rows(numbers, self._rows(0), shape)
        return self._layouts.part_of(self._numbers).reshape(())

    def _rows(self, ndim: int) -> Any:
        """Of a tensor with a row for each core of all ranks, of `ndim` more dimensions."""
        return self._layouts.sharding((self._num_all_devices,), (0, *(None,) * ndim))

    def whole(self, value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A tensor that all cores are said to share, made of the value that each core has."""
        everywhere = self._layouts.sharding((self._num_all_devices,), (None,) * len(shape))
        return self._layouts.whole_of(value.clone(), everywhere, shape)
