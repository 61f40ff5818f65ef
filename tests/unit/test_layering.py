"""The order of the rooms: a module imports only what stands below it here, and no imports go round.

Every import counts: at the top of a file, inside a function, and by name in a string, as for
`importlib.import_module("mpistrat…")`, `python -m mpistrat…` and lazy tables; and the names that a package loads on
first use, though it imports them for type checkers alone. Other imports for type checkers may go up, but not round.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from support import house

PACKAGE = "mpistrat"
FOLDER = Path(__file__).parents[2] / PACKAGE

# From the top down: a line imports from the lines below it.
LAYERS = (
    ("__main__",),
    ("compat",),
    ("tools",),
    ("experimental",),
    ("coordinator",),
    ("tpu",),
    ("fault_tolerance",),
    ("checkpoint",),
    ("xla",),
    ("parameter_server",),
    ("strategies",),
    ("strategy",),
    ("input",),
    ("pytorch",),
    ("replicas",),
    ("variables",),
    ("cross_device_ops",),
    ("values",),
    ("context",),
    ("wire_formats",),
    ("torch_distributed",),
    ("communicators",),
    ("trace",),
    (
        "liveness",
        "cluster_resolver",
    ),  # who starts MPI starts the observer; the end of a job depends on the MPI
    ("machine",),
    ("indexed_slices",),
    ("arrays",),
    ("settings",),
    ("topology",),
    ("options",),
    ("reduce_op",),
    ("nest",),
    ("errors",),
)

LONGEST_CHAIN = 18
# Files of fewer code lines than SMALL that a single file imports, one of their folder: each is an idea of its own.
SMALL = 60
SMALL_FILES_OF_ONE_USER = 20

FIRST_USE = f"{PACKAGE}.machine.first_use"

# Who we are comes from the resolvers, what the host has from `machine`, and what users set from `settings`.
MAY_READ_ENVIRONMENT = ("cluster_resolver/", "machine/", "settings.py", "tools/init/")

Imports = dict[str, set[str]]


def imports_of(graph: grimp.ImportGraph) -> Imports:
    """By module: what it imports, and what strings in it name."""
    imports: Imports = {
        name: graph.find_modules_directly_imported_by(name) for name in graph.modules
    }
    for path in FOLDER.rglob("*.py"):
        module = ".".join((PACKAGE, *path.relative_to(FOLDER).with_suffix("").parts))
        module = module.removesuffix(".__init__")
        imports[module] |= set(named_in(ast.parse(path.read_text()), module, graph))
    return imports


def named_in(tree: ast.AST, module: str, graph: grimp.ImportGraph) -> Iterator[str]:
    """The other modules that strings name. A string that ends with a dot, or f"{__name__}.", names all in a package."""
    for node in ast.walk(tree):
        name = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.FormattedValue) and ast.unparse(node.value) == "__name__":
            name = f"{module}."
        if isinstance(name, str) and name.removesuffix(".") in graph.modules - {PACKAGE}:
            yield from graph.find_children(name[:-1]) if name.endswith(".") else {name} - {module}


@pytest.fixture(scope="module")
def running() -> Imports:
    """Imports that run."""
    return imports_of(
        grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    )


@pytest.fixture(scope="module")
def written() -> Imports:
    """All imports, those for type checkers included."""
    return imports_of(grimp.build_graph(PACKAGE, cache_dir=None))


@pytest.fixture(scope="module")
def loading(running: Imports, written: Imports) -> Imports:
    """Imports that run, and the names that `load_on_first_use` loads later."""
    return {
        name: imported | written[name] if FIRST_USE in imported else imported
        for name, imported in running.items()
    }


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_every_room_has_a_line(running: Imports) -> None:
    present = {room_of(name) for name in running if name != PACKAGE}
    assert present == {name for layer in LAYERS for name in layer}


def test_imports_go_down(loading: Imports) -> None:
    line = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    wrong = [
        f"{importer} -> {imported}"
        for importer in sorted(loading.keys() - {PACKAGE})
        for imported in sorted(loading[importer] - {PACKAGE})
        if line[room_of(importer)] > line[room_of(imported)]
    ]
    assert not wrong, "imports that go up:\n" + "\n".join(wrong)


def test_no_imports_go_round(written: Imports) -> None:
    assert in_circles(written) == set()


def test_no_folders_go_round_inside_a_room(loading: Imports) -> None:
    """The files and folders of a folder have an order, too, though no list says it."""
    order: Imports = {}
    for importer in loading.keys() - {PACKAGE}:
        for name in loading[importer] - {PACKAGE}:
            child, other = where_they_part(importer, name)
            if room_of(child) == room_of(other):
                order.setdefault(child, set()).add(other)
                order.setdefault(other, set())
    assert in_circles(order) == set()


def where_they_part(importer: str, imported: str) -> tuple[str, str]:
    """The files or folders, in the innermost folder of both modules, that hold one and the other."""
    these, others = importer.split("."), imported.split(".")
    alike = 0
    while these[alike : alike + 1] == others[alike : alike + 1]:
        alike += 1
    return ".".join(these[: alike + 1]), ".".join(others[: alike + 1])


def in_circles(imports: Imports) -> set[str]:
    """The modules that import themselves by way of others."""
    found = set()
    for start in imports:
        seen, ahead = set(), [*imports[start]]
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += imports[name]
        if start in seen:
            found.add(start)
    return found


def test_the_longest_chain(running: Imports) -> None:
    chains: dict[str, tuple[str, ...]] = {}
    for name in TopologicalSorter(running).static_order():
        below = max((chains[imported] for imported in running[name]), key=len, default=())
        chains[name] = (name.removeprefix(f"{PACKAGE}."), *below)
    longest = max(chains.values(), key=len)
    text = f"longest chain of imports: {len(longest)} modules\n" + " -> ".join(longest)
    print(text)
    assert len(longest) <= LONGEST_CHAIN, text


def test_few_small_files_have_one_user(written: Imports) -> None:
    users: Imports = {name: set() for name in written}
    for importer, imported in written.items():
        for name in imported:
            users[name].add(importer)
    small = {module.name for module in house.modules() if house.code_lines(module) < SMALL}
    found = [
        name
        for name, importers in sorted(users.items())
        if path_of(name) in small
        if len(importers) == 1 and folder_of(name) == folder_of(*importers)
    ]
    assert len(found) <= SMALL_FILES_OF_ONE_USER, found


def path_of(module: str) -> str:
    """The module's path below the package; a folder's `__init__.py` has another."""
    return module.removeprefix(f"{PACKAGE}.").replace(".", "/") + ".py"


def folder_of(module: str) -> str:
    return module.rpartition(".")[0]


def test_nothing_below_the_public_names_imports_them(running: Imports) -> None:
    assert [name for name, imported in running.items() if PACKAGE in imported] == []


def test_one_file_imports_torch_xla() -> None:
    graph = grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)
    assert graph.find_modules_that_directly_import("torch_xla") == {f"{PACKAGE}.xla.runtime"}


def test_only_resolvers_read_the_environment() -> None:
    readers = {
        path.relative_to(FOLDER).as_posix()
        for path in FOLDER.rglob("*.py")
        if any(reads_environment(ast.parse(path.read_text())))
    }
    assert {name for name in readers if not name.startswith(MAY_READ_ENVIRONMENT)} == set()


def reads_environment(tree: ast.AST) -> Iterator[bool]:
    """`os.environ` or `os.getenv`, except where an entry is only set or removed."""
    written = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield any(name.name in {"environ", "getenv"} for name in node.names)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
            yield node not in written
