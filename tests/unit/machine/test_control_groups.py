"""Limits of control groups of both versions."""

from pathlib import Path

import pytest

from mpistrat.machine import control_groups
from mpistrat.machine.control_groups import Allowed, allowed, most_memory


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_version_2(tmp_path: Path) -> None:
    """The tightest of a group and those around it: a Slurm step in a job."""
    (tmp_path / "cgroup").write_text("0::/slurm/job_7/step_0\n")
    top = tmp_path / "fs"
    write(
        top / "slurm" / "job_7",
        cpu__max="400000 100000",
        memory__max="8000",
        memory__current="1000",
    )
    write(
        top / "slurm/job_7/step_0", cpu__max="max 100000", memory__max="max", memory__current="900"
    )
    assert allowed(str(tmp_path / "cgroup"), str(top)) == Allowed(4.0, 8000, 1000)


def test_version_1(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("4:memory:/job_7\n2:cpu,cpuacct:/job_7\n1:name=systemd:/\n")
    top = tmp_path / "fs"
    write(top / "memory/job_7", memory__limit_in_bytes="5000", memory__usage_in_bytes="4000")
    write(top / "cpu/job_7", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert allowed(str(tmp_path / "cgroup"), str(top)) == Allowed(1.5, 5000, 4000)


@pytest.mark.parametrize(
    ("names", "cache"),
    [
        (("memory__max", "memory__current"), "inactive_file"),
        (("memory__limit_in_bytes", "memory__usage_in_bytes"), "total_inactive_file"),
    ],
)
def test_pages_of_files_are_as_good_as_free(
    tmp_path: Path, names: tuple[str, str], cache: str
) -> None:
    """Data that were read fill a group up to its limit, and nothing is short."""
    limit, used = names
    (tmp_path / "cgroup").write_text("0::/job_7/step_0\n")
    top = tmp_path / "fs"
    stat = f"anon 900\n{cache} 3000\nactive_file 100"
    write(top / "job_7", **{limit: "5000", used: "4990", "memory__stat": stat})
    write(top / "job_7/step_0", **{limit: "4000", used: "1500"})
    assert allowed(str(tmp_path / "cgroup"), str(top)) == Allowed(None, 4000, 1500)
    write(top / "job_7/step_0", **{limit: "max", used: "1500"})
    assert allowed(str(tmp_path / "cgroup"), str(top)) == Allowed(None, 5000, 1990)


def test_what_others_use_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "allowed", lambda: Allowed(memory=1000, memory_used=999))
    assert most_memory() == 1000
    monkeypatch.setattr(control_groups, "allowed", Allowed)
    assert 1 << 28 < most_memory() < 1 << 60


def test_a_container(tmp_path: Path) -> None:
    """Its own group is what is mounted, whatever path the host calls it by."""
    (tmp_path / "cgroup").write_text("0::/docker/0123\n")
    write(tmp_path / "fs", cpu__max="200000 100000")
    assert allowed(str(tmp_path / "cgroup"), str(tmp_path / "fs")) == Allowed(2.0)


def test_no_limits(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("4:memory:/\n2:cpu:/\n")
    write(tmp_path / "fs/memory", memory__limit_in_bytes="9223372036854771712")
    write(tmp_path / "fs/cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert allowed(str(tmp_path / "cgroup"), str(tmp_path / "fs")) == Allowed()
    assert allowed(str(tmp_path / "none"), str(tmp_path / "none")) == Allowed()
