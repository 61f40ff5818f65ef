"""What the strategies with parameter servers have in common: variables on servers, and the ranks' tasks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat import arrays
from mpistrat.communicators import LocalCommunicator
from mpistrat.errors import CollectiveMismatchError
from mpistrat.input.splitting import Share
from mpistrat.machine.notices import tell
from mpistrat.parameter_server.client import Address
from mpistrat.parameter_server.remote_shards import RemoteShards
from mpistrat.parameter_server.remote_variable import RemoteVariable
from mpistrat.parameter_server.rpc.remote_errors import attributed_error
from mpistrat.parameter_server.tensors import TensorSpec
from mpistrat.replicas.extended import StrategyExtended
from mpistrat.strategy import Strategy
from mpistrat.variables.aggregating import AggregatingVariable
from mpistrat.variables.arguments import VariableArguments
from mpistrat.variables.initial_values import called_for_part, initial_array, takes_parts
from mpistrat.variables.partitioners import Partitioner
from mpistrat.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrat.parameter_server.job import ServerJob


_WHAT = "strategy with parameter servers"


class ServedExtended(StrategyExtended):
    """The replicas of one rank, with variables on servers.

    Attributes:
        job: the ranks.
        partitioner: splits variables; None splits none.
    """

    has_partial_steps = False
    reads_per_replica = False
    experimental_between_graph = True

    def __init__(
        self,
        strategy: Strategy,
        job: ServerJob,
        devices: Sequence[str],
        partitioner: Partitioner | None,
    ) -> None:
        super().__init__(strategy, LocalCommunicator(), devices)
        self.job, self.partitioner = job, partitioner
        self._keys = itertools.count()
        self._turns = itertools.count()
        self._beside: list[int] = []  # servers that variables go to out of turn
        self._told = itertools.count()

    @property
    def makes_variables(self) -> bool:
        """Whether this rank's initial values are everybody's: the chief's, or worker 0's where there is none."""
        task = self.job.roles.task_type, self.job.roles.task_id
        return task == ("chief" if "chief" in self.job.roles.ranks else "worker", 0)

    @property
    def should_checkpoint(self) -> bool:
        return self.saves_checkpoints

    @property
    def saves_checkpoints(self) -> bool:
        """The rank that makes variables; of workers that train by themselves the first that is still there."""
        if self.makes_variables or "chief" in self.job.roles.ranks:
            return self.makes_variables
        died = self.job.rpc.channel.has_died
        return self.job.rpc.rank == next(
            (rank for rank in self.job.workers if not died(rank)), None
        )

    @property
    def restores_checkpoints(self) -> bool:
        return self.makes_variables

    @property
    def has_followers(self) -> bool:
        return self.makes_variables and len(self.job.clients) > 1

    def unchanging(self) -> contextlib.AbstractContextManager[None]:
        return self.job.client.consistent_snapshot()

    def already_written(self) -> contextlib.AbstractContextManager[None]:
        return self.job.client.already_written()

    def tell_of_checkpoint(self, path: str, restored: bool = False) -> None:
        self.job.tell_of_checkpoint(path)
        if restored:
            servers = len(self.job.servers)
            tell(
                f"the job goes on from {path}, with {servers} parameter server{'s' * (servers > 1)}"
            )

    def tell_followers(self, what: str, value: Any) -> None:
        self._tell(what, value, None)

    @contextlib.contextmanager
    def telling_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            failed = f"{self.job.name_of(self.job.rpc.rank)} has not {what}"
            self._tell(what, None, attributed_error(error, failed))
            raise

    def _tell(self, what: str, value: Any, error: Exception | None) -> None:
        self.job.client.publish((what, next(self._told)), (value, error))

    def follow(self, what: str) -> Any:
        value, error = self.job.client.await_published((what, next(self._told)))
        if error is not None:
            raise error
        return value

    @property
    def should_save_summary(self) -> bool:
        return self.makes_variables

    @property
    def experimental_should_init(self) -> bool:  # type: ignore[override]
        return self.makes_variables

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return tuple(
            f"/job:ps/replica:0/task:{task}/device:CPU:0" for task in range(len(self.job.servers))
        )

    @property
    def input_pipelines(self) -> tuple[int, int]:
        trainers = self.job.trainers
        rank = self.job.roles.rank
        return (len(trainers), trainers.index(rank)) if rank in trainers else (1, 0)

    def input_share(self) -> Share:
        """Each worker reads its part of each global batch for itself: no other waits for it."""
        workers, worker = self.input_pipelines
        k = self.num_local_replicas
        return Share(workers, worker, k * workers, range(k))

    def _new_variable(self, asked: VariableArguments) -> Variable:
        addresses = self.place(asked.initial_value, asked.name, asked.dtype, asked.shape)
        how = asked.trainable, asked.synchronization, asked.aggregation
        return variable_of(self.strategy, self.job, asked.name, addresses, how)

    def place(
        self, initial_value: Any, name: str, dtype: Any = None, shape: tuple[int, ...] | None = None
    ) -> list[Address]:
        """Arrays on the servers for what is to have this name: its rows, or all of it. Called by: every worker.

        Raises: on all workers, what the one that makes them comes to.
        """
        try:
            if shape is not None and dtype is not None and takes_parts(initial_value):
                whole, sizes = None, self._sizes(shape, dtype, name)
            else:
                whole = initial_array(initial_value, dtype, shape)
                shape = tuple(whole.shape)
                sizes = self._sizes(shape, whole.dtype, name)
        except BaseException as error:
            # Others may have come further: each uses up one number.
            self._tell_not_made(*self._next_place(0), name, error)
            raise
        addresses: list[Address] = []
        first = 0
        for part, rows in enumerate(sizes or [0]):
            size = (rows, *shape[1:]) if sizes else shape

            def value(first: int = first, size: tuple[int, ...] = size) -> Any:
                if whole is None:
                    return called_for_part(initial_value, dtype, size, first)
                return whole[first : first + size[0]] if sizes else whole

            full_name = f"{name}/part_{part}" if sizes else name
            made_of = None if whole is None else arrays.dtype_name(whole)
            addresses.append(self._placed(self._next_place(part), full_name, size, made_of, value))
            first += rows
        return addresses

    def _sizes(self, shape: tuple[int, ...], dtype: Any, name: str) -> list[int]:
        """The rows of each part; [] for a variable that is not split."""
        if self.partitioner is None or not shape:
            return []
        partitions = self.partitioner(list(shape), dtype)
        if (
            not isinstance(partitions, (list, tuple))
            or not partitions
            or any(isinstance(n, bool) or not isinstance(n, int) for n in partitions)
            or partitions[0] < 1
            or any(n != 1 for n in partitions[1:])
        ):
            raise ValueError(
                f"variable_partitioner must give the number of parts along the first axis and 1 for the others, such "
                f"as {[2] + [1] * (len(shape) - 1)}; for {name!r} of shape {list(shape)} it gave {partitions!r:.80}"
            )
        count = min(partitions[0], shape[0])
        if partitions[0] == 1 or not count:
            return []
        each, more = divmod(shape[0], count)
        return [each + (part < more) for part in range(count)]

    def _placed(
        self,
        place: tuple[int, int],
        name: str,
        shape: tuple[int, ...],
        dtype: str | None,
        value: Callable[[], Any],
    ) -> Address:
        """An array on a server: made there by the one rank that makes them, found by the others.

        Args: place: as `_next_place` says; dtype: None where all workers were given it.
        """
        server, key = place
        if self.makes_variables:
            try:
                array = value()
                address = Address(server, key, name, TensorSpec.of(array))
                self.job.client.create(address, array)
            except BaseException as error:
                self._tell_not_made(server, key, name, error)
                raise
            return address
        address = self.job.client.find(server, key)
        there = address.spec
        if (address.name, there.shape, there.dtype) != (name, shape, dtype or there.dtype):
            raise CollectiveMismatchError(
                f"{self.job.name_of(self.job.rpc.rank)} makes variable {name!r} of {dtype or there.dtype} "
                f"{list(shape)} where {address.name!r} of {there.dtype} {list(there.shape)} was made: all workers make "
                "the same variables, in the same order"
            )
        return address

    def _next_place(self, part: int) -> tuple[int, int]:
        """The server for this part of a variable, the next in turn if nothing says another, and the array's number."""
        servers = self._beside or self.job.servers
        turn = part if self._beside else next(self._turns)
        return servers[turn % len(servers)], next(self._keys)

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Inside, variables go to the server of another one, part by part where both have several, out of turn."""
        with super().colocate_vars_with(colocate_with_variable):
            before, self._beside = self._beside, _servers_of(colocate_with_variable)
            try:
                yield
            finally:
                self._beside = before

    def _tell_not_made(self, server: int, key: int, name: str, error: BaseException) -> None:
        """To those who look for the array that would have this number, from the rank that makes them."""
        if self.makes_variables:
            who = f"{self.job.name_of(self.job.rpc.rank)} has not made variable {name!r}"
            self.job.client.cannot_create(server, key, attributed_error(error, who))

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        return min(variables, key=lambda variable: variable.name)

    def _update(
        self, variable: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        if not isinstance(variable, Variable):
            raise ValueError(f"update needs a variable, got {variable!r:.60}")
        component = variable.values[0] if isinstance(variable, AggregatingVariable) else variable
        return self._on_each_component([component], fn, args, kwargs)


def _servers_of(variable: Any) -> list[int]:
    """Where each of its parts is."""
    if isinstance(variable, AggregatingVariable):
        variable = variable.values[0]
    parts = variable.variables if isinstance(variable, RemoteShards) else [variable]
    return [part.address.server for part in parts]


def variable_of(
    strategy: Strategy,
    job: ServerJob,
    name: str,
    addresses: Sequence[Address],
    how: tuple[Any, ...],
) -> Variable:
    """The variable whose parts are at `addresses`.

    Args: how: whether it is trainable, its synchronization, and its aggregation.
    """
    variables = [RemoteVariable(strategy, job.client, address, *how) for address in addresses]
    variable: Variable = variables[0]
    if len(variables) > 1 or variable.name != name:
        variable = RemoteShards(job.client, variables, name)
    if strategy.num_replicas_in_sync == 1:
        return variable
    return AggregatingVariable(strategy, [variable], *how[1:])  # type: ignore[list-item]
