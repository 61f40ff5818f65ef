"""Variables on servers: how ranks make, read and change them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.context import AnyStrategy, current_local_replica
from mpistrat.errors import CollectiveMismatchError
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.client.client import Change, Client
from mpistrat.parameter_server.protocol.messages import Address, TensorSpec
from mpistrat.parameter_server.rpc.endpoint import attributed_error
from mpistrat.variables.aggregating import AggregatingVariable
from mpistrat.variables.initial_values import called_for_part, initial_array, takes_parts
from mpistrat.variables.partitioners import Partitioner
from mpistrat.variables.sharded import ShardedVariable, equal_parts
from mpistrat.variables.store import VariableStore
from mpistrat.variables.updates import check_rows, fitting_operand
from mpistrat.variables.variable import Variable, check_strategy
from mpistrat.variables.variable_arguments import VariableArguments

if TYPE_CHECKING:
    from mpistrat.parameter_server.job.job import ServerJob


_Shape = tuple[int, ...]


class RemoteVariable(Variable):
    """A variable that is one array on a server; every worker reads and changes the array.

    `read_value` copies the array; later updates do not change the copy. The server makes each update at once and whole,
    between the updates of other workers. An update of a variable of up to 4 KB returns the value after it. An update of
    a larger variable returns the variable, and a later use of it reads the value.

    Args: how: (trainable, synchronization, aggregation).
    Attributes: device: the server, such as "/job:ps/replica:0/task:1/device:CPU:0".
    """

    def __init__(
        self, strategy: AnyStrategy, client: Client, address: Address, how: tuple[Any, ...]
    ) -> None:
        self.strategy = strategy
        self.address = address
        self.name = address.name
        self.trainable, self.synchronization, self.aggregation = how
        self.client = client

    @property
    def shape(self) -> _Shape:
        return self.address.spec.shape

    @property
    def dtype(self) -> Any:
        return self.address.spec.native_dtype

    @property
    def device(self) -> str:
        task = self.client.routes.servers.index(self.address.server)
        return f"/job:ps/replica:0/task:{task}/device:CPU:0"

    def read_value(self) -> Array:
        check_strategy(self)
        return self._brought(self.client.pull(self.address))

    def state(self) -> Array:
        return self.client.pull(self.address)

    def sparse_read(self, indices: Any) -> Array:
        """Read and return only the rows at `indices` (integers of shape [n]), in their order.

        Raises: ValueError for other indices, or a variable without dimensions; IndexError if a row does not exist.
        """
        check_strategy(self)
        indices = arrays.detach_read(indices)
        rows = arrays.to_numpy(arrays.as_array(indices))
        if not self.shape:
            raise ValueError(f"sparse_read: variable {self.name!r} is a number, and has no rows")
        are_integers = arrays.is_integer(rows) or not rows.size
        if rows.ndim != 1 or not are_integers:
            raise ValueError(
                f"sparse_read of variable {self.name!r} takes integers of shape [n], got {arrays.dtype_name(rows)} "
                f"of shape {list(rows.shape)}"
            )
        rows = rows.astype(np.int64, copy=False)
        check_rows(self.name, rows, self.shape[0])
        return self._brought(self.client.rows(self.address, rows))

    def _brought(self, value: Array) -> Array:
        """Move `value` to the replica's device inside `run`; outside, return it as it is."""
        replica = current_local_replica()
        if replica is None:
            return value
        device = self.strategy.extended.worker_devices[replica]
        return arrays.to_device(value, device)

    def change(self, method: str, operand: Any) -> Change:
        """Return the update of this variable's array, for `Client.change`.

        Raises: TypeError, InvalidArgumentError or IndexError if the operand does not fit the array.
        """
        like = self.address.spec.empty()
        fits = fitting_operand(method, like, operand, self.name)
        if isinstance(fits, IndexedSlices):
            values = arrays.cast_like(arrays.detach_read(fits.values), like)
            indices = arrays.to_numpy(fits.indices).astype(np.int64, copy=False)
            fits = IndexedSlices(values, indices)
        return Change(self.address, method, fits)

    def _update(self, method: str, operand: Any) -> Any:
        check_strategy(self)
        change = self.change(method, operand)
        (value,) = self.client.change([change])
        return self if value is None else value


class RemoteShards(ShardedVariable):
    """A split variable with its parts on servers. A checkpoint has an update of all parts or of none."""

    variables: list[RemoteVariable]

    def _update_shards(self, method: str, operands: Sequence[Any]) -> None:
        changes = []
        for variable, operand in zip(self.variables, operands, strict=True):
            changes.append(variable.change(method, operand))
        self.variables[0].client.change(changes)


class VariablesOnServers(VariableStore):
    """Makes a strategy's variables on the servers. Each variable or part goes to the next server, in turn.

    Args:
        owns: whether this rank makes the arrays, with its initial values; the other ranks find them.
        partitioner: splits variables by rows; None splits none.
        chief_alone_creates: whether `create` raises ValueError on a worker.
    """

    def __init__(
        self,
        strategy: AnyStrategy,
        job: ServerJob,
        owns: bool,
        partitioner: Partitioner | None,
        chief_alone_creates: bool,
    ) -> None:
        tasks = range(len(job.servers))
        super().__init__([f"/job:ps/replica:0/task:{task}/device:CPU:0" for task in tasks])
        self.owns_initial_values = owns
        self._strategy = strategy
        self._job = job
        self.partitioner = partitioner
        self._refuses = chief_alone_creates and job.roles.task_type == "worker"
        # Counted atomically: a program may make variables in several threads.
        self._keys = itertools.count()
        self._turns = itertools.cycle(job.servers)
        # The servers of the other variable, inside colocate_vars_with; empty: all servers in turn.
        self._colocated: Sequence[int] = []

    def create(self, asked: VariableArguments) -> Variable:
        if self._refuses:
            raise ValueError(
                f"variable {asked.name!r} was made on {self._job.rpc.own_name}, inside a scheduled "
                "function or a dataset function: make it on the chief, in strategy.scope(), before it is scheduled"
            )
        addresses = self.place(asked.initial_value, asked.name, asked.dtype, asked.shape)
        how = asked.trainable, asked.synchronization, asked.aggregation
        return variable_of(self._strategy, self._job, asked.name, addresses, how)

    def copies(self, variable: Any) -> Sequence[Any]:
        if not isinstance(variable, Variable):
            raise ValueError(f"update needs a variable, got {variable!r:.60}")
        if isinstance(variable, AggregatingVariable):
            return variable.values[:1]
        return (variable,)

    @contextlib.contextmanager
    def colocated(self, variable: Any) -> Iterator[None]:
        """Inside, new variables go to the servers of `variable`: part i goes to the server of its part i."""
        before = self._colocated
        self._colocated = [part.address.server for part in parts_of(variable)]
        try:
            yield
        finally:
            self._colocated = before

    def place(
        self, initial_value: Any, name: str, dtype: Any = None, shape: _Shape | None = None
    ) -> list[Address]:
        """Make the arrays of a new variable or torch tensor on the servers.

        The owner (the rank with `owns`) makes them, with its initial value; the other ranks wait until they exist.

        Called by: every worker, in the same order.
        Args:
            dtype, shape: dtype and shape of the whole variable; None takes them from `initial_value`.
        Returns: the address of the array, or of each part of a split variable.
        Raises: on all workers, the owner's error; CollectiveMismatchError for another name, shape or dtype than the
            owner's.
        """
        try:
            if shape is not None and dtype is not None and takes_parts(initial_value):
                whole = None
                sizes = self._sizes(shape, dtype, name)
            else:
                whole = initial_array(initial_value, dtype, shape)
                shape = tuple(whole.shape)
                sizes = self._sizes(shape, whole.dtype, name)
        except BaseException as error:
            # Ranks without this error may already wait for the variable's first array, and have used up one number for
            # it. So this rank uses up the same number and, if it makes the arrays, sends them the error.
            server, key = self._next_place(0)
            self._publish_failure(server, key, name, error)
            raise

        def value_of_part(first: int, size: _Shape) -> Any:
            if whole is None:
                return called_for_part(initial_value, dtype, size, first)
            if not sizes:
                return whole
            return whole[first : first + size[0]]

        made_of = None
        if whole is not None:
            made_of = arrays.dtype_name(whole)
        if not sizes:
            return [self._placed(0, name, shape, made_of, 0, value_of_part)]
        addresses: list[Address] = []
        first = 0
        for part, rows in enumerate(sizes):
            size = (rows, *shape[1:])
            name_of_part = f"{name}/part_{part}"
            address = self._placed(part, name_of_part, size, made_of, first, value_of_part)
            addresses.append(address)
            first += rows
        return addresses

    def _sizes(self, shape: _Shape, dtype: Any, name: str) -> list[int]:
        """Return the number of rows of each part; [] for a variable that is not split.

        Raises: ValueError if the partitioner splits another axis than the first, or returns no list of ints.
        """
        if self.partitioner is None or not shape:
            return []
        partitions = self.partitioner(list(shape), dtype)
        is_list = isinstance(partitions, (list, tuple))
        are_numbers = is_list and {type(number) for number in partitions} == {int}
        if not are_numbers or partitions[0] < 1 or {*partitions[1:]} - {1}:
            example = [2] + [1] * (len(shape) - 1)
            raise ValueError(
                f"variable_partitioner must give the number of parts along the first axis and 1 for the others, such "
                f"as {example}; for {name!r} of shape {list(shape)} it gave {partitions!r:.80}"
            )
        count = min(partitions[0], shape[0])
        if partitions[0] == 1 or not count:
            return []
        return equal_parts(shape[0], count)

    def _placed(
        self,
        part: int,
        name: str,
        shape: _Shape,
        dtype: str | None,
        first: int,
        value_of_part: Callable[[int, _Shape], Any],
    ) -> Address:
        """Make an array on a server if this rank owns initial values, else wait for the owner to make it.

        Args:
            part: the number of this part of a variable, from 0.
            dtype: the name of the expected dtype; None accepts any.
            first: the row of the whole variable where the part begins.
            value_of_part: returns a part's initial value from its first row and its shape; only the owner calls it.
        Raises: CollectiveMismatchError for another name, shape or dtype than the owner's.
        """
        server, key = self._next_place(part)
        if self.owns_initial_values:
            try:
                array = value_of_part(first, shape)
                address = Address(server, key, name, TensorSpec.of(array))
                self._job.client.create(address, array)
            except BaseException as error:
                self._publish_failure(server, key, name, error)
                raise
            return address
        address = self._job.client.find(server, key)
        there = address.spec
        dtype = dtype or there.dtype
        if (address.name, there.shape, there.dtype) != (name, shape, dtype):
            asked = f"{name!r} of {dtype} {list(shape)}"
            existing = f"{address.name!r} of {there.dtype} {list(there.shape)}"
            raise CollectiveMismatchError(
                f"{self._job.rpc.own_name} makes variable {asked} where {existing} was made: all workers make the same "
                "variables, in the same order"
            )
        return address

    def _next_place(self, part: int) -> tuple[int, int]:
        """Return the next server, or inside `colocated` the other variable's server, and the new array's number."""
        key = next(self._keys)
        colocated = self._colocated
        if colocated:
            return colocated[part % len(colocated)], key
        return next(self._turns), key

    def _publish_failure(self, server: int, key: int, name: str, error: BaseException) -> None:
        """If this rank makes arrays, send the error to the ranks that wait for this array."""
        if self.owns_initial_values:
            who = f"{self._job.rpc.own_name} has not made variable {name!r}"
            self._job.client.cannot_create(server, key, attributed_error(error, who))


def parts_of(variable: Any) -> Sequence[Any]:
    """Return the parts of a split variable (also inside an `AggregatingVariable`), else a list of the value alone."""
    if isinstance(variable, AggregatingVariable):
        variable = variable.values[0]
    if isinstance(variable, RemoteShards):
        return variable.variables
    return [variable]


def variable_of(
    strategy: AnyStrategy,
    job: ServerJob,
    name: str,
    addresses: Sequence[Address],
    how: tuple[Any, ...],
) -> Variable:
    """Return a variable with its parts at `addresses`: a `RemoteShards` if it is split, else a `RemoteVariable`.

    With several replicas, an `AggregatingVariable` wraps it.
    """
    variables = [RemoteVariable(strategy, job.client, address, how) for address in addresses]
    variable: Variable = variables[0]
    if len(variables) > 1 or variable.name != name:
        variable = RemoteShards(variables, name)
    if strategy.num_replicas_in_sync == 1:
        return variable
    return AggregatingVariable(strategy, [variable])  # type: ignore[list-item]
