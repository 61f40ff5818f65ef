"""A variable whose rows are on several servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat.parameter_server.client import Client
from mpistrat.parameter_server.remote_variable import RemoteVariable
from mpistrat.variables.sharded import ShardedVariable


class RemoteShards(ShardedVariable):
    """A `ShardedVariable` of variables on servers, which change their rows at the same time."""

    variables: list[RemoteVariable]

    def __init__(self, client: Client, variables: Sequence[RemoteVariable], name: str) -> None:
        super().__init__(list(variables), name)
        self._client = client

    def _update_shards(self, method: str, operands: Sequence[Any]) -> None:
        changes = [
            variable.change(method, operand)
            for variable, operand in zip(self.variables, operands, strict=True)
        ]
        self._client.change(changes)
