"""The same software on all ranks."""

import dataclasses
from collections.abc import Callable

import pytest

from mpistrat.tools.doctor import software
from mpistrat.tools.doctor.facts import JobFacts
from mpistrat.tools.doctor.finding import OK, PROBLEM

MakeJob = Callable[..., JobFacts]


def test_the_same_everywhere(make_job: MakeJob) -> None:
    (finding,) = software.check(make_job(nodes=2))
    assert finding.level == OK
    assert finding.text.endswith("torch 2.13 on all ranks.")


def test_no_torch(make_job: MakeJob) -> None:
    (finding,) = software.check(make_job(software={"torch": ""}))
    assert finding.level == OK
    assert "no torch: NumPy and CuPy only" in finding.text


def test_torch_xla_is_told_where_it_is(make_job: MakeJob) -> None:
    (finding,) = software.check(make_job(nodes=2, software={"torch_xla": "2.13.1"}))
    assert finding.level == OK
    assert finding.text.endswith("torch 2.13, torch_xla 2.13.1 on all ranks.")


@pytest.mark.parametrize("torch", ["2.13", ""])
def test_torch_xla_of_another_torch(make_job: MakeJob, torch: str) -> None:
    wrong, _ = software.check(make_job(software={"torch": torch, "torch_xla": "2.9.0"}))
    assert wrong.level == PROBLEM
    assert (
        f"torch_xla 2.9.0 is built against torch 2.9, and this is {'torch' if torch else 'no'}"
        in wrong.text
    )
    assert "pip install 'torch==2.9.*' 'torch_xla==2.9.*'" in wrong.fix


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("python", "Python"),
        ("torch", "torch"),
        ("torch_xla", "torch_xla"),
        ("mpistrat", "mpistrat"),
        ("folder", "folder"),
    ],
)
def test_another_on_some_ranks(make_job: MakeJob, field: str, words: str) -> None:
    job = make_job(nodes=2)
    changed = [
        dataclasses.replace(rank, software=dataclasses.replace(rank.software, **{field: "other"}))
        for rank in job.ranks[2:]
    ]
    (finding,) = software.check(JobFacts(job.ranks[:2] + changed))
    assert finding.level == PROBLEM
    assert words in finding.text
    assert "other on ranks 2-3" in finding.text


def test_here() -> None:
    here = software.look()
    assert here.numpy
    assert here.folder.endswith("mpistrat")
