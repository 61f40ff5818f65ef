"""Whose frame a call is said to be made at."""

import os
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from mpistrat.liveness.call_site import outside, raised_at

LIBRARY = os.path.join(sys.prefix, "lib", "site-packages", "lightning", "trainer.py")
PROGRAM = os.path.join(os.sep, "home", "ann", "train.py")


def frame_of(*files: str) -> FrameType:
    """Of a call in the first file, which the second has called, and so on."""

    def innermost() -> FrameType:
        return sys._getframe()

    call: Callable[[], FrameType] = innermost
    for file in files:
        names: dict[str, Callable[[], FrameType]] = {"inner": call}
        exec(compile("def outer():\n    return inner()", file, "exec"), names)
        call = names["outer"]
    frame = call().f_back
    assert frame is not None
    return frame


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([PROGRAM], PROGRAM),
        ([torch.__file__, PROGRAM], PROGRAM),
        ([torch.__file__, LIBRARY, PROGRAM], PROGRAM),
        ([torch.__file__, LIBRARY, PROGRAM, LIBRARY], PROGRAM),
    ],
)
def test_the_program_is_found_behind_libraries(files: list[str], expected: str) -> None:
    assert outside(frame_of(*files)).f_code.co_filename == expected


def test_a_program_that_is_installed_itself() -> None:
    found: list[FrameType] = []
    of_library = os.path.join(sys.prefix, "lib", "own.py")

    import threading

    def start() -> None:
        names = {"found": found, "frame": sys._getframe}
        exec(compile("found.append(frame())", of_library, "exec"), names)

    start.__code__ = start.__code__.replace(co_filename=of_library)
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert outside(found[0]).f_code.co_filename == of_library


def test_where_an_error_was_raised() -> None:
    code = compile('raise ValueError("told")', LIBRARY, "exec")
    names: dict[str, object] = {"code": code}
    with pytest.raises(ValueError, match="told") as raised:
        exec(compile("exec(code)", PROGRAM, "exec"), names)
    assert raised_at(raised.value).startswith(f"{PROGRAM}:1 ")
