"""All numbers of seconds of the rooms in which ranks wait for each other stand in one file, and have an order."""

import ast
from collections.abc import Iterator
from pathlib import Path

from mpistrat.liveness import deadlines
from mpistrat.settings import stall_seconds, start_seconds

PACKAGE = Path(__file__).parents[2] / "mpistrat"
ROOMS = "liveness", "communicators", "torch_distributed"
FILE = PACKAGE / "liveness" / "deadlines.py"

# Parts of names that stand for seconds; `.wait(…)`, `.join(…)` and our own functions take them by position.
NAMES = "seconds", "timeout", "sleep", "pause", "patience", "deadline"
BY_POSITION = {"sleep": 0, "wait": 0, "join": 0, "poll": 0, "soon": 1, "within": 0, "Timer": 0}


def stands_for_seconds(name: str) -> bool:
    return name.lower().strip("_").startswith(NAMES) or name.lower().endswith(NAMES)


def name_of(node: ast.AST) -> str:
    """The last part of a name: of a variable, an attribute, or a function that is called."""
    return getattr(node, "attr", getattr(node, "id", ""))


def is_number(value: ast.expr | None) -> bool:
    """Whether the value is made of numbers alone, or of a timedelta of numbers; 0 stands for no limit, or for never."""
    if isinstance(value, ast.Call) and name_of(value.func) == "timedelta":
        return any(map(is_number, [*value.args, *(part.value for part in value.keywords)]))
    if isinstance(value, ast.Tuple):
        return any(map(is_number, value.elts))
    if isinstance(value, ast.BinOp):
        return is_number(value.left) and is_number(value.right)
    if isinstance(value, ast.UnaryOp):
        return is_number(value.operand)
    return (
        isinstance(value, ast.Constant) and type(value.value) in (int, float) and value.value != 0
    )


def given_to_seconds(tree: ast.AST) -> Iterator[ast.expr]:
    """The values of assignments, defaults and arguments that stand for seconds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name_of(part) for target in targets for part in ast.walk(target)]
            if node.value is not None and any(map(stands_for_seconds, names)):
                yield node.value
        elif isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            by_position = zip(positional[::-1], node.defaults[::-1], strict=False)
            by_name = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            for argument, default in (*by_position, *by_name):
                if default is not None and stands_for_seconds(argument.arg):
                    yield default
        elif isinstance(node, ast.Call):
            yield from (k.value for k in node.keywords if stands_for_seconds(k.arg or ""))
            yield from node.args[BY_POSITION.get(name_of(node.func), len(node.args)) :][:1]


def literals(source: str) -> list[int]:
    """The lines on which a number is given to what stands for seconds."""
    return [value.lineno for value in given_to_seconds(ast.parse(source)) if is_number(value)]


def test_no_other_file_has_numbers_of_seconds() -> None:
    paths = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
    assert FILE in paths
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in paths
        if path != FILE
        for line in literals(path.read_text())
    }
    assert found == set()


SECONDS = """
SECONDS_TO_WAIT = 3.0
_SECONDS: float = 7 * 86400.0
pause, other = 0.5, 1
TIMEOUT = datetime.timedelta(minutes=5)
self.timeout = 5
def f(a, seconds=1.5): ...
def f(*, timeout: float = 2): ...
f(patience=2)
time.sleep(0.1)
event.wait(1)
soon(done, 2.0)
"""
NO_SECONDS = """
timeout = 0.0
nanoseconds = int(seconds * 1e9)
time.sleep(OBSERVER_SLEEPS)
", ".join(names)
pause = min(2 * pause, limit)
"""


def test_numbers_of_seconds_are_found() -> None:
    assert sorted(literals(SECONDS.strip())) == list(range(1, SECONDS.count("\n")))
    assert literals(NO_SECONDS) == []


def test_every_deadline_is_used_and_positive() -> None:
    values = {name: value for name, value in vars(deadlines).items() if name.isupper()}
    assert len(values) > 50
    assert min(values.values()) > 0
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path != FILE]
    assert [name for name in values if not any(name in source for source in sources)] == []


# Each line: the shorter limit, the longer one, and why it must be longer. A sum of names stands for one after another.
ORDER = [
    (
        "RANK_SLEEPS_AT_LEAST",
        "RANK_SLEEPS_AT_MOST",
        "a rank that waits for long sleeps longer and longer",
    ),
    ("RANK_SPINS", "RANK_YIELDS", "a rank first spins, then yields its core, then sleeps"),
    (
        "OBSERVER_SLEEPS_AT_START",
        "OBSERVER_SLEEPS",
        "ranks that start wait to be seen, and later ranks do not",
    ),
    (
        "OBSERVER_SLEEPS_AT_START",
        "RANK_WAITS_FOR_FIRST_LOOK_OF_OBSERVER",
        "a new rank goes on unseen only if the observer does not look",
    ),
    (
        "4 * OBSERVER_SLEEPS",
        "RANK_WAITS_FOR_LOOK_OF_OBSERVER",
        "an observer without a core for a moment is not taken for gone",
    ),
    (
        "OBSERVER_SLEEPS",
        "OBSERVER_STOOD_STILL",
        "the usual pause between two looks is no suspension",
    ),
    (
        "RANK_SLEEPS_AT_MOST",
        "RANK_STOOD_STILL",
        "the usual pause between two looks is no suspension",
    ),
    (
        "OBSERVER_MEASURES_CPU_TIME + OBSERVER_WAITS_FOR_STACK",
        "NODE_WAITS_FOR_OTHER_NODES",
        "a node that is asked first asks its own ranks",
    ),
    (
        "NODE_WAITS_FOR_OTHER_NODES + 2 * RANK_SLEEPS_WATCHING_GROUPS",
        "OBSERVER_WAITS_FOR_OTHER_NODES",
        "the rank that asks for the observer gives up first, and hands on the answers that it has",
    ),
    (
        "OBSERVER_WAITS_FOR_OTHER_NODES + OBSERVER_SLEEPS",
        "OBSERVER_WAITS_FOR_FIRST_NODE",
        "the other nodes hear that the first one reports before they report themselves",
    ),
    (
        "OBSERVER_WAITS_FOR_OTHER_NODES + OBSERVER_MEASURES_CPU_TIME + OBSERVER_WAITS_FOR_STACK",
        "RANK_WAITS_FOR_NOTICE_OF_OBSERVER",
        "the error of a timeout comes after the report on it",
    ),
    (
        "RANK_WAITS_FOR_NOTICE_OF_OBSERVER",
        "OBSERVER_WAITS_FOR_ERRORS_AFTER_TIMEOUT",
        "ranks raise by themselves before the observer ends the job",
    ),
    (
        "RANK_WAITS_FOR_NOTICE_OF_OBSERVER",
        "OBSERVER_REPORTS",
        "an observer that asks for a report is not taken for gone",
    ),
    (
        "OBSERVER_WAITS_FOR_JOINT_DEATHS",
        "OBSERVER_WAITS_FOR_JOINT_EXITS",
        "ranks that end by os._exit(0) are ended by nobody, and may be further apart",
    ),
    (
        "10 * SOON_SLEEPS_AT_MOST",
        "RANK_WAITS_FOR_JOINT_EXITS",
        "a rank looks several times whether the others exit, too",
    ),
    (
        "RANK_WAITS_FOR_NEXT_FAILURE",
        "RANK_WAITS_FOR_ALL_FAILURES",
        "all failures include the next one",
    ),
    (
        "RANK_SLEEPS_WATCHING_GROUPS",
        "RANK_WAITS_FOR_FAILURES_OF_OTHER_NODES",
        "a failure on another node is heard at the next look",
    ),
    (
        "RANK_WAITS_FOR_FAILURES_OF_OTHER_NODES",
        "RANK_WAITS_FOR_FIRST_NODE_TO_PRINT",
        "the first node hears of a failure, and prints it, before another node does",
    ),
    (
        "RANK_WAITS_FOR_SENDING_OF_FAILURE",
        "RANK_WAITS_FOR_LOCK_OF_FAILURES",
        "a rank tells the other nodes while it holds the lock",
    ),
    (
        "RANK_WAITS_FOR_ALL_FAILURES",
        "NOTED_FAILURE_COUNTS",
        "a failure that is waited for still counts when it is summed up",
    ),
    (
        "RANK_WAITS_FOR_RANK_TO_PRINT + RANK_WAITS_FOR_ALL_FAILURES + RANK_WAITS_FOR_LOCK_OF_FAILURES"
        " + RANK_WAITS_FOR_ITS_STREAMS + RANK_WAITS_FOR_LAUNCHER_TO_READ + RANK_WAITS_FOR_LAUNCHER_TO_KILL",
        "OBSERVER_WAITS_FOR_ENDING_RANK",
        "a rank that ends the job says why before the observer kills it",
    ),
    (
        "RANK_WAITS_FOR_ITS_STREAMS + RANK_WAITS_FOR_LAUNCHER_TO_READ + RANK_SLEEPS_WATCHING_GROUPS",
        "OBSERVER_WAITS_FOR_TOLD_RANKS",
        "a rank that is told to end flushes its streams before the observer kills it",
    ),
    (
        "OBSERVER_WAITS_FOR_REPORT_FILE",
        "OBSERVER_WAITS_FOR_REPORT_FILE_AT_END",
        "ranks are left that must end, and later none is",
    ),
    (
        "OBSERVER_WAITS_FOR_LATE_RANK",
        "OBSERVER_WAITS_FOR_FIRST_RANK",
        "a rank that starts loads Python and MPI first",
    ),
    (
        "RANK_SLEEPS_WATCHING_GROUPS",
        "RANK_IS_STUCK",
        "a call that ends between two looks is reported to nobody",
    ),
    (
        "RANK_WAITS_FOR_ITS_THREAD",
        "RANK_IS_STUCK",
        "a rank that leaves a reduction under way says so before another rank is stuck in it",
    ),
    (
        "RANK_IS_STUCK",
        "RANK_STAYS_IN_LEFT_COLLECTIVE",
        "a rank that leaves a collective itself is not told to raise",
    ),
    (
        "2 * RANK_SLEEPS_WATCHING_KERNELS",
        "RANK_WAITS_FOR_ABORTS_OF_OTHERS",
        "each rank listens at least once while another waits to hear it",
    ),
    (
        "SOON_SLEEPS",
        "SOON_SLEEPS_AT_MOST",
        "a condition that does not come true at once is looked at less and less often",
    ),
    (
        "RANK_SLEEPS_AT_ITS_END",
        "RANK_SLEEPS_AT_ITS_END_AT_MOST",
        "a rank at its end sleeps longer and longer",
    ),
    (
        "RANK_STAYS_IN_LEFT_COLLECTIVE",
        "RANK_WAITS_FOR_MAIN_THREAD_TO_RAISE",
        "a main thread that can leave its call does so before the job is ended for it",
    ),
]


def test_the_order_of_the_limits() -> None:
    values = vars(deadlines)
    wrong = [
        f"{shorter} is not less than {longer}: {why}"
        for shorter, longer, why in ORDER
        if eval(shorter, {}, values) >= eval(longer, {}, values)
    ]
    assert wrong == []


def test_the_settings_are_longer_than_the_limits_that_serve_them() -> None:
    """A report of a stall takes a while, and a job that starts is observed before its start is given up."""
    assert stall_seconds() > deadlines.OBSERVER_REPORTS
    assert start_seconds() > deadlines.OBSERVER_WAITS_FOR_FIRST_RANK
    assert start_seconds() <= deadlines.OBSERVER_WAITS_FOR_OTHERS_TO_START
