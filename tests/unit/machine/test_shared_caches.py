"""Which caches processors share."""

from pathlib import Path

import pytest

from mpistrat.machine.shared_caches import caches_of


@pytest.fixture
def kernel(tmp_path: Path) -> dict[str, str]:
    """Of four processors: each two share a cache of level 2, and all one of level 3, of more than 32 processors."""
    maps = {2: ["3", "3", "c", "c"], 3: ["00000001,0000000f"] * 4}
    for level, of_cpus in maps.items():
        for cpu, shared in enumerate(of_cpus):
            index = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            index.mkdir(parents=True)
            (index / "level").write_text(f"{level}\n")
            (index / "shared_cpu_map").write_text(f"{shared}\n")
    (tmp_path / "cpuinfo").write_text("flags : fpu sse2\n")
    return {"devices": str(tmp_path), "described": str(tmp_path / "cpuinfo")}


def test_caches_of_bound_ranks(kernel: dict[str, str]) -> None:
    assert caches_of({1}, **kernel) == ("2 3", "3 00000001,0000000f")
    assert caches_of({2, 3}, **kernel) == ("2 c", "3 00000001,0000000f")
    assert caches_of({1, 2, 32}, **kernel) == ("3 00000001,0000000f",)
    assert caches_of({1, 33}, **kernel) == ()


def test_what_the_kernel_does_not_know(kernel: dict[str, str]) -> None:
    assert caches_of({4}, **kernel) == ()
    assert caches_of({1}, **{**kernel, "described": "/none"}) == ()
    Path(kernel["described"]).write_text("flags : fpu hypervisor\n")
    assert caches_of({1}, **kernel) == ()
