"""How the ranks of a node find each other's records."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
import warnings
from typing import cast

from mpi4py import MPI

from mpistrat.liveness import observation
from mpistrat.liveness.job_folder import JobFolder, record_of, remove_leftovers, stacks_of
from mpistrat.liveness.processes import job_of
from mpistrat.liveness.record import END, LOOKED, RAISE, RankRecord
from mpistrat.liveness.revocable_group import revocable_group_of
from mpistrat.liveness.watch import CommunicatorWatch
from mpistrat.machine.cpu_share import cpu_share
from mpistrat.settings import raises_on_stall, stall_seconds

SECONDS_TO_BE_SEEN = 1.0

_record: RankRecord | None = None
_folder: JobFolder | None = None  # held as long as this process lives
_peers: dict[str, RankRecord] = {}  # by path


def watch_of(comm: MPI.Intracomm, name: str) -> CommunicatorWatch:
    """This rank's watch in a new communicator of ours over `comm`; collective over it.

    At the first call of a process its record is made, and the node's observer hears of it.
    """
    node = cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
    record = _own_record(node)
    board_of = comm.size, comm.bcast(MPI.COMM_WORLD.rank)
    board = record.new_board(_hash(name), *board_of)
    if board is None:  # the record has no more: this communicator is not observed
        record = _private_record()
        board = record.new_board(_hash(name), *board_of)
    assert board is not None
    records = records_of_all(node, record) if node.size == comm.size else None
    peers = None
    if records is not None:
        peers = [
            (theirs.words, their_board)
            for theirs, their_board in zip(records, node.allgather(board), strict=True)
            if theirs.path != record.path
        ]
    cpus = os.sched_getaffinity(0)
    crowded = cpu_share(cpus, node.allgather(cpus)) < 1
    node.Free()
    return CommunicatorWatch(record, board, peers, crowded, revocable_group_of(comm))


def records_of_all(node: MPI.Intracomm, record: RankRecord) -> list[RankRecord] | None:
    """The records of the ranks of `node`; None unless all can read all. Collective. Args: record: this rank's."""
    records = _read_records(node.allgather(record.path))
    # Not allreduce: mpi4py's goes over a duplicate of its own, which is not revoked when a rank is lost.
    return records if all(node.allgather(records is not None)) else None


def _hash(name: str) -> int:
    import hashlib  # here, because it makes importing mpistrat slower

    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _own_record(node: MPI.Intracomm) -> RankRecord:
    """Collective over `node`, also where this process has its record already."""
    global _record, _folder
    path, observable, new = None, 0, False
    created: JobFolder | None = None
    if node.rank == 0:
        observable = _process_namespace()
        if _folder is not None:
            path = _folder.path
        elif _record is None:
            with contextlib.suppress(OSError):
                remove_leftovers()
                # The same for strategies over other ranks of the node: one observer watches them all.
                created, new = JobFolder.create(job_of(os.getpid()) or uuid.uuid4().hex)
                path = created.path
    path, observable = node.bcast((path, observable))
    if _record is None:
        if path is not None and _process_namespace() == observable:
            with contextlib.suppress(OSError):
                folder = created or JobFolder(path)
                _record = _new_record(folder)
                _folder = folder
        if _record is None:
            _record = _private_record()
    node.Barrier()
    if new and created is not None:
        observation.observe(created.path)
    elif _folder is not None:
        _wait_to_be_seen(_record)
    unseen = node.gather(_folder is None)
    if unseen and any(unseen):
        warnings.warn(
            f"{sum(unseen)} of {node.size} ranks on {socket.gethostname()} have no record in /dev/shm or among the "
            "temporary files (no space, or no right to write there; or their processes are numbered apart, in "
            "containers): when ranks wait too long, a StallError cannot say for whom.",
            RuntimeWarning,
            stacklevel=2,
        )
    return _record


def _wait_to_be_seen(record: RankRecord) -> None:
    """By an observer that runs already: of a rank that died before, it would not learn how."""
    deadline = time.monotonic() + SECONDS_TO_BE_SEEN
    while not record.words[LOOKED] and time.monotonic() < deadline:
        time.sleep(0.01)


def _process_namespace() -> int:
    """What numbers this process: in a container of its own, its pid says nothing to the observer."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _new_record(folder: JobFolder) -> RankRecord:
    rank = MPI.COMM_WORLD.rank
    record = RankRecord(record_of(folder.path, rank), create=True)
    observation.speak_on_signal(record, stacks_of(folder.path, rank))
    folder.remember_mappings(rank)
    _start(record)
    return record


def _private_record() -> RankRecord:
    record = RankRecord(None)
    _start(record)
    return record


def _start(record: RankRecord) -> None:
    record.start(
        MPI.COMM_WORLD.rank,
        MPI.COMM_WORLD.size,
        socket.gethostname(),
        stall_seconds(),
        RAISE if raises_on_stall() else END,
    )


def _read_records(paths: list[str | None]) -> list[RankRecord] | None:
    """None when a record cannot be read here, as from another container."""
    records = []
    for path in paths:
        if path is None:
            return None
        if path not in _peers:
            try:
                _peers[path] = RankRecord(path)
            except OSError:
                return None
        records.append(_peers[path])
    return records
