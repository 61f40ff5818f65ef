"""Holds every test to a time limit (60 s, or `@pytest.mark.time_limit(seconds)`), and collecting and finishing too."""

from collections.abc import Generator

import pytest

from support.harness.hang_watch import HangWatch

SECONDS_PER_TEST = 60.0
SECONDS_TO_COLLECT = 180.0  # importing torch on every rank of a slow, shared machine


class TimeLimit:
    def __init__(self, watch: HangWatch) -> None:
        self._watch = watch

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        with self._watch.limit("collecting tests", SECONDS_TO_COLLECT):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        mark = item.get_closest_marker("time_limit")
        seconds = float(mark.args[0]) if mark else SECONDS_PER_TEST
        with self._watch.limit(item.nodeid, seconds):
            return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        self._watch.rearm()  # pytest's own faulthandler plugin has just cancelled the clock

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, object, object]:
        with self._watch.limit("finishing the session", SECONDS_PER_TEST):
            return (yield)
