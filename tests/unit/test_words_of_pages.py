"""The words of README and docs/: plain, explained where they first stand, and quoted as the package has them."""

import collections
import itertools
import re
from pathlib import Path

import pytest

from support import house
from support.documentation import TOP, prose_of
from unit.test_messages import texts_of

README = TOP / "README.md"
GLOSSARY = TOP / "docs/glossary.md"
PAGES = [README, *sorted((TOP / "docs").rglob("*.md"))]
RELATIVES = 8.0  # per 1,000 words of all pages


def name_of(page: Path) -> str:
    return str(page.relative_to(TOP))


def test_pages_name_things() -> None:
    words = re.findall(r"[a-z']+", " ".join(map(prose_of, PAGES)).lower())
    assert 1000 * sum(word in house.RELATIVES for word in words) / len(words) <= RELATIVES


def test_no_two_pages_have_one_title() -> None:
    titles: collections.Counter[str] = collections.Counter()
    for page in PAGES:
        found = re.findall(r"^# (.*)", prose_of(page), re.MULTILINE)
        assert len(found) <= 1, f"{page.name} has several titles"
        if page != README:  # docs/index.md has README's title, and its text
            titles.update(title.casefold() for title in found)
    assert titles.total() > 40
    assert [title for title, count in titles.items() if count > 1] == []


def entries() -> list[str]:
    """The words of the glossary: "PMI" and "PMIx" of one entry."""
    heads = re.findall(r"^(\S.*)\n: ", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return [word for head in heads for word in head.split(", ")]


@pytest.mark.parametrize("word", entries())
def test_a_page_uses_the_word_of_the_glossary(word: str) -> None:
    """A page that users read; docs/architecture.md tells of the files of the package."""
    pages = [page for page in PAGES if page != GLOSSARY]
    pattern = re.compile(rf"(?<![a-z]){word}(?:s|es|ed|ped)?(?![a-z])", re.IGNORECASE)
    texts = (re.sub(r"\s+", " ", page.read_text(encoding="utf-8")) for page in pages)
    assert any(map(pattern.search, texts))


# Words that a user of PyTorch need not know.
EXPLAINED = {
    "rank": "ranks?",
    "replica": "replicas?",
    "cross-replica context": "cross-replica context",
    "scope": "scope",
    "global batch": "global batch(?:es)?",
    "PMI": "PMIs?",
    "ULFM": "ULFM",
    "forkserver": "forkserver",
}


TITLE = re.compile(
    r"\[[^]]*\]\((?!\S*glossary)[^)]*\)"
)  # a link, which may have another page's title


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_words_are_explained_where_they_first_stand(page: Path) -> None:
    """Or before, or in the next paragraph: "a *rank* is …", "ranks (…)", "ranks, the …", a link to the glossary.

    Not in docs/architecture.md: its first paragraph names the glossary, for those who change the package. Nor in
    docs/index.md, which begins with README's text.
    """
    if page in (GLOSSARY, TOP / "docs/architecture.md", TOP / "docs/index.md"):
        return
    text = re.sub(r"^#.*$|\*\*", "", read_until(page), flags=re.MULTILINE)
    paragraphs = [re.sub(r"\s+", " ", part) for part in re.split(r"\n\s*\n", text)]
    for name, word in EXPLAINED.items():
        first = re.compile(rf"(?<![\w.`-]){word}(?![\w`(-])", re.IGNORECASE)
        places = [n for n, part in enumerate(paragraphs) if first.search(TITLE.sub("", part))]
        if places:
            begin = " ".join(paragraphs[: places[0] + 2])
            assert re.search(explains(word), begin, re.IGNORECASE), (name, paragraphs[places[0]])


def read_until(page: Path) -> str:
    """The text of a page, after the pages of the tutorial that come before it."""
    earlier = [p for p in page.parent.glob("[0-9]_*.md") if p.name < page.name]
    return "\n\n".join(map(prose_of, [*sorted(earlier), page]))


def explains(word: str) -> str:
    """A regular expression of explanations."""
    forms = [
        rf"\*{word}\*",
        rf"\b{word}(?: size)? \(",
        rf"\({word}\)",
        rf"\b{word} (?:is|are|holds) (?:an?|the|one) ",
        rf"\b{word}, (?:the|that is)\b",
        rf"\[{word}\]\(.*\bglossary",
        r"\[glossary\]",
    ]
    if word.startswith("rank"):
        forms += [r"\((?:an?|the|one) process(?:es)? of the MPI job\)"]
    if word == "scope":
        forms += [r"\bscope\(\)`"]
    return "|".join(forms)


# Quoted texts that are no string of the package: those of other programs, and those that the package puts together,
# with a test of such a text.
OF_OTHERS = {
    "DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-device GPU "
    "modules or CPU modules": "torch",
    "failed to unpack address": "UCX",
    "No space left on device": "Linux",
    "operator torchvision::nms does not exist": "torch",
    "please make sure to call init_process_group": "torch",
    "RuntimeError: cannot load MPI library": "mpi4py",
    "You set ` and ` in Lightning, but the product (1 * 1) does not match the world size (2)": "Lightning",
    "recorded, agreed on and traced": "benchmarks/overheads.py",
    "Two ranks hand each other 128 KB in 19 us: their cores share a cache of level 3": "test_doctor.py",
    "the same error on ranks 0-3": "test_shared_errors.py",
    "correct train.py:33 in step (rank 3): …": "test_last_lines.py",
}
WORDS_OF_A_MESSAGE = 4
IS_CODE = re.compile(
    r"[={]| if .* else |\w\(|\.py\b(?!:)|^(?:docker|import|mount|mpirun|pip|srun) "
)


def quotations(page: Path) -> list[str]:
    """The messages in the text of a page: "rank 2 could not read …", `the time limit is near, …`.

    None of docs/faults.md and docs/troubleshooting.md: test_faults.py and test_troubleshooting.py compare theirs.
    """
    found: list[str] = []
    if page.name in {"faults.md", "troubleshooting.md"}:
        return found
    for paragraph in re.split(r"\n\s*\n|\n(?=[|-])", prose_of(page)):
        line = re.sub(r"\s+", " ", paragraph)
        found += re.findall(r'"([^"]+)"', re.sub(r"`[^`]*`", "`", line))
        found += [code for code in re.findall(r"`([^`]+)`", line) if not IS_CODE.search(code)]
    found = [text.removeprefix("mpistrat: ").rstrip(".") for text in found]
    return [
        text for text in found if len(re.findall(r"(?<!\S)[a-z]{2,}", text)) >= WORDS_OF_A_MESSAGE
    ]


@pytest.fixture(scope="module")
def runs_of_words() -> set[tuple[str, str]]:
    """All pairs of words that follow each other in a text of the package."""
    texts = (text for module in house.modules() for _, text in texts_of(module))
    runs = (words_of(part) for text in texts for part in text.split("{}"))
    return {pair for words in runs for pair in itertools.pairwise(words)}


def words_of(text: str) -> list[str]:
    return [word.strip(".,:;'\"`()").lower() for word in text.split()]


def is_value(word: str) -> bool:
    """Whether a message may have another word there: a number, "ranks", the name of a class or a file."""
    return not re.fullmatch(r"[a-z'/.:;,()-]+", word) or word in {"rank", "ranks"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_messages_are_those_of_the_package(page: Path, runs_of_words: set[tuple[str, str]]) -> None:
    for quotation in set(quotations(page)) - OF_OTHERS.keys():
        for is_of_job, run in itertools.groupby(quotation.split(), is_value):
            if not is_of_job:
                pairs = [*itertools.pairwise(words_of(" ".join(run)))]
                missing = [pair for pair in pairs if pair not in runs_of_words]
                assert not missing, f"no text of the package says {missing}: {quotation}"
