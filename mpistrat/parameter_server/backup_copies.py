"""The second copies of what another server makes: the backup's side of `replica`."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpistrat.errors import UnavailableError
from mpistrat.parameter_server import protocol
from mpistrat.parameter_server.backup import ABANDON, CHANGE, CHANGED
from mpistrat.parameter_server.gate import Gate
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint
from mpistrat.parameter_server.store import Store, outcome_of


class BackupCopies:
    """Makes the changes that the other server passes on, in their order, and nothing else, until it is gone.

    Args:
        store: this server's own, beside which the copies are, and to which they come when the other has died.
        gate: through which what the other has let is let here, too, for who asks this server in its place.
    Attributes:
        copies: a store of their own.
    """

    def __init__(self, rpc: RpcEndpoint, store: Store, gate: Gate) -> None:
        self._rpc, self._own, self._gate = rpc, store, gate
        self.copies = Store(beside=store)
        self._is_over = False  # the other's changes do not count any more
        self.primary: int | None = None  # the other server, once it has passed something on
        self.names: dict[int, str] = {}  # of the arrays, by key
        self.given_up: dict[int, str] = {}  # of those that came to differ
        rpc.handle(CHANGE, self._change)
        rpc.handle(ABANDON, lambda source, _: self._give_up())

    def has(self, key: int) -> bool:
        """Whether it is among the copies still.

        Raises: UnavailableError: it was, and was given up. Clients ask here when the first copy is gone.
        """
        if key in self.given_up:
            raise UnavailableError(
                f"{self.given_up[key]!r} is lost: the server that kept it has died, and its replica had been given up "
                "before; the job must be started again, from its last checkpoint"
            )
        return key in self.copies.by_key

    def become_own(self) -> None:
        """The other server has died; what it may still have sent counts no more, for clients ask again, here."""
        self._is_over = True
        self._own.adopt(self.copies)

    def _change(self, primary: int, body: tuple[int, str, int, Any]) -> None:
        number, method, source, change = body
        self.primary = primary
        outcome = outcome_of(partial(self._make, method, source, change))
        why_not = f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, Exception) else ""
        self._rpc.notify(primary, CHANGED, (number, why_not))

    def _make(self, method: str, source: int, change: Any) -> None:
        if self._is_over:  # nobody hears this, but one that lives, against all evidence
            raise RuntimeError("another server has taken over")
        store = self.copies
        if method == protocol.CREATE:
            self.names[change.key] = store.create(change).name
        elif method == protocol.UPDATE:
            self._gate.let(source, change.push)
            for outcome in store.update(source, change):
                if isinstance(outcome, Exception):
                    raise outcome
        elif method == protocol.MAKE_OPTIMIZER:
            store.make_optimizer(*change)
        elif method == protocol.LOAD_OPTIMIZER_STATE:
            store.optimizers.load_state(*change)
        elif method == protocol.DROP_GRADIENTS:
            store.optimizers.forget(source, change)
        elif method == protocol.END_ROUNDS:
            before, who_ended = change
            for name, error in store.optimizers.end_rounds(before, who_ended.__getitem__):
                raise RuntimeError(f"the step of {name!r}") from error
        else:
            raise ValueError(f"no change of a replica is called {method!r}")

    def _give_up(self) -> None:
        self.given_up, self.names = self.names, {}
        self.copies = Store(beside=self._own)  # with it go the arrays, and their optimizers' state
