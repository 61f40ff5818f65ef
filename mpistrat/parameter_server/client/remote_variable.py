"""Variables whose arrays are on servers: whole ones, and those whose rows are on several servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.context import AnyStrategy, current_local_replica
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.client.client import Address, Change, Client
from mpistrat.reduce_op import VariableAggregation, VariableSynchronization
from mpistrat.variables.sharded import ShardedVariable
from mpistrat.variables.updates import fitting_operand, out_of_bounds
from mpistrat.variables.variable import Variable, check_strategy


class RemoteVariable(Variable):
    """One array on a server, which every worker reads and changes.

    `read_value` copies the array. What was read before stays what it was. The server makes an update at once and whole,
    between those of other workers. An update returns the value then where the array is small (4 KB), else the variable,
    which reads as what it is when it is used.

    Attributes:
        address: of the array.
        device: the server, such as "/job:ps/replica:0/task:1/device:CPU:0".
    """

    def __init__(
        self,
        strategy: AnyStrategy,
        client: Client,
        address: Address,
        trainable: bool = True,
        synchronization: VariableSynchronization = VariableSynchronization.ON_WRITE,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        self.strategy, self.address = strategy, address
        self.name, self.trainable = address.name, trainable
        self.synchronization, self.aggregation = synchronization, aggregation
        self._client = client

    @property
    def shape(self) -> tuple[int, ...]:
        return self.address.spec.shape

    @property
    def dtype(self) -> Any:
        return self.address.spec.native_dtype

    @property
    def device(self) -> str:
        task = self._client.routes.servers.index(self.address.server)
        return f"/job:ps/replica:0/task:{task}/device:CPU:0"

    def read_value(self) -> Array:
        check_strategy(self)
        return self._brought(self._client.pull(self.address))

    def state(self) -> Array:
        return self._client.pull(self.address)

    def sparse_read(self, indices: Any) -> Array:
        """The rows at `indices`, integers of shape [n], in their order. Reads these rows only."""
        check_strategy(self)
        rows = arrays.to_numpy(arrays.as_array(arrays.detach_read(indices)))
        if not self.shape:
            raise ValueError(f"variable {self.name!r} is a number, and has no rows")
        if rows.ndim != 1 or not (arrays.is_integer(rows) or not rows.size):
            raise ValueError(
                f"sparse_read of variable {self.name!r} takes integers of shape [n], got {arrays.dtype_name(rows)} "
                f"of shape {list(rows.shape)}"
            )
        rows = rows.astype(np.int64, copy=False)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.shape[0]:
            wrong = rows.min() if rows.min() < 0 else rows.max()
            raise out_of_bounds(wrong, self.shape[0], self.name)
        return self._brought(self._client.rows(self.address, rows))

    def _brought(self, value: Array) -> Array:
        """Inside `run`, to the replica's device."""
        replica = current_local_replica()
        if replica is None:
            return value
        return arrays.to_device(value, self.strategy.extended.worker_devices[replica])

    def change(self, method: str, operand: Any) -> Change:
        """The update, checked here: the server gets no operand that does not fit."""
        like = self.address.spec.empty()
        fits = fitting_operand(method, like, operand, self.name)
        if isinstance(fits, IndexedSlices):
            values = arrays.cast_like(arrays.detach_read(fits.values), like)
            indices = arrays.to_numpy(fits.indices).astype(np.int64, copy=False)
            fits = IndexedSlices(values, indices)
        return Change(self.address, method, fits)

    def _update(self, method: str, operand: Any) -> Any:
        check_strategy(self)
        value = self._client.change([self.change(method, operand)])[0]
        return self if value is None else value


class RemoteShards(ShardedVariable):
    """A `ShardedVariable` of variables on servers, which change their rows at the same time."""

    variables: list[RemoteVariable]

    def __init__(self, client: Client, variables: Sequence[RemoteVariable], name: str) -> None:
        super().__init__(list(variables), name)
        self._client = client

    def _update_shards(self, method: str, operands: Sequence[Any]) -> None:
        pairs = zip(self.variables, operands, strict=True)
        self._client.change([variable.change(method, operand) for variable, operand in pairs])
