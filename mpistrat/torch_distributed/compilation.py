"""Functions that `torch.compile` is to leave alone.

The decorator of torch's own, `torch.compiler.disable`, loads Dynamo, the part of torch that reads what it compiles, and
stands in the way of each call. Here functions get only the mark that Dynamo looks for; when Dynamo is loaded, by
whomever, it is told to skip their code and all that it calls. So calls cost nothing, and torch is not imported here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

from mpistrat.machine.imports import when_loaded

_REASON = "mpistrat communicates here; compile what one replica computes between such calls"

_Function = TypeVar("_Function", bound=Callable[..., Any])

_skipped: set[CodeType] = set()


def when_dynamo_loads(action: Callable[[], None]) -> None:
    """Call `action` before anything is compiled: now, if Dynamo is loaded."""
    when_loaded("torch._dynamo", action)


def not_compiled(function: _Function) -> _Function:
    """Have `torch.compile` break its graph at calls of `function`, and compile nothing that it calls. A decorator."""
    # What torch.compiler.disable() sets.
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)
    assert isinstance(function, FunctionType)
    code = function.__code__
    if code not in _skipped:
        _skipped.add(code)
        when_dynamo_loads(functools.partial(_skip, code))
    return function


def _skip(code: CodeType) -> None:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
