"""Shared memory, and limits on memory, files and disk space."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mpistrat.communicators.node import shared_memory
from mpistrat.tools.doctor import memory
from mpistrat.tools.doctor.facts import JobFacts, Room
from mpistrat.tools.doctor.finding import OK, PROBLEM, WARNING

MakeJob = Callable[..., JobFacts]
MB, GB = 10**6, 10**9


def only(job: JobFacts) -> tuple[str, str, str]:
    (finding,) = memory.check(job)
    return finding.level, finding.text, finding.fix


def test_enough_of_everything(make_job: MakeJob) -> None:
    (finding,) = memory.check(make_job(nodes=3))
    assert (finding.level, finding.nodes) == (OK, ("n1", "n2", "n3"))
    assert "/dev/shm has 30 GB free" in finding.text
    assert finding.text.endswith("at least.")


def test_the_64_mb_of_a_docker_container(make_job: MakeJob) -> None:
    level, text, fix = only(
        make_job(per_node=4, memory={"shared": Room("/dev/shm", 64 * MB, 64 * MB)})
    )
    assert level == WARNING
    assert "64 MB free of 64 MB" in text
    assert "workers of the DataLoaders of 4 ranks: SIGBUS ends" in text
    assert "--shm-size" in fix


def test_a_full_shm(make_job: MakeJob) -> None:
    level, text, _ = only(make_job(memory={"shared": Room("/dev/shm", GB, 4096)}))
    assert level == PROBLEM
    assert "MPI may need 10.8 MB there to start 2 ranks" in text


def test_no_shm(make_job: MakeJob) -> None:
    level, text, fix = only(make_job(memory={"shared": None}))
    assert (level, text[:11]) == (PROBLEM, "There is no")
    assert "--bind /dev/shm" in fix


def test_windows_are_not_there() -> None:
    """So a small /dev/shm is enough for gradients of any size."""
    segments, why = shared_memory.share(1 << 24, 0, lambda mine: [mine], populate=True)
    assert segments, why
    begin = f"{segments[0].ctypes.data:x}-"
    (mapping,) = (
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.lstrip("0").startswith(begin)
    )
    assert "/memfd:" in mapping
    assert "/dev/shm" not in mapping


def test_little_memory(make_job: MakeJob) -> None:
    level, text, fix = only(
        make_job(per_node=4, memory={"group_limit": 4 * GB, "group_used": 3 * GB})
    )
    assert level == WARNING
    assert text == "4 ranks here have 1 GB of memory left of 4 GB that a control group allows."
    assert "--mem=" in fix


@pytest.mark.parametrize(
    ("changes", "level", "words", "fix"),
    [
        ({"address_space": 8 * GB}, WARNING, "ulimit -v is 8 GB", "ulimit -v unlimited"),
        ({"infiniband": True, "locked": 65536}, PROBLEM, "ulimit -l allows 65.5 KB", "ulimit -l"),
        ({"files": 1024}, WARNING, "may open 1024 files", "ulimit -n 65536"),
        (
            {"files": 1024, "files_most": 1024},
            WARNING,
            "1024 files",
            "have the hard limit, 1024, raised",
        ),
        ({"files": 40, "files_most": 40}, PROBLEM, "2 ranks may need 264", "--ulimit nofile=65536"),
        ({"files": 256}, PROBLEM, "2 ranks may need 264", "ulimit -n 65536"),
        ({"temporary": Room("/tmp", GB, MB)}, WARNING, "/tmp, has 1 MB left", "TMPDIR"),
        ({"temporary": None}, PROBLEM, "no folder for temporary files", "TMPDIR"),
    ],
)
def test_limits(
    make_job: MakeJob, changes: dict[str, object], level: str, words: str, fix: str
) -> None:
    finding = only(make_job(memory=changes))
    assert finding[0] == level
    assert words in finding[1]
    assert fix in finding[2]


def test_the_page_of_errors_names_what_is_short_as_well() -> None:
    page = (Path(__file__).parents[4] / "docs" / "troubleshooting.md").read_text()
    for heading, remedy in (("Too many open files", "ulimit -n"), ("Bus error", "--shm-size")):
        section = page.split(f"\n### {heading}\n")[1].split("\n### ")[0]
        assert remedy in section
        assert "`mpistrat doctor` says how" in " ".join(section.split())


def test_locked_memory_matters_with_infiniband_only(make_job: MakeJob) -> None:
    assert only(make_job(memory={"locked": 65536}))[0] == OK


def test_this_machine() -> None:
    here = memory.look()
    assert here.shared is not None
    assert 0 <= here.shared.free <= here.shared.size
    assert here.available > 0
