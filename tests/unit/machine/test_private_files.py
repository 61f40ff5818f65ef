"""What the package writes is for its user alone; it reads no pickles, and opens no ports."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpistrat.liveness.observer import observer
from mpistrat.liveness.records import job_folder
from mpistrat.machine.private_files import create, make_folder, private

FOLDER = Path(__file__).parents[3] / "mpistrat"

# (file, what it does): why it may.
ALLOWED = {
    ("tools/bench/peers/tensorflow.py", "socket"): "a peer, in a benchmark: TF_CONFIG names a port",
    ("tools/bench/peers/tensorflow.py", "bind"): "the same",
    ("communicators/costs/cache.py", "open"): "of a file that mkstemp has made",
    (
        "cluster_resolver/launcher_abort.py",
        "socket",
    ): "what the launcher has opened: it is asked who is at its other end",
    (
        "parameter_server/coordinator/pickling.py",
        "Unpickler",
    ): "closures and results, sent by this job's ranks",
    (
        "fault_tolerance/elastic.py",
        "loads",
    ): "copies of ranks' states, which this job's ranks have sent over MPI",
    (
        "parameter_server/rpc/channel.py",
        "loads",
    ): "what this job's ranks have written to a pipe without a name, or sent over MPI",
    ("parameter_server/server/store.py", "loads"): "the same",
    ("tools/init/command.py", "open"): "scripts that the user asks for, in the user's own folder",
    ("tools/init/command.py", "makedirs"): "the same",
    ("tools/verify/runs.py", "mkdir"): "in a folder that mkdtemp has made",
    ("tools/verify/runs.py", "loads"): "a recording of a rank that this process has started",
    ("tools/verify/rank_process.py", "loads"): "the same, of an earlier run",
    ("tools/verify/rank_process.py", "write_bytes"): "in a folder that mkdtemp has made",
    ("tools/verify/working_folder.py", "mkdir"): "the same",
    ("input/dataset_identity.py", "loads"): "a copy of the program's own dataset, made just before",
    ("replicas/rank_methods.py", "loads"): "what rank 0 of this job has sent over MPI",
    ("machine/addresses.py", "create_server"): "while nodes look for an address; and for the next",
    (
        "machine/addresses.py",
        "socket",
    ): "asks for the addresses of interfaces, and is bound to none",
    ("torch_distributed/run.py", "exec"): "the user's program, as `python` runs it",
    ("torch_distributed/rendezvous.py", "listen"): "at 127.0.0.1 on one node, else at one address",
    ("communicators/torch_store.py", "listen"): "the same",
    ("communicators/torch_store.py", "TCPStore"): "as torchrun's; what it holds is not unpickled",
    ("torch_distributed/default_backend.py", "bind"): "arguments to the names that a function has",
    ("parameter_server/rpc/mpi_messages.py", "loads"): "what this job's ranks have sent over MPI",
}
# mpi4py's methods in small letters, and the ForkingPickler of multiprocessing, pickle between the ranks of a job and
# their own workers; neither reads a file, nor what another user's process sends.

UNPICKLES = {"load", "loads", "Unpickler"}
PICKLES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "joblib",
    "ForkingPickler",
    "shelve",
}
PORTS = {"bind", "listen", "create_server", "socket"}
SERVERS = {"TCPStore", "TCPServer", "HTTPServer", "Listener"}


def dangers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Calls that unpickle, run text as code, open ports, or make files by the umask; and their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in SERVERS:
            yield node.attr, node.lineno
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        owner = getattr(called.value, "id", "") if isinstance(called, ast.Attribute) else ""
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        text = ast.unparse(node)
        unpickles = (owner in PICKLES and name in {*UNPICKLES, "open"}) or name == "Unpickler"
        of_torch = owner == "torch" and name == "load" and keywords.get("weights_only") != "True"
        of_numpy = owner in ("np", "numpy") and name == "load" and "allow_pickle" in keywords
        runs = not owner and name in ("eval", "exec") and isinstance(called, ast.Name)
        opens_port = name in PORTS and (isinstance(called, ast.Attribute) or name != "bind")
        mode = keywords.get("mode") or (ast.unparse(node.args[1]) if len(node.args) > 1 else "'r'")
        writes = isinstance(called, ast.Name) and name == "open" and set(mode) & set("wax+")
        by_umask = writes and keywords.get("opener") != "private"
        makes = owner == "os" and name == "open" and "O_CREAT" in text and str(0o600) not in text
        folders = name in ("makedirs", "mkdir") and str(0o700) not in text
        writes_text = name in ("write_text", "write_bytes", "touch", "mktemp")
        saves = (
            name in ("savefig", "save")
            and owner in ("torch", "np", "figure")
            and "file" not in text
        )
        if any(
            (
                *(unpickles, of_torch, of_numpy, runs, opens_port),
                *(by_umask, makes, folders, writes_text, saves),
            )
        ):
            yield name, node.lineno


@pytest.mark.parametrize(
    "line",
    [
        *("pickle.load(file)", "pickle.loads(data)", "marshal.loads(data)", "shelve.open(path)"),
        *("torch.load(path)", "torch.load(path, weights_only=False)", "eval(text)", "exec(text)"),
        *(
            "np.load(path, allow_pickle=True)",
            "pickle.Unpickler(file)",
            "server.bind(address)",
            "dist.TCPStore",
        ),
        *("socket.socket()", "open(path, 'w')", "open(path, mode='ab')", "os.makedirs(path)"),
        *("os.open(path, os.O_WRONLY | os.O_CREAT)", "os.mkdir(path)", "Path(path).write_text('')"),
        *("tempfile.mktemp()", "figure.savefig(path)", "torch.save(state, path)"),
    ],
)
def test_what_is_looked_for(line: str) -> None:
    assert list(dangers(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        *(
            "torch.load(path, weights_only=True)",
            "open(path)",
            "open(path, 'rb')",
            "json.load(file)",
        ),
        *(
            "np.load(path)",
            "open(path, 'w', opener=private)",
            "model.eval()",
            "os.mkdir(path, 0o700)",
        ),
    ],
)
def test_what_is_fine(line: str) -> None:
    assert not list(dangers(ast.parse(line)))


def test_the_package() -> None:
    found = {
        (path.relative_to(FOLDER).as_posix(), name, line)
        for path in FOLDER.rglob("*.py")
        for name, line in dangers(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {danger for danger in found if danger[:2] not in ALLOWED} == set()
    assert {danger[:2] for danger in found} == set(ALLOWED), (
        "what is not there any more need not be allowed"
    )


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.lstat().st_mode & 0o777


@pytest.mark.usefixtures("open_umask")
def test_files_and_folders_are_private(tmp_path: Path) -> None:
    make_folder(str(tmp_path / "a" / "b" / "c"))
    make_folder(str(tmp_path / "a" / "b" / "c"))
    for folder in ("a", "a/b", "a/b/c"):
        assert mode(tmp_path / folder) == 0o700
    with create(str(tmp_path / "text")) as file:
        file.write("é")
    with create(str(tmp_path / "bytes"), binary=True) as file:
        file.write(b"1")
    with open(tmp_path / "opened", "w", opener=private):
        pass
    assert [mode(tmp_path / name) for name in ("text", "bytes", "opened")] == [0o600] * 3
    with pytest.raises(FileExistsError):
        make_folder(str(tmp_path / "text"))


def test_what_lies_there_is_not_written_to(tmp_path: Path) -> None:
    """A link to a file of the user's, a hard link, and a file that everybody may read."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "link").symlink_to(mine)
    (tmp_path / "hard").hardlink_to(mine)
    (tmp_path / "open").touch(0o666)
    (tmp_path / "dangling").symlink_to(tmp_path / "planted")
    for name in ("link", "hard", "open", "dangling"):
        with create(str(tmp_path / name)) as file:
            file.write("new")
        assert mode(tmp_path / name) == 0o600
        assert not (tmp_path / name).is_symlink()
    assert mine.read_text() == "precious"
    assert not (tmp_path / "planted").exists()


@pytest.mark.usefixtures("open_umask")
def test_a_report_does_not_follow_a_planted_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, temporary, mine = tmp_path / "shared", tmp_path / "temporary", tmp_path / "mine"
    shared.mkdir()
    temporary.mkdir()
    mine.write_text("precious")
    monkeypatch.setattr(observer.time, "strftime", lambda form: "now")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.chdir(shared)
    name = f"mpistrat-report-now-{os.getpid()}.txt"
    (shared / name).symlink_to(mine)
    assert observer.write_report("what happened") == str(temporary / name)
    assert mine.read_text() == "precious"
    assert mode(temporary / name) == 0o600
    (temporary / name).unlink()
    (temporary / name).symlink_to(mine)
    assert observer.write_report("what happened") == ""
    assert mine.read_text() == "precious"


@pytest.mark.parametrize("trap", ["link", "file", "writable by others"])
def test_a_planted_folder_in_shared_memory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    name = f"mpistrat-{os.getuid()}"
    planted, fallback = tmp_path / "planted" / name, tmp_path / "fallback" / name
    planted.parent.mkdir()
    if trap == "link":
        (tmp_path / "theirs").mkdir(0o700)
        planted.symlink_to(tmp_path / "theirs")
    elif trap == "file":
        planted.touch()
    else:
        planted.mkdir()
        planted.chmod(0o777)
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(planted.parent))
    monkeypatch.setattr("tempfile.tempdir", str(fallback.parent))
    folder, new = job_folder.JobFolder.create("0123456789")
    assert new
    assert Path(folder.path).parent == fallback
    assert folder.remove_if_last()
    monkeypatch.setattr("tempfile.tempdir", str(planted.parent))
    folder, _ = job_folder.JobFolder.create("0123456789")
    assert Path(folder.path) == planted.parent / f"{name}-0123456789"
