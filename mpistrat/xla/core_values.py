"""Values that differ between the cores of a rank, though the program holds them in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpistrat.xla.runtime import Runtime


class CoreValues:
    """Copies values to the cores of a rank, and sums and reads tensors with a different value on each core.

    One program runs on all cores of the rank; it holds one torch tensor, and each core has its own value of the tensor.
    Args:
        groups: for each rank, the numbers of its cores among all devices that XLA knows.
        count: number of cores of this rank.
        inside: returns whether a step (one call of `run`'s function) is being recorded.
    """

    def __init__(
        self,
        runtime: Runtime,
        groups: Sequence[Sequence[int]],
        count: int,
        inside: Callable[[], bool],
    ) -> None:
        self._layouts = runtime.layouts
        self._num_all_devices = runtime.num_all_devices
        self._mesh = (runtime.num_all_devices,)
        self._device = runtime.device(0)
        self._groups = groups
        self._count = count
        self._inside = inside
        self._numbers: Any = None

    def scatter(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy the replicas' tensors from the host to the cores: `values[i]` to core i of this rank.

        Returns: one tensor, of the shape of `values[0]`; its value on core i is `values[i]`.
        Raises: ValueError if the values differ in shape or dtype.
        """
        shape = values[0].shape
        dtype = values[0].dtype
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
        """Give each core its row of `whole`. Every core has, or can compute, all rows, so no row moves.

        Args: whole: a tensor of shape [cores of all ranks, …].
        Returns: a tensor of the shape of one row; its value on each core is the core's row.
        """
        spread = self._layouts.spread_copy(whole, self._rows(whole.ndim - 1))
        return self._layouts.part_of(spread).reshape(whole.shape[1:])

    def rows(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return a list with the value that `value` has on each core, in the order of this rank's cores.

        Works inside and outside a step; inside, every core can compute with all of the list's tensors.
        Returns: one tensor per core, of the shape and dtype of `value`, without autograd history.
        """
        numbers = torch.arange(self._count, device=self._device)
        shape = (self._count, *(1,) * value.ndim)
        is_here = (numbers == self.number()).view(shape)
        # Each core makes a table with its value in its row and zeros in the other rows; the sum of these tables has all
        # values. This is done because GSPMD handles slices of a spread tensor badly, or not at all.
        number = value.detach()
        if value.dtype == torch.bool:
            number = number.to(torch.uint8)
        own_table = torch.where(is_here, number.unsqueeze(0), torch.zeros_like(number))
        table = self._sum(own_table)
        if not self._inside():
            table = self.whole(table, table.shape)
        return list(table.to(value.dtype).unbind(0))

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of `value` over all cores of this rank, as a new tensor that is equal on these cores.

        Works inside and outside a step. The sum has no autograd history.
        """
        return self._sum(self.each_its_own(value.detach()))

    def each_its_own(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor equal to `value` that GSPMD treats as each core's own value.

        The tensor is the result of an operation with the core's number, which differs between cores. Without it, GSPMD
        would have to infer this from later operations, such as a conversion of the dtype, and it then ends the process.
        """
        return torch.where(self.number() >= 0, value, torch.zeros_like(value))

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        return self._layouts.reduce_over_devices("sum", value, self._groups)

    def number(self) -> torch.Tensor:
        """Return an int64 tensor of shape []; on each core, its value is the core's number on this rank, from 0.

        Works inside and outside a step.
        """
        if self._numbers is None:
            numbers = [torch.tensor([i], device="cpu") for i in range(self._count)]
            shape = (self._num_all_devices,)
            self._numbers = self._layouts.from_rows(numbers, self._rows(0), shape)
        return self._layouts.part_of(self._numbers).reshape(())

    def _rows(self, ndim: int) -> Any:
        """Return the layout that puts row i of a tensor on core i of all ranks' cores.

        Args: ndim: number of the tensor's dimensions after the first.
        """
        return self._layouts.sharding(self._mesh, (0, *(None,) * ndim))

    def whole(self, value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return a copy of `value` that XLA takes for one tensor shared by all cores. Each core keeps its own data.

        Args: shape: the shape of `value`.
        """
        everywhere = self._layouts.sharding(self._mesh, (None,) * len(shape))
        return self._layouts.whole_of(value.clone(), everywhere, shape)
