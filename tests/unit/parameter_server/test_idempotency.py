"""Which updates belong to a piece of work, and how they are numbered."""

import threading

from mpistrat.parameter_server.protocol.idempotency import UpdateNumbers, session_of


def test_all_threads_work_at_one_piece() -> None:
    work = UpdateNumbers()
    assert work.number(1) == (None, 0)
    with work.within(7):
        numbers = [work.number(1)]
        thread = threading.Thread(target=lambda: numbers.append(work.number(1)))
        thread.start()
        thread.join()
        assert [*numbers, work.number(2)] == [(7, 0), (7, 1), (7, 0)]
    with work.within(7):  # again, by another worker
        assert work.number(1) == (7, 0)
    assert work.number(1) == (None, 0)


def test_a_session_numbers_what_belongs_to_no_work_and_tells_what_is_answered() -> None:
    numbers = UpdateNumbers(session_of(4))
    first, second = numbers.push(), numbers.push()
    settled_at_first, early = first.__enter__(), numbers.number(1)
    settled = second.__enter__()
    late = numbers.number(1)
    assert early[0] == late[0] == session_of(4) < 0
    assert settled_at_first <= early[1] < late[1]
    assert settled <= early[1]  # the first is not answered yet
    first.__exit__(None, None, None)
    with numbers.push() as settled:
        assert early[1] < settled <= late[1]
    assert numbers.number(2)[1] != numbers.number(2)[1]
    with numbers.within(7):
        assert numbers.number(1) == (7, 0)
