"""What a program saves, copies, exports or scripts of mirrored modules and their optimizers is torch's alone.

`tests/unit/pytorch/test_files_for_torch.py` loads it.
"""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import mpistrat as ms
from support.training.models_with_buffers import Net, lazy_net, trained

Make = Callable[[], torch.nn.Module]


def synchronized_net() -> torch.nn.Module:
    return ms.convert_sync_batchnorm(Net())


MODELS: dict[str, Make] = {"net": Net, "lazy": lazy_net, "synchronized": synchronized_net}
OTHERS: dict[str, Callable[[], ms.Strategy]] = {
    "one device": lambda: ms.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: ms.MirroredStrategy(devices=["cpu:0", "cpu:1"], gradients="sum"),
    "deterministic": lambda: ms.MultiWorkerMirroredStrategy(deterministic=True, gradients="sum"),
    "central": lambda: ms.CentralStorageStrategy(gradients="sum"),
}


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    assert not [name for name in unsafe if name.startswith("mpistrat")]
    return file.getvalue()


def check_plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    values = [model, optimizer, averaged, list(model.parameters())]
    for value in (*values, *copy.deepcopy(values), model.state_dict(), optimizer.state_dict()):
        assert b"mpistrat" not in pickle.dumps(value)
        assert b"mpistrat" not in saved(value)
    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, unpickled, averaged.module):
        for mine, its in zip(model.modules(), other.modules(), strict=True):
            assert type(mine) is type(its)
            assert not its._state_dict_pre_hooks
            assert not its.__dict__.keys() - mine.__dict__.keys()
        for parameter in other.parameters():
            assert type(parameter) is torch.nn.Parameter
            assert not parameter._post_accumulate_grad_hooks
        torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()))
        other(torch.randn(6, 4)).sum().backward()  # outside run, as of any module


@pytest.mark.parametrize("model", MODELS)
def test_what_is_saved_and_copied(strategy: ms.Strategy, model: str) -> None:
    check_plain(*trained(strategy, MODELS[model]))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_saved_and_copied_of_other_strategies(name: str) -> None:
    check_plain(*trained(OTHERS[name](), synchronized_net))
