"""On a server: the gradients of all workers are combined when all have ended a step, which is a round."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.parameter_server.protocol import messages
from mpistrat.parameter_server.protocol.snapshot import Gate
from mpistrat.parameter_server.protocol.staleness import ServerClock
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint
from mpistrat.parameter_server.rpc.remote_errors import portable_error
from mpistrat.parameter_server.server.optimizer_steps import ServerOptimizers
from mpistrat.parameter_server.server.replication import Backup


class Rounds:
    """Ends rounds, on this server and its backup.

    Args: workers: their ranks.
    """

    def __init__(
        self,
        rpc: RpcEndpoint,
        workers: Sequence[int],
        optimizers: ServerOptimizers,
        gate: Gate,
        backup: Backup,
    ) -> None:
        self._rpc, self._optimizers, self._gate, self._backup = rpc, optimizers, gate, backup
        self._clock = ServerClock(rpc, workers, self._end, backup.when_safe)
        rpc.handle(messages.ENDED, self._ended)
        rpc.handle(messages.FAILED, self._failed)

    def leave(self, rank: int, died: bool) -> None:
        """A rank's last step is over. The gradients of a dead worker's unfinished step are dropped."""
        if died:
            self._drop_gradients(rank, self._clock.steps_of(rank))
        self._clock.leave(rank)

    def take_over(self) -> None:
        """End the rounds of arrays that came here with their gradients, by what this server knows of the workers."""
        for rank in self._rpc.channel.lost:
            self._optimizers.forget(rank, self._clock.steps_of(rank))
        self._clock.look()

    def _ended(self, source: int, body: tuple[int, messages.Push | None]) -> None:
        steps, push = body
        self._gate.enter(source, push, lambda: self._clock.ended(source, steps))

    def _failed(self, source: int, body: tuple[int, messages.Push | None]) -> None:
        steps, push = body
        self._gate.enter(source, push, lambda: self._drop_gradients(source, steps))

    def _drop_gradients(self, worker: int, steps: int) -> None:
        self._optimizers.forget(worker, steps)
        self._backup.forward(messages.DROP_GRADIENTS, worker, steps)

    def _end(self, before: int) -> Exception | None:
        """End the rounds with smaller numbers. Returns: the error of a step that could not be made."""
        rounds = self._optimizers.pending_rounds(before)
        if not rounds:
            return None
        who_ended = {number: self._clock.who_ended(number) for number in rounds}
        failed = self._optimizers.end_rounds(before, who_ended.__getitem__)
        self._backup.forward(
            messages.END_ROUNDS, self._rpc.rank, (before, who_ended)
        ).failed = bool(failed)
        if not failed:
            return None
        name, error = failed[0]
        others = f" (nor those of {len(failed) - 1} more arrays)" if failed[1:] else ""
        portable = portable_error(error)
        return type(portable)(
            f"the step of {name!r} by all workers' gradients could not be made{others}: {portable.args[0]}"
        )
