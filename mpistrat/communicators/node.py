"""How the ranks of a node find each other's records."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from typing import Any, cast

from mpi4py import MPI

from mpistrat.cluster_resolver.cpu_share import cpu_share
from mpistrat.cluster_resolver.stall_limit import raises_on_stall, stall_seconds
from mpistrat.communicators.station import Station
from mpistrat.flight_recorder import observation
from mpistrat.flight_recorder.job_folder import (
    JobFolder,
    record_of,
    remove_leftovers,
    stacks_of,
)
from mpistrat.flight_recorder.record import END, RAISE, RankRecord

_record: RankRecord | None = None
_folder: JobFolder | None = None  # held as long as this process lives
_peers: dict[str, RankRecord] = {}  # by path


def station_of(comm: MPI.Intracomm, name: str) -> Station:
    """This rank's station in a new communicator of ours over `comm`; collective over it.

    At the first call of a process its record is made, and the node's observer is told of it.
    """
    node = cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
    record = _own_record(node)
    board = record.new_board(_hash(name), comm.size)
    if board is None:
        record, board = RankRecord(None), None
    peers = None
    if node.size == comm.size:
        everyone = node.allgather((record.path, board))
        readable = _read_records(everyone)
        if node.allreduce(readable is not None, MPI.LAND) and readable is not None:
            peers = [
                (theirs.words, board)
                for rank, (theirs, (_, board)) in enumerate(zip(readable, everyone, strict=True))
                if rank != node.rank
            ]
    cpus = os.sched_getaffinity(0)
    crowded = cpu_share(cpus, node.allgather(cpus)) < 1
    node.Free()
    return Station(record, -1 if board is None else board, peers, crowded, _of_part)


def _of_part(inner: Any, name: str) -> Station:
    return station_of(inner.comm, name)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _own_record(node: MPI.Intracomm) -> RankRecord:
    """Collective over `node`, also where this process has its record already."""
    global _record, _folder
    known = node.allgather(None if _record is None else _folder and _folder.path)
    path = next((path for path in known if path), None)
    missing = _record is None
    created: JobFolder | None = None
    if node.rank == 0 and path is None:
        with contextlib.suppress(OSError):
            remove_leftovers()
            created = JobFolder.create()
            path = created.path
    path, observable = node.bcast((path, _process_namespace()))
    if missing:
        _record = RankRecord(None)
        if path is not None and _process_namespace() == observable:
            with contextlib.suppress(OSError):
                folder = created or JobFolder(path)
                _record = _new_record(folder)
                _folder = folder
    node.Barrier()
    if created is not None:
        observation.observe(created.path)
    assert _record is not None
    return _record


def _process_namespace() -> int:
    """What numbers this process: in a container of its own, its pid says nothing to the observer."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _new_record(folder: JobFolder) -> RankRecord:
    world = MPI.COMM_WORLD
    record = RankRecord(record_of(folder.path, world.rank), create=True)
    observation.speak_on_signal(record, stacks_of(folder.path, world.rank))
    folder.remember_mappings(world.rank)
    record.start(
        world.rank,
        world.size,
        socket.gethostname(),
        threading.main_thread().ident or 0,
        stall_seconds(),
        RAISE if raises_on_stall() else END,
    )
    return record


def _read_records(everyone: list[tuple[str | None, int | None]]) -> list[RankRecord] | None:
    """All ranks' records; None when one cannot be read here, as from another container."""
    records = []
    for path, board in everyone:
        if path is None or board is None:
            return None
        if path not in _peers:
            try:
                _peers[path] = RankRecord(path)
            except OSError:
                return None
        records.append(_peers[path])
    return records
