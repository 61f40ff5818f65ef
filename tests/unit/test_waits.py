"""Every wait between ranks has a watcher: a limit, or a record by which a wait that lasts too long is reported.

The waits are found in the source: the blocking calls of MPI, and loops that sleep. Each stands in a watcher's block, or
looks at a clock itself, or the table says which function around it does, or which other watcher it has.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "mpistrat"

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

# By the name of a `with` block or decorator: the watcher of what is inside.
BLOCKS = {
    "start_deadline": "liveness/start_deadline.py::start_deadline",
    "init_deadline": "liveness/start_deadline.py::init_deadline",
    "meeting": "torch_distributed/communicator_pool.py::CommunicatorPools.meeting",
    "reported_as": "fault_tolerance/survivors.py::Survivors.reported_as",
    "enter": "communicators/contract/contract.py::Contract.enter",
    "_enter": "communicators/router.py::_entering",
}

# The functions whose blocks are around all calls of other functions.
CALLS = frozenset(
    f"communicators/{name}"
    for name in (
        "router.py::Router._call",
        "router.py::Router.all_reduce",
        *(f"node/memory.py::CheckedMemory.{call}" for call in ("window_buffer", "common_memory")),
    )
)
SPLIT = frozenset(("communicators/router.py::Router.split",))
OPENED = frozenset(("communicators/construction.py::communicator_for",))
GROUP = frozenset(("torch_distributed/communicator_pool.py::CommunicatorPools.take",))
STORE = frozenset(("torch_distributed/backend.py::rendezvous",))
START = frozenset(("torch_distributed/rendezvous.py::Base.__init__",))
STORE_OF_RUN = frozenset(("torch_distributed/rendezvous.py::start_agent_store",))
GPUS = frozenset(("communicators/transports/accelerator/gpu_ways.py::use_gpus",))
RECOVERY = frozenset(("fault_tolerance/elastic.py::_go_on_with",))
COPY = frozenset(("fault_tolerance/elastic.py::Elastic._keep",))
SERVERS = frozenset(("parameter_server/job.py::ServerJob.__init__",))
BUILT = OPENED | GROUP | SPLIT

# Other watchers. A process that has started this one, and kills it after a time:
DOCTOR = "tools/doctor/supervision.py::_listen"
TRIAL = "communicators/transports/accelerator/device_memory_proof.py::run"
# All ranks have just come together, and do nothing in between. The observer tells of a death; of a stop, nobody.
DEATHS = "liveness/failure_detector.py::FailureDetector.wait"
# Ranks are at the end of the program.
AT_THE_END = "liveness/observer.py::Observer._tell_who_waits_at_the_end"
# Another rank's message has come, and is taken.
COMES_FIRST = "communicators/transports/accelerator/joint_group.py::_wait"
# A thread of its own sleeps, and nobody waits for it.
IN_BACKGROUND = "liveness/job_end.py::JobEnd._look_out"

OTHER = frozenset((DOCTOR, TRIAL, DEATHS, AT_THE_END, COMES_FIRST, IN_BACKGROUND))

COMMUNICATORS = "communicators/transports"
WATCHED_BY: dict[str, frozenset[str]] = {
    "checkpoint/checkpoint_manager.py::CheckpointManager.wait": frozenset(
        ("communicators/router.py::Router.all_gather_object",)
    ),
    "communicators/construction.py::new_communicator": OPENED | GROUP,
    "communicators/construction.py::_ways_between_nodes": BUILT,
    "communicators/contract/contract.py::Contract.enter": frozenset((BLOCKS["enter"],)),
    "communicators/torch_store.py::opener_of_store": STORE | GPUS,
    "communicators/torch_store.py::address_that_all_reach": STORE | STORE_OF_RUN | GPUS,
    f"{COMMUNICATORS}/accelerator/device_aware.py::DeviceAwareTransport._combine": CALLS | GPUS,
    f"{COMMUNICATORS}/accelerator/device_aware.py::DeviceAwareTransport._spread": CALLS | GPUS,
    f"{COMMUNICATORS}/accelerator/device_memory_trial.py::main": frozenset((TRIAL,)),
    f"{COMMUNICATORS}/hierarchical.py::HierarchicalTransport.__init__": BUILT,
    **dict.fromkeys(
        (
            f"{COMMUNICATORS}/hierarchical.py::HierarchicalTransport.{method}"
            for method in ("_by_node", "_measure", "window_buffer", "common_memory")
        ),
        CALLS,
    ),
    **dict.fromkeys(
        (
            f"{COMMUNICATORS}/mpi.py::{function}"
            for function in (
                *("_all_reduce_by_tree", "_all_reduce_in_slices", "_gathered"),
                *("MpiTransport.all_reduce", "MpiTransport.reduce", "MpiTransport.reduce_scatter"),
                *("MpiTransport.broadcast", "MpiTransport.all_gather"),
                *("MpiTransport.all_gather_into", "MpiTransport.all_to_all"),
            )
        ),
        CALLS,
    ),
    f"{COMMUNICATORS}/mpi.py::MpiTransport.split": SPLIT,
    f"{COMMUNICATORS}/ring.py::RingTransport._exchange": CALLS,
    "fault_tolerance/survivors.py::Survivors.exchange": COPY,
    "fault_tolerance/survivors.py::Survivors.all_done": RECOVERY,
    "fault_tolerance/survivors.py::Survivors.go_on": RECOVERY,
    "liveness/abort_channel.py::AbortChannel.received": frozenset((COMES_FIRST,)),
    "liveness/abort_channel.py::AbortChannel.settle": frozenset((COMES_FIRST,)),
    "liveness/exit_group.py::ExitGroup.__init__": OPENED | GROUP | START,
    "liveness/exit_group.py::ExitGroup._receive": frozenset((IN_BACKGROUND,)),
    "liveness/job_end.py::JobEnd._wait_for": frozenset((AT_THE_END, DEATHS)),
    "liveness/node_records.py::NodeRecords.watch_of": BUILT | START | GPUS,
    "liveness/node_records.py::NodeRecords.see_each_other": BUILT | START | GPUS,
    "liveness/node_records.py::NodeRecords._join": BUILT | START | GPUS,
    "liveness/other_nodes.py::OtherNodes.__init__": OPENED | GROUP | START,
    **dict.fromkeys(  # wherever a communicator is made of another one
        (
            f"liveness/revocable_group.py::FaultTolerantComm.{method}"
            for method in ("Dup", "Split", "Split_type", "Create_group")
        ),
        BUILT | START | GPUS,
    ),
    "parameter_server/coordinator/worker.py::Worker._return_what_waits": frozenset(
        (IN_BACKGROUND,)
    ),
    "parameter_server/rpc/channel.py::Channel.__init__": SERVERS,
    **dict.fromkeys(
        (
            f"tools/bench/peers/raw_mpi.py::{function}"
            for function in ("_copied.step", "_in_place.step", "all_reduces.into_another")
        ),
        frozenset((DEATHS,)),
    ),
    "tools/bench/peers/raw_mpi.py::all_reduces.over_itself": frozenset((DEATHS,)),
    **dict.fromkeys(
        (
            f"tools/doctor/{function}"
            for function in (
                *("links.py::measure", "links.py::_lead", "links.py::_exchange"),
                *("links.py::_follow", "nodes.py::compare_clocks"),
                *("nodes.py::compare_clocks.ask_node", "rank_process.py::_meet"),
                *("rank_process.py::_between_nodes", "rank_process.py::_wait_for_all"),
            )
        ),
        frozenset((DOCTOR,)),
    ),
    "torch_distributed/communicator_pool.py::_Pool.take": GROUP,
    "torch_distributed/communicator_pool.py::CommunicatorPools.__init__": START,
    "torch_distributed/communicator_pool.py::CommunicatorPools._comm_of": GROUP,
    "torch_distributed/messages.py::_Progress._run": frozenset((IN_BACKGROUND,)),
    "trace/of_job.py::begin": OPENED | GROUP,
    "trace/of_job.py::compare_clocks": OPENED | GROUP | {DEATHS},
    "trace/of_job.py::compare_clocks.ask": OPENED | GROUP | {DEATHS},
    **dict.fromkeys(
        (f"trace/of_job.py::{name}" for name in ("gather_parts", "_send_part", "_receive_part")),
        frozenset((DEATHS,)),
    ),
}


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
    alone = {wait for wait in waits if not wait.watchers and wait.function not in WATCHED_BY}
    assert not alone, "put a watcher's block around these waits, or list the one that there is"


def test_the_table_is_true(files: list[_Waits]) -> None:
    """It names functions that wait, and watchers that are there."""
    unwatched = {wait.function for file in files for wait in file.found if not wait.watchers}
    assert WATCHED_BY.keys() - unwatched == set()
    watched = {name: watchers for file in files for name, watchers in file.watched.items()}
    for around in set().union(*WATCHED_BY.values()):
        assert around in watched, around
        is_a_watcher = around in OTHER or around in BLOCKS.values()
        assert is_a_watcher or watched[around], f"{around} has no watcher's block"
    assert set(BLOCKS.values()) <= watched.keys()


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
