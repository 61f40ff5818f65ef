"""The order of the rooms: a module imports only what stands below it here, and no imports go round."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGE = "mpistrat"
FOLDER = Path(__file__).parents[2] / PACKAGE

# From the top down. A line imports from the lines below it; names on one line may import from each other, one way.
LAYERS = (
    ("__main__",),
    ("tools",),
    ("compat", "coordinator", "experimental", "tpu"),
    ("fault_tolerance",),
    ("checkpoint", "parameter_server", "xla"),
    ("strategies", "strategy"),
    ("input",),
    ("pytorch", "replicas"),
    ("variables",),
    ("cross_device_ops",),
    ("values",),
    ("context", "wire_formats"),
    ("communicators",),
    ("cluster_resolver", "liveness", "trace"),
    ("arrays", "indexed_slices", "machine"),
    ("settings",),
    ("errors", "nest", "options", "reduce_op", "topology"),
)

# Who we are comes from the resolvers, what the host has from `machine`, and what users set from `settings`.
MAY_READ_ENVIRONMENT = ("cluster_resolver/", "machine/", "settings.py")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Imports that run, at the top of a file or inside a function; those for type checkers do not count."""
    return grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)


def test_every_module_has_a_layer(graph: grimp.ImportGraph) -> None:
    present = {name.removeprefix(f"{PACKAGE}.") for name in graph.find_children(PACKAGE)}
    assert present == {name for layer in LAYERS for name in layer}


def test_imports_run_one_way(graph: grimp.ImportGraph) -> None:
    for importer in ("arrays", "machine.devices", "pytorch.gradients.lazy_all_reduce"):
        graph.remove_import(importer=f"{PACKAGE}.{importer}", imported=f"{PACKAGE}.xla")
    layers = [grimp.Layer(*names, independent=False) for names in LAYERS]
    wrong = graph.find_illegal_dependencies_for_layers(layers, containers={PACKAGE})
    chains = [
        " -> ".join((*sorted(r.heads), *r.middle, *sorted(r.tails)))
        for d in wrong
        for r in d.routes
    ]
    assert not chains, "imports that go up:\n" + "\n".join(sorted(chains))


def test_no_circle(graph: grimp.ImportGraph) -> None:
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()  # CycleError names the circle


def test_nothing_below_the_public_names_imports_them(graph: grimp.ImportGraph) -> None:
    assert graph.find_modules_that_directly_import(PACKAGE) == set()


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
