"""docs/replaced_functions.md lists exactly the functions that the package replaces, each with a test."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

pytest.importorskip("torch")

TOP = Path(__file__).parents[2]
PACKAGE = TOP / "mpistrat"
ROWS = re.findall(
    r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| `(\S+)::(\w+)` \|$",
    (TOP / "docs" / "replaced_functions.md").read_text(),
    re.MULTILINE,
)
# The files that put something into a module or class of others.
FILES = {
    "liveness/**/program_exit.py",
    "liveness/**/rank_end.py",
    "pytorch/hooks.py",
    "pytorch/metrics.py",
    "pytorch/sync_batch_norm.py",  # a submodule, in the program's own module
    "pytorch/writes_by_hand.py",
    "torch_distributed/default_backend.py",
    "torch_distributed/run.py",
    "tools/verify/torch_steps.py",  # in the processes that `mpistrat verify` starts
}

# Replaces all that can be, and looks for functions of ours in modules and classes of others.
PROGRAM = """
import json, os, sys, types
import torch, torch.distributed, torch.export, torch._dynamo
from torch._dynamo.variables import tensor
import mpistrat
from mpistrat.liveness.ending.rank_end import rank_end
from mpistrat.pytorch import hooks, metrics, optimizers, sync_batch_norm, writes_by_hand
from mpistrat.pytorch.gradients import reducer
from mpistrat.pytorch.modules import recording
from mpistrat.torch_distributed.default_backend import replace_functions
rank_end().catch_exceptions()
rank_end().catch_exits()
reducer.install()
optimizers.install()
sync_batch_norm.install()
recording._watch_registrations()
writes_by_hand.WritesByHand(None, 1, list)
hooks._replace_state_dict()
hooks._replace_reductions()
hooks.before_export(print)
hooks.refuse_steps_of_schedulers()
replace_functions(keeps_backend=False)
torchmetrics = sys.modules["torchmetrics.metric"] = types.ModuleType("torchmetrics.metric")
torchmetrics.Metric = type("Metric", (), {"sync": print, "__module__": "torchmetrics.metric"})
metrics._see_metrics()
model = torch.nn.Linear(1, 1)
hooks.around_calls(model, print)

def is_ours(value):
    value = value.fget if isinstance(value, property) else value
    if not isinstance(value, types.FunctionType):
        return False
    if value.__code__.co_name == "decorate_context":  # a function of torch that calls a function of ours
        return any(is_ours(cell.cell_contents) for cell in value.__closure__)
    return value.__code__.co_filename.startswith(os.path.dirname(mpistrat.__file__) + os.sep)

found = {}
for name, module in list(sys.modules.items()):
    if module is None or name.partition(".")[0] in ("mpistrat", "__main__", "__mp_main__"):
        continue
    for key, value in list(vars(module).items()):
        if is_ours(value):
            found.setdefault(key, []).append(f"{name}.{key}")
        if isinstance(value, type) and not str(value.__module__).startswith("mpistrat"):
            for attribute, method in list(vars(value).items()):
                if is_ours(method):
                    found.setdefault(f"{value!r}.{attribute}", []).append(f"{name}.{key}.{attribute}")
if is_ours(model._compiled_call_impl):
    found["call"] = ["torch.nn.Module._compiled_call_impl"]
print(json.dumps(list(found.values())))
"""


def test_the_page_lists_what_is_replaced() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=TOP, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    found: list[list[str]] = json.loads(result.stdout.splitlines()[-1])
    listed = dict.fromkeys((name for name, *_ in ROWS), False)
    unlisted = []
    for aliases in found:  # the names under which one function is reached
        names = [n for n in listed if any(fnmatchcase(alias, n) for alias in aliases)]
        listed.update(dict.fromkeys(names, True))
        if not names:
            unlisted.append(aliases)
    assert unlisted == []
    assert [name for name, is_replaced in listed.items() if not is_replaced] == []


def test_each_has_a_reason_and_a_test() -> None:
    assert len(ROWS) == 25
    for name, reason, hook, file, test in ROWS:
        assert len(reason) > 10, name
        assert len(hook) > 5, name
        assert f"def {test}(" in (TOP / file).read_text(), f"{file}::{test}"


def test_few_files_replace_anything() -> None:
    found = {
        path.relative_to(PACKAGE)
        for path in PACKAGE.rglob("*.py")
        if any(replacements_in(ast.parse(path.read_text())))
    }
    allowed = {path.relative_to(PACKAGE) for pattern in FILES for path in PACKAGE.glob(pattern)}
    assert found == allowed


def replacements_in(tree: ast.AST) -> Iterator[bool]:
    """Where an attribute of an imported module, or of what is in one, gets a function."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            of_others = not (getattr(node, "module", "") or "").startswith("mpistrat")
            for alias in node.names if of_others else ():
                imported.add((alias.asname or alias.name).split(".")[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                root: ast.AST = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                is_attribute = isinstance(target, ast.Attribute) and target.attr != "argv"
                if is_attribute and isinstance(root, ast.Name):
                    yield root.id in imported | {"cls", "metric"}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            yield ast.unparse(node.args[0]) in imported | {"cls", "module"}


def test_exit_and_quit_are_remembered() -> None:
    program = """
import builtins, sys
from mpistrat.liveness.ending.rank_end import program_exit, remember_exits
remember_exits()
import atexit
atexit.register(lambda: print(program_exit().code, program_exit().how))
getattr(builtins, sys.argv[1])(5)
"""
    for name in ("exit", "quit"):
        result = subprocess.run(
            [sys.executable, "-c", program, name], cwd=TOP, capture_output=True, text=True
        )
        assert result.returncode == 5, result.stderr
        assert f"called {name}(5) at " in result.stdout
