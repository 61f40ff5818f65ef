"""What the package calls of libraries that need a GPU, by the libraries' own word on their signatures.

NCCL's and XCCL's groups are missing from torch for CPUs; its `.pyi` describes them. CuPy's wheels install without a
driver and show theirs: `tests/data/cupy_signatures` keeps them, and `scripts/test full` compares it with the wheels.

What shows none: attributes (they are only looked for), NCCL's constants, whose values NCCL defines, `ndarray`'s
operators, and what calls return; torch's `.pyi` has no collectives of `Backend`, whose docstrings have them.
"""

import ast
import inspect
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import stand_in_cupy
from support.signatures import of_cupy, of_torch, parsing

TESTS = Path(__file__).parents[1]
RECORDS = TESTS / "data/cupy_signatures"
WHEELS = {"cupy-cuda12x": "nvidia-nccl-cu12", "cupy-cuda13x": "nvidia-nccl-cu13"}


def record(wheel: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{wheel}.json").read_text())


def recorded(wheel: str) -> dict[str, str | None]:
    return record(wheel)["names"]


def takes(signature: inspect.Signature, call: ast.Call) -> bool:
    """Whether it takes so many arguments, and those by name; an argument with a star stands for any number."""
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    bare = signature.replace(parameters=parameters)
    has_stars = any(isinstance(each, ast.Starred) for each in call.args)
    bind = bare.bind_partial if has_stars else bare.bind
    positional = [each for each in call.args if not isinstance(each, ast.Starred)]
    try:
        bind(*positional, **{each.arg: each for each in call.keywords if each.arg})
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("wheel", WHEELS)
def test_cupy_takes_what_we_hand_it(wheel: str) -> None:
    texts = recorded(wheel)
    for place, use in of_cupy.uses():
        text = texts.get(use.name)
        assert text is not None, f"{place}: {wheel} has no {use.name}, or it is not recorded"
        if use.call:
            (signature,) = parsing.of_docstring(text, use.name.rpartition(".")[2])
            assert takes(signature, use.call), f"{place}: {ast.unparse(use.call)}, but {text}"


@pytest.mark.parametrize("wheel", WHEELS)
def test_what_is_used_of_cupy_is_recorded(wheel: str) -> None:
    how = f"see tests/data/record_cupy_signatures.py, which needs {wheel} and {WHEELS[wheel]}"
    texts, used = recorded(wheel), of_cupy.names()
    assert used.keys() <= texts.keys(), how
    assert all(texts[name] for name, is_called in used.items() if is_called), how


def test_the_stand_in_takes_what_cupy_takes() -> None:
    """No argument that CuPy does not have, and none elsewhere."""
    texts = recorded("cupy-cuda13x")
    for name, text in texts.items():
        outer, _, member = name.rpartition(".")
        own = getattr(getattr(stand_in_cupy, outer.rpartition(".")[2], None), member, None)
        if text and inspect.isfunction(own):
            (signature,) = parsing.of_docstring(text, member)
            names = iter(signature.parameters)
            missing = [each for each in inspect.signature(own).parameters if each not in names]
            assert not missing, f"{name}: the stand-in takes {missing}, CuPy {text}"


def test_torch_takes_what_we_hand_its_groups_and_stores() -> None:
    for place, use in of_torch.uses():
        try:
            described = list(of_torch.signatures(use.name))
        except KeyError as error:
            pytest.fail(f"{place}: torch has no {error}")
        for signatures in described if use.call else []:
            call = use.call
            assert any(takes(each, call) for each in signatures), (
                f"{place}: {ast.unparse(call)}, but {use.name} takes {[*map(str, signatures)]}"
            )


def test_uses_are_found() -> None:
    """In each way that there is: by an import, an attribute, a result, a parameter, and in a program that is text."""
    assert {
        "cupy.asarray",
        "cupy.cuda.Device.synchronize",
        "cupy.cuda.Event.done",
        "cupy.cuda.Stream.wait_event",
        "cupy.cuda.nccl.NcclCommunicator.allReduce",
        "cupy.cuda.nccl.groupEnd",
        "cupy.ndarray.get",
        "cupyx.empty_pinned",
    } <= of_cupy.names().keys()
    assert {
        "NativeGroup",
        "NativeGroup.Options",
        "NativeGroup.Options.group_name",
        "NativeGroup.allreduce",
        "NativeGroup.shutdown",
        "PrefixStore",
        "TCPStore",
    } <= {use.name for _, use in of_torch.uses()}


def test_a_wrong_call_is_noticed() -> None:
    (signature,) = parsing.of_docstring(
        "NcclCommunicator.allReduce(self, intptr_t sendbuf, int op, stream=None)\n\nArgs:",
        "allReduce",
    )
    right = ("f(1, 2)", "f(1, op=2)", "f(1, 2, 3)", "f(*x)")
    wrong = ("f(1)", "f(1, 2, 3, 4)", "f(1, 2, other=3)", "f(1, sendbuf=2)")
    calls = {text: ast.parse(text, mode="eval").body for text in (*right, *wrong)}
    assert [text for text, call in calls.items() if takes(signature, call)] == [*right]


@pytest.mark.slow
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("wheel", WHEELS)
def test_the_record_is_what_the_wheel_says(wheel: str) -> None:
    folder, expected = f".venvs/{wheel}", record(wheel)
    requirements = f"{wheel}=={expected['version']} {WHEELS[wheel]}"
    make = f"source scripts/environment.sh && make_environment {folder} {requirements}"
    subprocess.run(["bash", "-euc", make], cwd=TESTS.parent, check=True)
    shown = subprocess.run(
        [TESTS.parent / folder / "bin/python", "data/record_cupy_signatures.py"],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout) == expected
