"""Modules that a strategy's scope records."""

import types

import pytest

torch = pytest.importorskip("torch")

from torch.nn.modules.module import register_module_parameter_registration_hook  # noqa: E402

from mpistrat.pytorch.modules.recording import Recorder  # noqa: E402


def test_a_strategy_may_be_collected_while_a_module_gets_parameters():
    kept = [Recorder(types.SimpleNamespace(), lambda parameter: False, {})]
    hooks = [
        register_module_parameter_registration_hook(hook)
        for hook in (lambda *_: kept.clear(), lambda *_: None)
    ]
    try:
        assert torch.nn.Linear(2, 2).weight.shape == (2, 2)
    finally:
        for hook in hooks:
            hook.remove()
    assert kept == []
