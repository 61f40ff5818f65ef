"""Every wait between ranks has a watcher: a limit, or a record by which a wait that lasts too long is reported.

The waits are found in the source: the blocking calls of MPI, and loops that sleep. Each stands in a watcher's block, or
looks at a clock itself, or the table `tests/data/waits.txt` names its watcher.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "mpistrat"
TABLE = Path(__file__).parents[1] / "data" / "waits.txt"

# Names that only MPI's blocking calls have, …
_OF_MPI = """
    Barrier Bcast Gather Gatherv Scatter Scatterv Allgather Allgatherv Allreduce Reduce Reduce_scatter
    Reduce_scatter_block Alltoall Alltoallv Scan Exscan Recv Mrecv Send Ssend Sendrecv Wait Waitall Waitany Probe
    Mprobe Split Split_type Create Create_group Create_intercomm Create_from_group Dup Merge Allocate
    Allocate_shared Create_dynamic Fence Lock_all Agree Shrink Spawn Connect Accept Disconnect Init Init_thread
    bcast sendrecv waitall waitany mprobe probe ssend scan exscan
"""
# … and names that are MPI's where the object is one of these.
_OF_MPI_AND_OTHERS = """
    gather scatter reduce allreduce allgather alltoall recv send wait barrier Free Lock
"""
_OBJECTS_OF_MPI = """
    comm _comm _private node leaders world COMM_WORLD duplicate smaller message arrived Request request
"""
OF_MPI, OF_MPI_AND_OTHERS, OBJECTS_OF_MPI = (
    frozenset(names.split()) for names in (_OF_MPI, _OF_MPI_AND_OTHERS, _OBJECTS_OF_MPI)
)


def table() -> dict[str, dict[str, list[str]]]:
    """The sections of the table: what is before the colon of a line, and the words after it."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, words = line.partition(": ")
            section[name] = words.split()
    return sections


SECTIONS = table()
BLOCKS = {name: watcher for name, (watcher,) in SECTIONS["blocks"].items()}


class Wait(NamedTuple):
    """A call that waits: the function, "file::Class.method", the call, and the watchers of blocks around it."""

    function: str
    call: str
    watchers: frozenset[str]


class _Waits(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self.found: list[Wait] = []
        self.watched: dict[str, set[str]] = {}  # functions, and the watchers whose blocks they have
        self._file, self._names, self._around = file, [""], [frozenset[str]()]
        self._loops, self._has_clock = 0, False  # of the function

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self._loops, self._has_clock
        attributes = (part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute))
        self._loops, self._has_clock = 0, "monotonic" in attributes
        self._named(node, node.decorator_list)
        self._loops, self._has_clock = before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._named(node, [])

    def _named(self, node: ast.FunctionDef | ast.ClassDef, around: list[ast.expr]) -> None:
        self._names.append(f"{self._names[-1]}.{node.name}".lstrip("."))
        self._inside(around, node)
        self._names.pop()

    def visit_With(self, node: ast.With) -> None:
        self._inside([item.context_expr for item in node.items], node)

    def visit_While(self, node: ast.While) -> None:
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1

    def _inside(self, blocks: list[ast.expr], node: ast.AST) -> None:
        parts = {part for block in blocks for part in ast.walk(block)}
        names = {_name(part.func) for part in parts if isinstance(part, ast.Call)}
        watchers = {BLOCKS[name] for name in names & BLOCKS.keys()}
        self.watched.setdefault(self._function, set()).update(watchers)
        self._around.append(self._around[-1] | watchers)
        self.generic_visit(node)
        self._around.pop()

    @property
    def _function(self) -> str:
        return f"{self._file}::{self._names[-1]}"

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return
        name, whose = node.func.attr, _name(node.func.value)
        of_mpi = name in OF_MPI or (name in OF_MPI_AND_OTHERS and whose in OBJECTS_OF_MPI)
        sleeps = name == "sleep" and self._loops > 0 and not self._has_clock
        if of_mpi or sleeps:
            self.found.append(Wait(self._function, f"{whose}.{name}", self._around[-1]))


def _name(part: ast.expr) -> str:
    return part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")


@pytest.fixture(scope="module")
def files() -> list[_Waits]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        found.append(_Waits(path.relative_to(PACKAGE).as_posix()))
        found[-1].visit(ast.parse(path.read_text()))
    return found


def test_every_wait_has_a_watcher(files: list[_Waits]) -> None:
    waits = [wait for file in files for wait in file.found]
    assert len(waits) > 100
    alone = {wait for wait in waits if not wait.watchers and wait.function not in SECTIONS["waits"]}
    assert not alone, "put a watcher's block around these waits, or list the one that there is"


def test_the_table_is_true(files: list[_Waits]) -> None:
    """It names functions that wait, and watchers that are there."""
    unwatched = {wait.function for file in files for wait in file.found if not wait.watchers}
    assert SECTIONS["waits"].keys() - unwatched == set()
    watched = {name: watchers for file in files for name, watchers in file.watched.items()}
    around, others = SECTIONS["around"], SECTIONS["others"]
    assert around.keys() | others.keys() == {w for ws in SECTIONS["waits"].values() for w in ws}
    for function in (function for functions in around.values() for function in functions):
        assert watched[function], f"{function} has no watcher's block"
    assert set(BLOCKS.values()).union(*others.values()) <= watched.keys()


def test_a_wait_without_a_watcher_is_found() -> None:
    source = """
def watched(comm):
    with start_deadline("the start"):
        comm.Barrier()
def unwatched(comm):
    comm.allgather(1)
    while not there():
        time.sleep(1)
"""
    file = _Waits("file.py")
    file.visit(ast.parse(source))
    deadline = frozenset((BLOCKS["start_deadline"],))
    assert file.found == [
        Wait("file.py::watched", "comm.Barrier", deadline),
        Wait("file.py::unwatched", "comm.allgather", frozenset()),
        Wait("file.py::unwatched", "time.sleep", frozenset()),
    ]
