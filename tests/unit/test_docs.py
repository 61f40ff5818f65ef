"""README is a door, and docs/ is the house: what they name exists, and what exists publicly is named there."""

import ast
import importlib
import inspect
import operator
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mpistrat as ms
from conformance import differences
from mpistrat import wire_formats
from mpistrat.communicators.node.blocks import Blocks
from mpistrat.communicators.node.slots import SharedSlots
from mpistrat.settings import SETTINGS
from support.documentation import OPEN_NAMES, programs_of

TOP = Path(__file__).parents[2]
README = TOP / "README.md"
DOCS = TOP / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
# Where users find names.
DOORS = (
    ms,
    ms.checkpoint,
    ms.cluster_resolver,
    ms.compat.contrib,
    ms.compat.v1,
    ms.compat.v1.experimental,
    ms.coordinator,
    ms.errors,
    ms.experimental,
    ms.experimental.partitioners,
    ms.fault_tolerance,
    ms.input,
    ms.tpu,
    wire_formats,
)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_readme_is_short() -> None:
    assert len(text_of(README).split()) <= 900


def test_readme_says_how_to_test() -> None:
    commands = (TOP / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert commands[-1].endswith('/../scripts/test"')
    assert re.search(r"^scripts/test quick .*\nscripts/test  ", text_of(README), re.MULTILINE)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]+))?\)", text_of(page)):
            file = page.parent / target if target else page
            assert file.is_file(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors_of(file), f"{page.name}: {target}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_say_what_ran_where() -> None:
    """One table does, with the hardware and the versions of the recorded run, and what was not seen."""
    (table,) = re.findall(r"## What ran where\n\n((?:\|.*\n)+)", text_of(DOCS / "gpus.md"))
    _, _, seen, not_seen = table.splitlines()
    report = text_of(TOP / "benchmarks/results/gpu-report.md")
    header, _, values = (line.strip("| ").split(" | ") for line in report.splitlines()[4:7])
    run = dict(zip(header, values, strict=True))
    assert run["gpus"].split(" ", 1)[1].rpartition(" 80GB")[0] in seen
    for name in ("torch", "nccl", "cupy"):
        assert f" {run[name].removesuffix('.0')}" in seen.casefold(), name
    assert "**not seen**" in not_seen
    for hardware in ("several GPUs", "device-aware MPI", "ROCm", "XPU", "TPUs"):
        assert hardware in not_seen
    steps = report.partition("## gpu_training, 1 ranks")[2].partition("An earlier run")[0]
    rows = re.findall(
        r"^\| .* \| (?:plain PyTorch \| .*|1 \| .* \| .*) \| (\S+) \|$", steps, re.MULTILINE
    )
    (said,) = re.findall(r"A step of one rank took (\S+) to (\S+)\sof", text_of(DOCS / "gpus.md"))
    assert said == (f"{min(map(float, rows)):.2f}", f"{max(map(float, rows)):.2f}")
    for page in ("README.md", "docs/tpus.md", "benchmarks/README.md"):
        text = text_of(TOP / page)
        assert "gpus.md#what-ran-where" in text or "`docs/gpus.md`" in text, page


def test_the_fixed_part_of_shared_memory() -> None:
    """The blocks of a rank, and its slots for small values."""
    megabytes = (Blocks.NBYTES + SharedSlots.nbytes_for(ranks=2)) / 1e6
    assert f"\n| fixed | {megabytes:.1f} MB |\n" in text_of(DOCS / "how_values_move.md")


def test_programs_name_what_exists() -> None:
    for page in PAGES:
        for program in programs_of(page):
            for name in names_in(ast.parse(program)):
                assert exists(name), f"{page.name}: ms.{name}"
        for name in re.findall(r"`(?:ms|mpistrat)\.([\w.]*\w)", text_of(page)):
            assert exists(name), f"{page.name}: {name}"


def test_a_program_that_imports_mpistrat_imports_all_that_it_uses() -> None:
    """The lines that tests/launch/test_docs.py puts before it give it a model and data, and need give it no module."""
    lent = {alias.asname or alias.name for alias in imports_of(ast.parse(OPEN_NAMES))}
    whole = 0
    for page in PAGES:
        for program in programs_of(page):
            tree = ast.parse(program)
            imported = {alias.asname or alias.name for alias in imports_of(tree)}
            if "ms" in imported:
                whole += 1
                used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
                assert not used & lent - imported, page.name
    assert whole


def imports_of(tree: ast.AST) -> Iterator[ast.alias]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from node.names


def test_calls_in_the_text_have_arguments_that_there_are() -> None:
    """`TopK(0.01)`, `ms.Variable(fn, shape=…)`: the thing of that name, if a door has it, takes these arguments."""
    checked = 0
    for page in PAGES:
        for code, call in calls_in_the_text(text_of(page)):
            name = ast.unparse(call.func).rpartition(".")[2]
            things = [getattr(door, name) for door in DOORS if name in dir(door)]
            checked += bool(things)
            assert not things or any(takes(thing, call) for thing in things), (page.name, code)
    assert checked > 20


def calls_in_the_text(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Of `TopK(0.01)`, `f(x, …)`, `devices=` and `wire_format=TopK(0.01)`: the calls."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`([^`]+)`", prose):
        whole = re.sub(r"(\w=)(?=[,)])", r"\1...", f"_({code})".replace("…", "..."))
        try:
            tree = ast.parse(whole, mode="eval").body
        except SyntaxError:  # no Python
            continue
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node is not tree)
        yield from ((code, call) for call in calls)


def takes(thing: Any, call: ast.Call) -> bool:
    keywords = {keyword.arg: ... for keyword in call.keywords if keyword.arg}
    arguments = [part for part in call.args if ast.unparse(part) != "..."]
    try:
        inspect.signature(thing).bind_partial(*arguments, **keywords)
    except TypeError:
        return False
    return True


def test_names_that_are_left_out_are_not_there() -> None:
    """Those of modules that have a place here."""
    text = text_of(DOCS / "coming_from.md").split("\nLeft out:\n")[1].split("\n\n")[0]
    doors = {
        "tf.compat.v1.distribute.": "compat.v1.",
        "tf.contrib.distribute.": "compat.contrib.",
        "tf.distribute.": "",
        "tf.tpu.experimental.": "tpu.",
    }
    left_out = [
        door + name
        for prefix, door in doors.items()
        for name in re.findall(rf"`{re.escape(prefix)}([\w.]+)`", text)
    ]
    assert len(left_out) == 12
    assert not any(map(exists, left_out))


def test_all_differences_are_on_their_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = runpy.run_path(str(DOCS / "conf.py"))["myst_substitutions"]["differences"]
    reasons = [rule.reason for rule in differences.load()]
    assert re.findall(r"^- (.*)\.$", made, re.MULTILINE) == reasons
    assert "\n{{ differences }}\n" in text_of(DOCS / "differences.md")
    for entrance in (README, DOCS / "coming_from.md", DOCS / "index.md"):
        assert re.search(r"differences(\.md\)|\n)", text_of(entrance)), entrance.name


def test_pages_name_the_settings_that_there_are() -> None:
    known = {setting.name for setting in SETTINGS}
    named = {name for page in PAGES for name in re.findall(r"MPISTRAT_\w+", text_of(page))}
    assert named <= known | {"MPISTRAT_"}


def exists(name: str) -> bool:
    try:
        operator.attrgetter(name)(ms)
    except AttributeError:
        return False
    return True


def names_in(tree: ast.AST) -> Iterator[str]:
    """`checkpoint.Checkpoint` for `ms.checkpoint.Checkpoint`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, _, name = ast.unparse(node).partition(".")
            if owner == "ms" and name.replace(".", "").isidentifier():
                yield name


def public_names(door: ModuleType) -> list[str]:
    """The classes and functions that a door shows; not what it imports for its own use."""
    things = {name: getattr(door, name) for name in dir(door) if not name.startswith("_")}
    return [
        name
        for name, thing in things.items()
        if (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__.startswith("mpistrat")
    ]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_public_names_are_in_the_reference(door: ModuleType) -> None:
    reference = "\n".join(map(text_of, (DOCS / "api").glob("*.md")))
    described = set(entries(reference))
    for name in public_names(door):
        thing = getattr(door, name)
        assert thing in {entry[1] for entry in described}, name
        assert (name, thing) in described or f"`{name}`" in reference, name


def entries(reference: str) -> Iterator[tuple[str, object]]:
    """Each name that has an entry, and what it stands for."""
    module = ""
    for directive, name in re.findall(r"^\.\. (\w+):: (\S+)", reference, re.MULTILINE):
        if directive == "currentmodule":
            module = name
        elif directive == "automodule":
            door = importlib.import_module(name)
            yield from ((member, getattr(door, member)) for member in public_names(door))
        else:
            owner, _, last = (name if "." in name else f"{module}.{name}").rpartition(".")
            yield last, getattr(importlib.import_module(owner), last)


def test_architecture_names_what_exists() -> None:
    text = text_of(DOCS / "architecture.md")
    package = Path(ms.__file__).parent
    for path, name in re.findall(r"`(\w[\w/]*(?:\.py|/))(?:: ([\w.]+))?`", text):
        file = package / path if (package / path).exists() else TOP / path
        assert file.exists(), path
        assert not name or name in definitions(ast.parse(file.read_text())), f"{path}: {name}"


def test_rooms_are_those_of_the_layers() -> None:
    rows = re.findall(r"^\| (`.*?) \|", text_of(DOCS / "architecture.md"), re.MULTILINE)
    rooms = [
        room.rstrip("/").removesuffix(".py") for row in rows for room in re.findall(r"`(.+?)`", row)
    ]
    test = ast.parse(text_of(TOP / "tests/unit/test_layering.py"))
    (layers,) = (
        ast.literal_eval(node.value)
        for node in test.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    )
    assert rooms == [room for layer in layers for room in layer]


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """`Router` and `Router.all_reduce`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield prefix + node.name
            yield from definitions(node, f"{prefix}{node.name}.")


def test_pages_that_texts_name() -> None:
    for folder in ("mpistrat", "scripts", "slurm", "tests"):
        for file in (TOP / folder).rglob("*"):
            if file.suffix in {"", ".py", ".sh", ".txt", ".sbatch"} and file.is_file():
                for page in re.findall(r"\bdocs/\w+\.md", text_of(file)):
                    assert (TOP / page).is_file(), f"{file}: {page}"
