"""A decorator for functions that `torch.compile` must not compile.

torch's own decorator, `torch.compiler.disable`, loads Dynamo (torch's tracer of functions) and slows each call. Here a
function only gets the attributes that Dynamo looks for. When Dynamo is loaded, it is told to skip the function's code
and all functions that this code calls. So calls cost nothing, and this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

from mpistrat.machine.imports import when_loaded

_REASON = "mpistrat communicates here; compile what one replica computes between such calls"

_Function = TypeVar("_Function", bound=Callable[..., Any])

_skipped: set[CodeType] = set()


def when_dynamo_loads(action: Callable[[], None]) -> None:
    """Call `action` when Dynamo is loaded, before it compiles anything; now if it is loaded already."""
    when_loaded("torch._dynamo", action)


def not_compiled(function: _Function) -> _Function:
    """Have `torch.compile` break its graph at calls of `function`, and compile nothing that `function` calls.

    A decorator. Returns: `function` itself, with the attributes of `torch.compiler.disable`.
    """
    # torch.compiler.disable() sets the same attributes.
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)
    assert isinstance(function, FunctionType)
    code = function.__code__
    if code not in _skipped:
        _skipped.add(code)
        when_dynamo_loads(lambda: _skip(code))
    return function


def _skip(code: CodeType) -> None:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
