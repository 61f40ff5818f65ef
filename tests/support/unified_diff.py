"""A unified diff: applied to a text, and how many lines it changes."""

import re


def apply(diff: str, text: str) -> str:
    """What `patch` makes of `text`. Raises ValueError where the text is another than the diff was made of."""
    lines = text.splitlines(keepends=True)
    result: list[str] = []
    done = 0
    for first, body in _hunks(diff):
        before = [line[1:] for line in body if line[0] in " -"]
        start = first - 1
        if lines[start : start + len(before)] != before:
            raise ValueError(f"the lines from {first} on are not those of the diff: make it anew")
        after = [line[1:] for line in body if line[0] in " +"]
        result += lines[done:start] + after
        done = start + len(before)
    return "".join(result + lines[done:])


def changed_lines(diff: str) -> int:
    """Of each run of lines that are taken away and added, the more of the two."""
    marks = ""
    for _, body in _hunks(diff):
        marks += "".join(line[0] for line in body) + " "
    runs = re.findall(r"[-+]+", marks)
    return sum(max(run.count("-"), run.count("+")) for run in runs)


def _hunks(diff: str) -> list[tuple[int, list[str]]]:
    """The first line of each, counted from 1, and its lines with their marks."""
    parts = re.split(r"^@@ -(\d+)[^\n]*\n", diff, flags=re.MULTILINE)[1:]
    numbers = parts[::2]
    bodies = parts[1::2]
    return [
        (int(number), body.splitlines(keepends=True))
        for number, body in zip(numbers, bodies, strict=True)
    ]
