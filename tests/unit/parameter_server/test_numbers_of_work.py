"""Which updates belong to a piece of work, and how they are numbered."""

import threading

from mpistrat.parameter_server.client import _Work


def test_all_threads_work_at_one_piece() -> None:
    work = _Work()
    assert work.number(1) == (None, 0)
    work.begin(7)
    numbers = [work.number(1)]
    thread = threading.Thread(target=lambda: numbers.append(work.number(1)))
    thread.start()
    thread.join()
    assert [*numbers, work.number(2)] == [(7, 0), (7, 1), (7, 0)]
    work.begin(7)  # again, by another worker
    assert work.number(1) == (7, 0)
    work.end()
    assert work.number(1) == (None, 0)
