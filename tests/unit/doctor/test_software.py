"""The same software on all ranks."""

import dataclasses
from collections.abc import Callable

import pytest

from mpistrat.doctor import software
from mpistrat.doctor.facts import Job
from mpistrat.doctor.finding import OK, PROBLEM

MakeJob = Callable[..., Job]


def test_the_same_everywhere(make_job: MakeJob) -> None:
    (finding,) = software.check(make_job(nodes=2))
    assert finding.level == OK
    assert finding.text.endswith("torch 2.13 on all ranks.")


def test_no_torch(make_job: MakeJob) -> None:
    (finding,) = software.check(make_job(software={"torch": ""}))
    assert finding.level == OK
    assert "no torch: NumPy and CuPy only" in finding.text


@pytest.mark.parametrize(
    ("field", "words"),
    [("python", "Python"), ("torch", "torch"), ("mpistrat", "mpistrat"), ("folder", "folder")],
)
def test_another_on_some_ranks(make_job: MakeJob, field: str, words: str) -> None:
    job = make_job(nodes=2)
    changed = [
        dataclasses.replace(rank, software=dataclasses.replace(rank.software, **{field: "other"}))
        for rank in job.ranks[2:]
    ]
    (finding,) = software.check(Job(job.ranks[:2] + changed))
    assert finding.level == PROBLEM
    assert words in finding.text
    assert "other on ranks 2-3" in finding.text


def test_here() -> None:
    here = software.look()
    assert here.numpy
    assert here.folder.endswith("mpistrat")
