"""Records of ranks that do nothing, and another process that holds a job's folder."""

import subprocess
import sys
from pathlib import Path

from mpistrat.liveness.records.record import (
    RankRecord,
)


def new_record(path: str | None, rank: int = 0) -> RankRecord:
    record = RankRecord(path, create=path is not None)
    record.start(rank, 2, "node7", 60.0, 1)
    return record


OTHER_PROCESS = """
import os, sys, tempfile
from mpistrat.liveness.records import job_folder
job_folder.SHARED_MEMORY = tempfile.tempdir = sys.argv[1]
folder, new = job_folder.JobFolder.create(sys.argv[2])
print(folder.path, "new" if new else "old", flush=True)
input()
os.kill(os.getpid(), 9)
"""


def other_process(folders: Path, name: str) -> tuple["subprocess.Popen[str]", str, bool]:
    """It holds the folder until it is given a line. Returns: it, the folder's path, and whether that is new."""
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(folders.parent), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    path, age = other.stdout.readline().split()
    return other, path, age == "new"
