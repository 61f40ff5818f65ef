"""Console blocks of pages are run, and compared with what they print."""

import os
from pathlib import Path

import pytest

from support import console
from support.console import Command, SavedFile

PAGE = """
Save it as `hello.sh`, in an empty folder:

```bash
echo "hello $1"
echo "and goodbye" >&2
exit 3
```

Then start it:

```console
$ sh hello.sh \\
    you
hello …
and goodbye
$ true
```

```bash
rm of nothing that is run
```
"""
STDOUT = "1 of 2\nlong words\n3\n"
STDERR = "notice\n  in two lines\n\nerror\n"


def run_page(folder: Path, text: str) -> list[int]:
    """The exit codes of its commands."""
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return [job.returncode for job in console.run(page, folder, os.environ)]


def test_a_page_s_files_and_commands() -> None:
    assert console.steps(PAGE) == [
        SavedFile("hello.sh", 'echo "hello $1"\necho "and goodbye" >&2\nexit 3\n'),
        Command("sh hello.sh \\\n    you", "hello …\nand goodbye\n"),
        Command("true", ""),
    ]


def test_they_are_run_in_the_folder(tmp_path: Path) -> None:
    assert run_page(tmp_path, PAGE) == [3, 0]


@pytest.mark.parametrize(
    "output",
    [
        "1 of 2\nlong words\n3\nnotice\n  in two lines\nerror\n",
        "notice in two lines\n1 of 2\nlong words\nerror\n3\n",  # as the streams come
        "notice in\n    two lines\nerror\n… of 2\nlong\n    words\n3\n",
        "1 of 2\n…\n",
        "…\n3\nnotice …\nerror\n",
        "…\nerror\n",
        "1 of 2\nlong words\n3\n…\nnotice\n    …\nerror\n",  # no line is any number of lines, too
    ],
)
def test_what_a_page_may_show(output: str) -> None:
    assert console.is_shown(output, STDOUT, STDERR)


@pytest.mark.parametrize(
    "output",
    [
        "",
        "1 of 2\nlong words\n3\n",
        "1 of 2\nlong words\n4\n…\n",
        "3\nlong words\n1 of 2\nnotice in two lines\nerror\n",
        "…of 3\n…\n",
        "1 … words\n…\n",  # text within a line is of that line
        "1.of 2\n…\n",
        "1 of 2\nlong\nwords\n…\n",
        "error\nnotice in two lines\n1 of 2\nlong words\n3\n",
    ],
)
def test_what_it_may_not(output: str) -> None:
    assert not console.is_shown(output, STDOUT, STDERR)


def test_another_output_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)\$ echo 1\n.*on the page.*\n-2\n\+1"):
        run_page(tmp_path, "```console\n$ echo 1\n2\n```\n")


def test_output_without_a_command() -> None:
    with pytest.raises(ValueError, match="begins with output"):
        console.steps("```console\nhello\n```\n")


def test_a_command_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SECONDS_PER_COMMAND", 0.3)
    with pytest.raises(AssertionError, match="has not ended after 0 s:\nwaits"):
        run_page(tmp_path, "```console\n$ echo waits; sleep 60\nwaits\n```\n")
