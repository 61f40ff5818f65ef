"""`NodeRecords`: makes a rank's record, and finds the records of the other ranks of its node."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import warnings
from collections.abc import Sequence
from typing import cast

from mpi4py import MPI

from mpistrat.liveness.observer import observation
from mpistrat.liveness.processes import job_of, process_namespace
from mpistrat.liveness.records.job_folder import JobFolder, note_members, remove_leftovers
from mpistrat.liveness.records.record import END, RAISE, RankRecord
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.revocable_group import revocable_group_of
from mpistrat.machine.cpu_share import cpu_share
from mpistrat.settings import raises_on_stall, stall_seconds


class NodeRecords:
    """Makes the watch of each communicator (its slots in the ranks' records), and this rank's record for it.

    Attributes: record: this rank's record. Until the first `watch_of` no other process sees it; afterwards it is in the
        job's folder, if there is one.
    """

    def __init__(self) -> None:
        self.record = RankRecord(None)
        self._has_joined = False
        self._read: dict[str, RankRecord] = {}  # by path

    def watch_of(self, comm: MPI.Intracomm, name: str) -> CommunicatorWatch:
        """Return this rank's watch of a new communicator of ours over `comm`: its slots in the ranks' records.

        Collective over `comm`. The first call also puts this rank's record into the job's folder, and starts the node's
        observer if none runs. If the record has no free slot, the watch has a record that no other process sees.

        Args: name: the communicator's name, the same on all ranks.
        """
        node = cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
        self._join(node)
        record = self.record
        first = comm.bcast(MPI.COMM_WORLD.rank)
        peers = None
        while (slot := record.new_slot(_hash(name), comm.size, first)) is None:
            # The rank's record has no free slot, so the slot is in a new record in this process's memory: nobody
            # observes `comm`.
            record = _start(RankRecord(None))
        if node.size == comm.size and self.see_each_other(node, record):
            slots = node.allgather((record.path, slot))
            del slots[node.rank]
            peers = [(self._read[path].words, peer_slot) for path, peer_slot in slots]
        cpus = os.sched_getaffinity(0)
        crowded = cpu_share(cpus, node.allgather(cpus)) < 1
        node.Free()
        return CommunicatorWatch(record, slot, peers, crowded, revocable_group_of(comm))

    def watch_of_members(
        self, watch: CommunicatorWatch, ranks: Sequence[int], name: str
    ) -> CommunicatorWatch:
        """Return this rank's watch of a group of ranks that have no communicator yet. Not collective.

        Called by: groups of torch.distributed, before the group's first meeting.

        Args:
            watch: the watch of a communicator with all these ranks. The new watch takes its `crowded`,
                `revocable_group` and `tell_others`.
            ranks: the group's ranks, as numbers in the job.
            name: the group's name, the same on all its ranks.
        """
        group = _hash(name)
        slot = self.record.new_slot(group, len(ranks), ranks[0])
        if slot is None:  # the record has no free slot: nobody observes the group
            return dataclasses.replace(watch, record=_start(RankRecord(None)), slot=-1, peers=None)
        with contextlib.suppress(OSError):  # the record is in no folder
            note_members(self.record.folder, group, ranks)
        return dataclasses.replace(watch, record=self.record, slot=slot, peers=None)

    def see_each_other(self, node: MPI.Intracomm, record: RankRecord) -> bool:
        """Whether all ranks of `node` can read each other's records. Collective over `node`.

        Args: record: this rank's record.   Returns: False if a rank's record is no file, or is in another container.
        """
        paths = node.allgather(record.path)
        readable = all(self._is_readable(path) for path in paths)
        # Not allreduce: mpi4py makes a duplicate for it, and nobody revokes the duplicate when a rank is lost.
        return all(node.allgather(readable))

    def _is_readable(self, path: str | None) -> bool:
        """Whether this process can read the record `path`; False for None, or for a file in another container."""
        if path is None:
            return False
        with contextlib.suppress(OSError):
            self._read[path] = self._read.get(path) or RankRecord(path)
        return path in self._read

    def _join(self, node: MPI.Intracomm) -> None:
        """Put this rank's record into the job's folder, and wait at most 1 s until the node's observer has seen it.

        If the observer has not, `node`'s rank 0 starts another. Collective over `node`, even if this rank's record is
        there already. Without a folder (no space, no right to write) the record stays in this process's memory.
        """
        folder, is_new = self._open_folder(node)
        held = node.allgather((folder and folder.path, process_namespace()))
        joined = (each for each in held if each[0])
        path, namespace = next(joined, ("", None))
        if not self._has_joined:
            if process_namespace() == namespace:
                with contextlib.suppress(OSError):
                    self._move_record_to(path, folder)
            _start(self.record)
            self._has_joined = True
        node.Barrier()
        if is_new:
            observation.start_observer(path)
        if self.record.path:
            observation.wait_until_observed()
            if not self.record.looked and node.rank == 0:
                observation.start_observer(self.record.folder)
                observation.wait_until_observed()
        self._warn_of_unseen(node)

    def _warn_of_unseen(self, node: MPI.Intracomm) -> None:
        unseen = sum(node.gather(self.record.path is None) or ())
        if unseen:
            warnings.warn(
                f"{unseen} of {node.size} ranks on {socket.gethostname()} have no record in /dev/shm or among the "
                "temporary files (no space, no right to write there, or containers with pid namespaces of their own): "
                "StallError cannot name missing ranks. Free space, or start containers with the host's pid namespace",
                RuntimeWarning,
                stacklevel=3,
            )

    def _open_folder(self, node: MPI.Intracomm) -> tuple[JobFolder | None, bool]:
        """Return the job's folder that this process holds, None if it holds none; and whether it was made just now.

        In its first call, rank 0 of `node` removes folders of killed jobs, and makes the folder if it holds none.
        """
        folder = observation.current.folder if observation.current else None
        if node.rank == 0 and not self._has_joined:
            with contextlib.suppress(OSError):
                remove_leftovers()
                if folder is None:
                    # Strategies over other ranks of the node use the same name: one observer watches them all.
                    return JobFolder.create(job_of(os.getpid()) or os.urandom(16).hex())
        return folder, False

    def _move_record_to(self, path: str, held: JobFolder | None) -> None:
        """Put this rank's record into the job's folder `path`, unless it is there, and set `record`.

        Args: held: the folder that this process holds, perhaps another one than `path`; None: it holds none.
        Raises: OSError if the folder cannot be used.
        """
        observed = observation.current
        if observed is None or observed.folder.path != path:
            folder = held if held and held.path == path else JobFolder(path)
            observed = observation.join(folder, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        observation.remember_mappings()
        self.record = observed.record


def _hash(name: str) -> int:
    import hashlib  # imported here, so that `import mpistrat` stays fast

    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _start(record: RankRecord) -> RankRecord:
    rank = MPI.COMM_WORLD.rank
    size = MPI.COMM_WORLD.size
    host = socket.gethostname()
    on_stall = RAISE if raises_on_stall() else END
    is_set = stall_seconds.is_set()
    record.start(rank, size, host, stall_seconds(), on_stall, limit_is_set=is_set)
    return record
