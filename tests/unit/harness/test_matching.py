"""The sheets of the matching test show no name, text or annotation that gives a body away."""

import ast
import re

import pytest

from support.house import Module
from support.matching import PER_SHEET, SHEETS, WORDS, documented, sheets

SOURCE = '''
class Door:
    """{words}"""

    def open(self, key: Key, far: int = 3) -> Room:
        self.lock: Lock = key.turned(far)
        raise DoorError(f"the door {{far}} is shut", "push", reason=key)
'''.format(words="word " * WORDS)


def of(source: str) -> Module:
    return Module("doors/door.py", source, ast.parse(source))


def test_a_body_has_no_names_of_its_own() -> None:
    (door,) = documented([of(SOURCE)])
    assert door.place == "doors/door.py:2 Door"
    assert door.body().splitlines() == [
        "class n1:",
        "",
        "    def n2(self, n3, n4=3):",
        "        self.n5: ... = n3.turned(n4)",
        "        raise DoorError('…', '…', reason=n3)",
    ]


def test_short_docstrings_are_not_drawn() -> None:
    assert documented([of(SOURCE.replace("word ", "", 1))]) == []


def test_a_seed_draws_the_same_sheets() -> None:
    entries = [
        entry
        for n in range(SHEETS * PER_SHEET + 5)
        for entry in documented(
            [of(SOURCE.replace("Door:", f"Door{n}:").replace("word", f"w{n}", 1))]
        )
    ]
    first, again, other = (sheets(seed, entries) for seed in ("a", "a", "b"))
    assert first == again != other
    keys = "\n".join(sheet["key"] for sheet in first)
    assert len(set(re.findall(r"Door\d+", keys))) == SHEETS * PER_SHEET
    with pytest.raises(ValueError, match="expected 60 docstrings or more, got 9"):
        sheets("a", entries[:9])


def test_the_key_has_the_pairs() -> None:
    entries = [
        documented([of(SOURCE.replace("far: int = 3", f"far={n}").replace("word", f"w{n}", 1))])[0]
        for n in range(SHEETS * PER_SHEET)
    ]
    for sheet in sheets("seed", entries):
        rule = "=" * 60
        docstrings, bodies = (sheet[kind].split(rule)[1:] for kind in ("docstrings", "bodies"))
        for line in filter(None, sheet["key"].splitlines()):
            letter, number = line.split()[:2]
            number_of = docstrings["ABCDEFGHIJ".index(letter)].split()[1].removeprefix("w")
            assert f"n4={number_of})" in bodies[int(number) - 1]
