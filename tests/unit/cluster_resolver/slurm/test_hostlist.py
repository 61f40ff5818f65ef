"""Slurm's short forms, and ValueError for everything else."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.cluster_resolver.slurm.hostlist import expand_hostlist, expand_tasks_per_node


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("b,a", ["b", "a"]),
        ("n[001,007-009],x-1", ["n001", "n007", "n008", "n009", "x-1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[99-101]", ["n99", "n100", "n101"]),
        ("t02n[13,41],t03n5", ["t02n13", "t02n41", "t03n5"]),
        ("[1-2]", ["1", "2"]),
        ("n[3,1,2]", ["n3", "n1", "n2"]),
    ],
)
def test_hosts_in_list_order(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "n[1-2]-ib",
        "n[1-2]x[1-2]",
        ",a",
        "a,",
        "a,,b",
        "n[1-2",
        "n1-2]",
        "n[a-b]",
        "n[1-2-3]",
        "n[]",
        "n[1,]",
        "n[-1]",
        "n[1-]",
        "n[3-1]",
        "n[[1]]",
        "n[1 ]",
        "a b",
        "n[١-٣]",
        "n[0-99999999999]",
        "n[0-999999999999999999999]",
    ],
)
def test_anything_else_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"host list|expands to more"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("2", [2]),
        ("2,1", [2, 1]),
        ("2(x3)", [2, 2, 2]),
        ("1(x2),3,4(x1)", [1, 1, 3, 4]),
        ("2(x0)", []),
    ],
)
def test_tasks_per_node(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize(
    "text", ["", "a", "2x3", "2 ,1", "2(3)", "2(x)", "-1", "2,", "1(x99999999999)", "٢"]
)
def test_bad_tasks_per_node_are_value_errors(text):
    with pytest.raises(ValueError, match=r"tasks per node|expands to more"):
        expand_tasks_per_node(text)


SLURM_CHARACTERS = st.text(st.sampled_from("nab019[]-,()x. "), max_size=24)


@given(SLURM_CHARACTERS | st.text())
def test_any_text_expands_or_is_a_value_error(text):
    for expand in (expand_hostlist, expand_tasks_per_node):
        with contextlib.suppress(ValueError):
            assert isinstance(expand(text), list)


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]+-?", fullmatch=True), st.integers(0, 999)),
        min_size=1,
        max_size=9,
    )
)
def test_written_out_hosts_come_back(hosts):
    names = [f"{prefix}{number}" for prefix, number in hosts]
    assert expand_hostlist(",".join(names)) == names
    assert expand_hostlist(",".join(f"{prefix}[{number}]" for prefix, number in hosts)) == names


@given(
    st.from_regex(r"[a-z]{1,5}", fullmatch=True),
    st.integers(0, 2000),
    st.integers(0, 50),
    st.integers(1, 6),
)
def test_a_range_counts_up_with_its_width(prefix, first, more, width):
    text = f"{prefix}[{first:0{width}d}-{first + more}]"
    least = max(width, len(str(first)))
    expected = [prefix + str(number).zfill(least) for number in range(first, first + more + 1)]
    assert expand_hostlist(text) == expected
