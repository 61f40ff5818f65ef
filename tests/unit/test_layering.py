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

# The same inside a room, by the files and packages that a floor begins with; the longest name decides.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "checkpoint": (
        ("checkpoint_manager",),
        (
            "followers",
            "saving",
            "snapshots",
            "stored_checkpoint",
        ),
        ("checkpoint",),
        (
            "object_states",
            "random_states",
        ),
        ("replica_states",),
        ("directory",),
        ("state_tree",),
        (
            "shards",
            "tensor_file",
        ),
        (
            "manifest",
            "directory_lock",
        ),
        ("durable_files",),
        (
            "failures",
            "lazy_mapping",
            "schema",
        ),
    ),
    "cluster_resolver": (
        ("roles",),
        (
            "union",
            "simple",
            "gce",
            "kubernetes",
            "tpu",
            "slurm",
            "tf_config",
        ),
        ("listed_tasks",),
        ("mpi",),
        ("cluster_resolver",),
        ("roles.task_roles",),
        ("cluster_spec",),
        (
            "launcher_abort",
            "pair_of_processes",
            "torchrun",
            "metadata_server",
        ),
        ("launcher",),
    ),
    "communicators": (
        ("of_resolver",),
        ("construction",),
        ("transports.accelerator.gpu_transports",),
        ("transports.accelerator.library_dispatcher",),
        ("transports.accelerator",),
        ("transports.accelerator.buffers",),
        (
            "transports.accelerator.collective_group",
            "transports.accelerator.pending_calls",
        ),
        (
            "transports.accelerator.library",
            "transports.accelerator.torch_groups",
        ),
        ("transports",),
        ("costs",),
        (
            "router",
            "local",
            "communication_thread",
        ),
        ("known_calls",),
        ("communicator",),
        ("contract",),
        ("node",),
        ("transport",),
        ("operand_checks",),
        ("reduction",),
        (
            "host_views",
            "recycled_buffers",
            "graph_capture",
            "torch_store",
        ),
    ),
    "input": (
        ("preparing",),
        ("distribution",),
        ("distributed_dataset",),
        (
            "agreed_steps",
            "device_copies",
        ),
        (
            "file_reader",
            "torch_loader",
        ),
        (
            "readers",
            "dataset_identity",
        ),
        (
            "datasets",
            "dropped_examples",
        ),
        (
            "batches",
            "random_state",
            "worker_processes",
            "shards",
        ),
        (
            "batch_structure",
            "splitting",
            "element_spec",
            "generator_states",
            "input_context",
            "prefetch",
        ),
    ),
    "liveness": (
        ("ending",),
        ("observer",),
        ("waiting",),
        ("records",),
        (
            "bounded_waits",
            "call_site",
            "error_text",
            "processes",
            "revocable_group",
        ),
        ("deadlines",),
    ),
    "parameter_server": (
        ("strategies",),
        ("job",),
        ("modules",),
        ("coordinator",),
        ("client",),
        ("server",),
        ("protocol",),
        ("rpc",),
    ),
    "pytorch": (
        ("mirroring",),
        ("optimizers",),
        ("gradients",),
        ("shared_parameters",),
        ("watch.watch",),
        ("watch.compared",),
        ("watch",),
        (
            "conversion",
            "virtual_replicas",
        ),
        (
            "sync_batch_norm",
            "writes_by_hand",
        ),
        ("modules", "other_classes"),
        ("hooks",),
        (
            "compilation",
            "elementwise_optimizers",
            "metrics",
        ),
    ),
    "tools": (
        ("verify.command",),
        ("verify.runs", "verify.report"),
        ("verify.rank_process", "verify.causes"),
        ("verify.torch_steps", "verify.variable_rounds", "verify.comparison"),
        ("verify",),
        ("init.command",),
        ("init",),
        ("timeline",),
        ("bench.__main__",),
        ("bench.command",),
        ("bench.command_line",),
        ("bench",),
        ("bench.sweep",),
        (
            "bench.operations",
            "bench.peers",
        ),
        (
            "bench.work",
            "bench.examples",
        ),
        ("bench.models",),
        (
            "bench.report",
            "bench.pictures",
        ),
        ("bench.device",),
        ("bench.rounds",),
        ("doctor.command",),
        ("doctor.rank_process",),
        ("doctor",),
        ("doctor.cuda_driver",),
        ("doctor.children",),
        ("doctor.finding",),
        ("doctor.facts",),
    ),
    "torch_distributed": (
        ("run",),
        (
            "backend",
            "default_backend",
        ),
        (
            "default_group",
            "process_group",
            "rendezvous",
            "tracing",
        ),
        (
            "collectives",
            "communicator_pool",
            "compilation",
            "native",
            "next_group",
        ),
        (
            "messages",
            "reductions",
        ),
        (
            "tensors",
            "work",
        ),
        ("after_backward",),
    ),
}

LONGEST_CHAIN = 18

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


@pytest.mark.parametrize("room", FLOORS)
def test_imports_go_down_inside_a_room(loading: Imports, room: str) -> None:
    line = {name: i for i, floor in enumerate(FLOORS[room]) for name in floor}
    inside = f"{PACKAGE}.{room}."
    line_of = {
        module: line[max((f for f in line if stands_in(name, f)), key=len)]
        for module in loading
        if (name := module.removeprefix(inside)) != module
    }
    line_of[f"{PACKAGE}.{room}"] = -1  # above all floors: its names may come from any of them
    wrong = [
        f"{importer} -> {imported}"
        for importer in sorted(line_of)
        for imported in sorted(loading[importer] & line_of.keys())
        if line_of[importer] > line_of[imported]
    ]
    assert not wrong, "imports that go up:\n" + "\n".join(wrong)


def stands_in(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def test_no_imports_go_round(written: Imports) -> None:
    assert in_circles(written) == set()


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
