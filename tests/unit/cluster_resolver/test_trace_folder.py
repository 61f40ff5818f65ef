"""MPISTRAT_TRACE."""

import os

from mpistrat.cluster_resolver.trace_folder import trace_folder


def test_nothing_is_traced_unless_a_folder_is_named() -> None:
    assert trace_folder({}) is None
    assert trace_folder({"MPISTRAT_TRACE": ""}) is None


def test_a_relative_folder_is_this_process_s() -> None:
    assert trace_folder({"MPISTRAT_TRACE": "a/b"}) == os.path.join(os.getcwd(), "a", "b")
    assert trace_folder({"MPISTRAT_TRACE": "/a/b"}) == "/a/b"
