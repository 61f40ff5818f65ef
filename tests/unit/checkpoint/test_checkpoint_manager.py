"""What one process saves and restores: which checkpoints count, what is damaged, who may write."""

import atexit
import errno
import gc
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import traceback
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager, checkpoint_manager, durable_files
from mpistrat.checkpoint.directory import OpenDirectory, UnfinishedCheckpoint
from mpistrat.checkpoint.manifest import read_manifest


class Counter:
    """A stateful object of a program's own."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]


class Holder:
    """One whose state is given."""

    def __init__(self, state: dict) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def names(manager: CheckpointManager) -> list[str]:
    return [Path(path).name for path in manager.checkpoints]


def test_managers_leave_no_exit_handlers_behind(tmp_path: Path) -> None:
    CheckpointManager(Checkpoint(counter=Counter()), tmp_path)
    before = atexit._ncallbacks()
    for _ in range(3):
        CheckpointManager(Checkpoint(counter=Counter()), tmp_path)
    assert atexit._ncallbacks() == before


def test_all_kinds_of_objects_come_back(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    variable = ms.Variable([1.0, 2.0])
    counter = Counter(7)
    parts = {"model": model, "optimizer": optimizer, "variable": variable, "counter": counter}
    manager = CheckpointManager(Checkpoint(**parts), tmp_path / "new" / "saved")
    path = manager.save(12)
    assert path == str(tmp_path / "new" / "saved" / "step-00000012")
    expected = [p.detach().clone() for p in model.parameters()]
    draws = torch.rand(3), np.random.rand(3)

    with torch.no_grad():
        model.weight.zero_()
    optimizer.state.clear()
    variable.assign([0.0, 0.0])
    counter.count = 0
    manager.restore(path)
    assert all(map(torch.equal, expected, model.parameters()))
    assert len(optimizer.state) == 2
    assert variable.numpy().tolist() == [1, 2]
    assert counter.count == 7
    assert torch.equal(torch.rand(3), draws[0])
    assert np.random.rand(3).tolist() == draws[1].tolist()


def test_a_state_in_memory(tmp_path: Path) -> None:
    counter = Counter(1)
    checkpoint = Checkpoint(counter=counter)
    state = checkpoint.state_dict()
    drawn = torch.rand(2)
    counter.count = 2
    checkpoint.load_state_dict(state)
    assert counter.count == 1
    assert torch.equal(torch.rand(2), drawn)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """In the order in which they were saved, which is not that of their steps after one went back."""
    manager = CheckpointManager(Checkpoint(counter=Counter()), tmp_path, keep=2)
    assert manager.latest_checkpoint is None
    for step in (100, 200, 50):
        manager.save(step)
    assert names(manager) == ["step-00000200", "step-00000050"]
    assert manager.save() == manager.latest_checkpoint == str(tmp_path / "step-00000051")
    again = CheckpointManager(Checkpoint(counter=Counter()), tmp_path, keep=2)
    again.save(52)
    assert names(again) == ["step-00000051", "step-00000052"]


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    counter = Counter()
    manager = CheckpointManager(Checkpoint(counter=counter), tmp_path, keep=2)
    for counter.count in range(4):
        path = manager.save(7)
    assert names(manager) == ["step-00000007.3", "step-00000007.4"]
    manager.restore_or_initialize()
    assert counter.count == 3
    assert path == manager.latest_checkpoint


def test_only_complete_ones_count(tmp_path: Path) -> None:
    manager = CheckpointManager(Checkpoint(counter=Counter()), tmp_path, keep=2)
    manager.save(1)
    (tmp_path / "step-00000009").mkdir()  # not ours, or half deleted by hand
    (tmp_path / "step-00000008-copy").mkdir()
    manager.save(2)
    assert names(manager) == ["step-00000001", "step-00000002"]
    with pytest.warns(UserWarning, match=r"step-00000009/manifest.json is missing"):
        assert manager.restore_or_initialize() == str(tmp_path / "step-00000002")


def test_one_that_was_moved_elsewhere(tmp_path: Path) -> None:
    """Its link is removed in its turn, and what it leads to stays."""
    manager = CheckpointManager(Checkpoint(counter=Counter()), tmp_path / "saved", keep=1)
    elsewhere = shutil.move(manager.save(1), tmp_path / "elsewhere")
    (tmp_path / "saved" / "step-00000001").symlink_to(elsewhere)
    assert names(manager) == ["step-00000001"]
    manager.save(2)
    assert sorted(os.listdir(tmp_path / "saved")) == [".lock", "step-00000002"]
    assert read_manifest(elsewhere).step == 1


def test_leftovers_of_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / ".unfinished-file").write_text("")
    (tmp_path / ".unfinished-folder").mkdir()
    (tmp_path / ".deleted-link").symlink_to(tmp_path / "folder")
    (tmp_path / ".deleted-broken").symlink_to(tmp_path / "nothing")
    CheckpointManager(Checkpoint(counter=Counter()), tmp_path).save(1)
    assert sorted(os.listdir(tmp_path)) == [".lock", "folder", "step-00000001"]


@pytest.mark.parametrize("call", ["rmdir", "rename"])
def test_what_cannot_be_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """On NFS a folder is not empty while somebody reads a file that was in it; the save is good all the same."""
    manager = CheckpointManager(Checkpoint(counter=Counter()), tmp_path / "saved", keep=1)
    manager.save(1)
    (tmp_path / "saved" / ".unfinished-folder").mkdir()
    real = getattr(os, call)

    def fails(path, *args, **kwargs):
        if "00001" in str(path) or ".unfinished-folder" in str(path):
            raise OSError(39, "Directory not empty")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, call, fails)
    path = manager.save(2)
    assert manager.latest_checkpoint == path
    del manager
    gc.collect()
    manager = CheckpointManager(Checkpoint(counter=Counter()), tmp_path / "saved", keep=1)
    assert manager.save(3) == manager.latest_checkpoint
    monkeypatch.undo()
    manager.save(4)
    assert names(manager) == ["step-00000004"]


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    places = {"first": 0, "middle": len(content) // 2, "last": len(content) - 1}
    if how == "cut":
        os.truncate(file, len(content) - 1)
    elif how == "gone":
        file.unlink()
    else:
        content[places[how]] ^= 4
        file.write_bytes(content)


@pytest.mark.parametrize("how", ["first", "middle", "last", "cut", "gone"])
@pytest.mark.parametrize(
    "file",
    [
        "manifest.json",
        "state.json",
        "model.safetensors",
        "rank-00000.json",
        "rank-00000.safetensors",
    ],
)
def test_a_damaged_one_is_skipped(tmp_path: Path, file: str, how: str) -> None:
    model, counter = torch.nn.Linear(5, 5), Counter(1)
    manager = CheckpointManager(Checkpoint(model=model, counter=counter), tmp_path)
    first = manager.save(1)
    counter.count = 2
    second = manager.save(2)
    damage(Path(second) / file, how)
    with pytest.raises((ValueError, OSError), match=re.escape(str(Path(second) / file))):
        manager.restore(second)
    assert counter.count == 2
    with pytest.warns(UserWarning, match=re.escape(str(Path(second) / file))):
        assert manager.restore_or_initialize() == first
    assert counter.count == 1
    shutil.rmtree(first)
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read: .*" + re.escape(file)):
        manager.restore_or_initialize()


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    manager = CheckpointManager(Checkpoint(variable=ms.Variable([1.0, 2.0])), tmp_path)
    del manager.checkpoint.objects["random"]
    path = Path(manager.save(1))
    flipped = 0
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), 7):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            file.write_bytes(changed)
            with pytest.raises((ValueError, OSError)):
                manager.restore(path)
            flipped += 1
        file.write_bytes(content)
    manager.restore(path)
    assert flipped > 50


def test_what_is_missing_or_too_much(tmp_path: Path) -> None:
    both = Checkpoint(first=Counter(1), second=Counter(2))
    path = CheckpointManager(both, tmp_path).save(1)
    only = Counter()
    CheckpointManager(Checkpoint(second=only), tmp_path).restore(path)
    assert only.count == 2
    manager = CheckpointManager(Checkpoint(three=Counter()), tmp_path)
    with pytest.raises(KeyError, match="no state of 'three', only of strategy, first, second"):
        manager.restore_or_initialize()


class CounterOfRank(Counter):
    """One whose state is each rank's own."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def rank_state_dict(self) -> dict:
        return {"count": self.count}

    def load_rank_state_dicts(self, states) -> None:
        self.count = states[0]["count"]


@pytest.mark.parametrize("kind", [Counter, CounterOfRank])
def test_what_may_be_absent(tmp_path: Path, kind: type[Counter]) -> None:
    old = CheckpointManager(Checkpoint(first=Counter(1)), tmp_path).save(1)
    first, new = Counter(), kind(5)
    manager = CheckpointManager(Checkpoint(first=first, new=new), tmp_path)
    with pytest.raises(KeyError, match="no state of 'new', only of"):
        manager.restore(old)
    assert first.count == 0
    new.may_be_absent = True  # type: ignore[attr-defined]
    manager.restore(old)
    assert (first.count, new.count) == (1, 5)
    path = manager.save(2)
    new.count = 6
    manager.restore(path)
    assert new.count == 5


def test_the_longest_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its begin, until its thread has finished."""
    manager = CheckpointManager(Checkpoint(counter=Counter()), tmp_path)
    assert manager.seconds_to_save == 0.0
    keep_newest, may_finish = OpenDirectory.keep_newest, threading.Event()

    def late(self, count):
        keep_newest(self, count)
        assert may_finish.wait(30)

    monkeypatch.setattr(OpenDirectory, "keep_newest", late)
    now = 100.0
    monkeypatch.setattr(checkpoint_manager.time, "monotonic", lambda: now)
    before = set(threading.enumerate())
    manager.save(1, wait=False)
    assert manager.seconds_to_save == 0.0
    now = 103.0
    (writer,) = set(threading.enumerate()) - before
    may_finish.set()
    writer.join(30)
    assert not writer.is_alive()
    assert manager.seconds_to_save == 3.0
    manager.save(2)
    assert manager.seconds_to_save == 3.0


def test_a_save_that_failed_tells_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable_files, "write", fails)
    manager = CheckpointManager(Checkpoint(counter=Counter()), tmp_path)
    with pytest.raises(OSError, match="No space left"):
        manager.save(1)
    assert manager.seconds_to_save == 0.0


def test_a_relative_path_is_told_to_other_ranks_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter(1)
    manager = CheckpointManager(Checkpoint(counter=counter), tmp_path / "saved")
    path = manager.save(1)
    broadcasts = []
    communicator = manager.checkpoint.strategy.extended.communicator
    monkeypatch.setattr(
        communicator, "broadcast_object", lambda value, **_: broadcasts.append(value) or value
    )
    monkeypatch.chdir(tmp_path)
    manager.restore(Path("saved") / "step-00000001")
    assert broadcasts == [path]
    with pytest.raises(TypeError, match="NoneType"):
        manager.restore(None)  # type: ignore[arg-type]


def test_no_other_user_can_read(tmp_path: Path) -> None:
    for umask in (0, 0o777):
        before = os.umask(umask)
        try:
            directory = tmp_path / str(umask)
            manager = CheckpointManager(Checkpoint(model=torch.nn.Linear(2, 2)), directory)
            manager.save(1)
        finally:
            os.umask(before)
        found = [directory, *directory.rglob("*")]
        modes = {p.is_dir(): stat.S_IMODE(p.stat().st_mode) for p in found}
        assert len(found) > 7
        assert modes == {True: 0o700, False: 0o600}


def test_no_pickle_is_read() -> None:
    folder = Path(durable_files.__file__).parent
    assert not [
        file
        for file in folder.glob("*.py")
        if re.search("pickle|torch.load|allow_pickle", strip_prose(file))
    ]


def strip_prose(file: Path) -> str:
    """The code without docstrings and comments."""
    import ast

    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant("")
    return ast.unparse(tree)


def test_training_goes_on_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is the state at the time of the save; the next save waits for it."""
    may_write = threading.Event()
    write = durable_files.write

    def slow(path, parts):
        assert may_write.wait(30)
        return write(path, parts)

    monkeypatch.setattr(durable_files, "write", slow)
    model, counter = torch.nn.Linear(2, 2), Counter(1)
    manager = CheckpointManager(Checkpoint(model=model, counter=counter), tmp_path)
    saved = model.weight.detach().clone()
    path = manager.save(1, wait=False)
    assert manager.checkpoints == []
    with torch.no_grad():
        model.weight += 1
    counter.count = 2
    threading.Timer(0.1, may_write.set).start()
    manager.save(2, wait=False)
    assert manager.checkpoints[:1] == [path]
    manager.wait()
    manager.wait()
    assert names(manager) == ["step-00000001", "step-00000002"]
    manager.restore(path)
    assert torch.equal(model.weight, saved)
    assert counter.count == 1


def test_memory_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    write = durable_files.write

    def noting(path, parts):
        parts = list(parts)
        taken.extend(p.ctypes.data for p in parts if isinstance(p, np.ndarray) and "model" in path)
        return write(path, parts)

    monkeypatch.setattr(durable_files, "write", noting)
    manager = CheckpointManager(Checkpoint(model=torch.nn.Linear(99, 99)), tmp_path)
    manager.save(1, wait=False)
    manager.save(2, wait=False)
    manager.wait()
    assert len(taken) == 2
    assert len(set(taken)) == 1


def test_a_second_save_takes_no_memory(tmp_path: Path) -> None:
    """Pages of new memory would cost more than the copy."""
    model = torch.nn.Linear(1000, 1000)
    manager = CheckpointManager(Checkpoint(model=model), tmp_path)
    peaks = []
    for step in (1, 2):
        tracemalloc.start()
        try:
            manager.save(step, wait=False)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        manager.wait()
    assert peaks[0] > model.weight.nbytes > 10 * peaks[1]


def test_copies_are_of_what_there_is_now(tmp_path: Path) -> None:
    """Of the same shapes, of others, of more and of fewer arrays."""
    holder = Holder({})
    manager = CheckpointManager(Checkpoint(holder=holder), tmp_path, keep=9)
    states = [
        {"a": torch.ones(3), "b": np.ones(2)},
        {"a": torch.zeros(3), "b": np.zeros(2)},
        {"a": torch.zeros(3).long(), "b": torch.ones(2, dtype=torch.float64)},
        {"a": torch.ones(2, 2), "b": np.ones(0), "c": torch.ones(70)},
        {"c": torch.zeros(70)},
    ]
    paths = []
    for holder.state in states:
        paths.append(manager.save(wait=False))
    manager.wait()
    for path, state in zip(paths, states, strict=True):
        manager.restore(path)
        assert list(holder.state) == list(state)
        for name, array in state.items():
            back = holder.state[name]
            assert (type(back), back.dtype, back.shape) == (type(array), array.dtype, array.shape)
            assert back.tolist() == array.tolist()


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    """Nothing is left of it, and the one before is still there."""
    counter = Counter()
    manager = CheckpointManager(Checkpoint(counter=counter), tmp_path, keep=1)
    first = manager.save(1)
    write = os.write
    full = OSError(28, "No space left on device")

    def fails(file, data):
        if os.readlink(f"/proc/self/fd/{file}").endswith(".json"):
            raise full
        return write(file, data)

    monkeypatch.setattr(os, "write", fails)
    if wait:
        with pytest.raises(OSError, match="No space left"):
            manager.save(2)
    else:
        manager.save(2, wait=False)
        with pytest.raises(OSError, match="No space left"):
            manager.wait()
    monkeypatch.undo()
    assert manager.checkpoints == [first]
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000001"]
    manager.save(3)
    assert names(manager) == ["step-00000003"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_what_cannot_be_written_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """With the rank, the bytes that were tried, and those that are free."""
    manager = CheckpointManager(Checkpoint(model=torch.nn.Linear(9, 9)), tmp_path)
    size = os.path.getsize(Path(manager.save(1)) / "model.safetensors")
    real = getattr(os, call)

    def fails(file, *args, **kwargs):
        path = file if call == "open" else os.readlink(f"/proc/self/fd/{file}")
        if str(path).endswith("model.safetensors"):
            raise OSError(number, os.strerror(number))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        manager.save(2)
    text = str(raised.value)
    written = size if call == "fsync" else 0
    assert f"{written} of {size} bytes are written" in text
    assert re.search(r"\d+ bytes are free", text)
    assert text.count("model.safetensors") == text.count("on rank 0") == 1
    assert "".join(traceback.format_exception(raised.value)).count("Error: [Errno") == 1
    assert raised.value.errno == number
    assert raised.value.filename.endswith("model.safetensors")


@pytest.mark.parametrize("call", ["open", "readv"])
def test_what_cannot_be_read_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    manager = CheckpointManager(Checkpoint(model=torch.nn.Linear(9, 9)), tmp_path)
    first, file = manager.save(1), Path(manager.save(2)) / "model.safetensors"
    real = getattr(os, call)

    def fails(path, *args, **kwargs):
        opened = path if call == "open" else os.readlink(f"/proc/self/fd/{path}")
        if opened == str(file):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, call, fails)
    with warnings.catch_warnings(record=True) as caught:
        assert manager.restore_or_initialize() == first
    (text,) = [str(warning.message) for warning in caught]
    assert f"Input/output error (0 of {file.stat().st_size} bytes are read): '{file}'" in text
    assert text.count(str(file)) == text.count("on rank 0") == 1
    with pytest.raises(OSError, match="Input/output error") as raised:
        manager.restore(file.parent)
    assert str(raised.value).count("on rank 0") == 1


def test_json_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "MOST_BYTES_OF_JSON", 10_000)
    manager = CheckpointManager(Checkpoint(holder=Holder({"a": [0] * 9999})), tmp_path)
    with pytest.raises(
        ValueError, match=r"state\.json would have \d+ bytes.* must be arrays, on rank 0"
    ):
        manager.save(1)
    assert manager.checkpoints == []


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    elsewhere, directory = tmp_path / "elsewhere", tmp_path / "saved"
    elsewhere.write_text("somebody's")
    directory.mkdir()
    manager = CheckpointManager(Checkpoint(counter=Counter()), directory)
    for make in (lambda path: path.symlink_to(elsewhere), os.mkfifo):
        make(directory / ".lock")
        with pytest.raises(OSError, match=r"on rank 0: '.*\.lock'"):
            manager.save(1)
        (directory / ".lock").unlink()
    assert elsewhere.read_text() == "somebody's"


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    manager = CheckpointManager(Checkpoint(counter=Counter({1, 2})), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"counter: count is a builtins.set, which a checkpoint cannot keep"
    ):
        manager.save(1)
    assert os.listdir(tmp_path) == [".lock"]


OTHER_JOB = """
import sys
import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager
manager = CheckpointManager(Checkpoint(variable=ms.Variable(0.0)), sys.argv[1])
if sys.argv[2] in ("save", "claim"):
    manager.save(2) if sys.argv[2] == "save" else manager.claim()
else:
    print(manager.restore_or_initialize())
"""


def test_another_job_may_read_but_not_write(tmp_path: Path) -> None:
    def job(what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", OTHER_JOB, str(tmp_path), what]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    manager = CheckpointManager(Checkpoint(variable=ms.Variable(0.0)), tmp_path)
    path = manager.save(1)
    (tmp_path / ".unfinished-step-00000002-abcd").mkdir()
    for refused in map(job, ("save", "claim")):
        assert refused.returncode != 0
        assert f"another job, process {os.getpid()} on " in refused.stderr
        assert "in a OneDeviceStrategy each is like a job of its own" in refused.stderr
    assert job("restore").stdout.strip() == path
    assert (tmp_path / ".unfinished-step-00000002-abcd").exists()
    CheckpointManager(Checkpoint(variable=ms.Variable(0.0)), tmp_path).save(2)  # of the same job
    del manager
    gc.collect()
    assert job("save").returncode == 0
    assert not (tmp_path / ".unfinished-step-00000002-abcd").exists()


FORKS = """
import os, signal, sys
import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager
manager = CheckpointManager(Checkpoint(variable=ms.Variable(0.0)), sys.argv[1])
manager.claim()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.closerange(0, 3)
    signal.alarm(120)
    os.write(writer, b"here")
    while True:
        signal.pause()
os.read(reader, 4)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_of_a_job_that_was_killed_keeps_nobody_out(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    child = int(killed.stdout)
    try:
        CheckpointManager(Checkpoint(variable=ms.Variable(0.0)), tmp_path).save(1)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_leaves_its_parent_the_lock(tmp_path: Path) -> None:
    manager = CheckpointManager(Checkpoint(variable=ms.Variable(0.0)), tmp_path)
    manager.claim()
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    command = [sys.executable, "-c", OTHER_JOB, str(tmp_path), "claim"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert f"another job, process {os.getpid()} on " in refused.stderr
    manager.save(1)


def test_a_claim_makes_the_directory_and_takes_its_lock(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "saved"
    manager = CheckpointManager(Checkpoint(variable=ms.Variable(0.0)), directory)
    manager.claim()
    manager.claim()
    assert os.listdir(directory) == [".lock"]
    command = [sys.executable, "-c", OTHER_JOB, str(directory), "save"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert f"RuntimeError: another job, process {os.getpid()} on " in refused.stderr
    manager.save(1)
    assert names(manager) == ["step-00000001"]


AT_EXIT = """
import sys, threading, time
import numpy as np
import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager, durable_files
write = durable_files.write
def slow(path, parts):
    time.sleep(0.2)
    if sys.argv[2] == "fail":
        raise OSError(28, "No space left on device")
    return write(path, parts)
durable_files.write = slow
manager = CheckpointManager(Checkpoint(variable=ms.Variable(np.ones(3))), sys.argv[1])
manager.save(1, wait=False)
"""


@pytest.mark.parametrize("outcome", ["end", "fail"])
def test_the_program_ends_when_it_is_written(tmp_path: Path, outcome: str) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path), outcome]
    job = subprocess.run(command, capture_output=True, text=True, timeout=60)
    written = [Path(p) for p in CheckpointManager(Checkpoint(), tmp_path).checkpoints]
    if outcome == "end":
        assert job.stderr == ""
        assert [path.name for path in written] == ["step-00000001"]
    else:
        assert "was not written: OSError: [Errno 28] No space left" in job.stderr
        assert written == []


def test_the_manifest_tells_what_there_is(tmp_path: Path) -> None:
    path = CheckpointManager(Checkpoint(model=torch.nn.Linear(2, 2)), tmp_path).save(5)
    manifest = read_manifest(path)
    assert (manifest.step, manifest.number, manifest.ranks) == (5, 1, 1)
    assert {*manifest.files, "manifest.json"} == set(os.listdir(path))


@pytest.mark.parametrize("step", [-1, 1.5, "3"])
def test_steps_are_numbers(tmp_path: Path, step: object) -> None:
    manager = CheckpointManager(Checkpoint(), tmp_path)
    with pytest.raises(ValueError, match="step must be a number of steps or None"):
        manager.save(step)  # type: ignore[arg-type]


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Checkpoint\(thing=…\) takes an object with state_dict"):
        Checkpoint(thing=3)
    with pytest.raises(TypeError, match="takes an object"):
        Checkpoint(module=torch.nn.Linear)
    with pytest.raises(ValueError, match="that name is taken"):
        Checkpoint(random=Counter())
    with pytest.raises(ValueError, match="keep must be a number of checkpoints"):
        CheckpointManager(Checkpoint(), tmp_path, keep=0)
    with pytest.raises(TypeError, match="checkpoint must be a Checkpoint"):
        CheckpointManager({}, tmp_path)  # type: ignore[arg-type]
    checkpoint = Checkpoint()
    checkpoint.objects["../up"] = Counter()
    with pytest.raises(ValueError, match="have names such as 'model'"):
        CheckpointManager(checkpoint, tmp_path).save(1)


def test_two_saves_of_one_step_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a lost rank has left behind may be completed when the next has begun, or is complete."""
    go_on = threading.Event()
    complete = OpenDirectory.complete

    def late(self: OpenDirectory, unfinished: UnfinishedCheckpoint, *others: Any) -> None:
        if unfinished.number == 1:
            assert go_on.wait(30)
        complete(self, unfinished, *others)

    monkeypatch.setattr(OpenDirectory, "complete", late)
    first, second = (CheckpointManager(Checkpoint(c=Counter(n)), tmp_path) for n in (1, 2))
    first.save(6, wait=False)
    newest = second.save(6)
    go_on.set()
    first.wait()
    assert names(second) == ["step-00000006", "step-00000006.2"]
    assert second.latest_checkpoint == newest


def test_there_are_never_two_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that are killed when a checkpoint is complete, and those before not deleted, do not add up."""
    checkpoint = Checkpoint(c=Counter())
    for step in range(4):
        CheckpointManager(checkpoint, tmp_path, keep=9).save(step)
    manager = CheckpointManager(checkpoint, tmp_path, keep=2)
    complete, there = OpenDirectory.complete, []

    def counted(self: OpenDirectory, *arguments: Any) -> None:
        there.append(names(manager))
        complete(self, *arguments)

    monkeypatch.setattr(OpenDirectory, "complete", counted)
    manager.save(9)
    assert there == [["step-00000002", "step-00000003"]]
    assert names(manager) == ["step-00000003", "step-00000009"]


def test_a_folder_that_appears_while_the_job_runs(tmp_path: Path) -> None:
    """One save fails; the next has another name."""
    manager = CheckpointManager(Checkpoint(c=Counter(7)), tmp_path)
    manager.save(1)
    (tmp_path / "step-00000002" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="step-00000002"):
        manager.save(2)
    assert manager.save(2).endswith("step-00000002.2")


def test_a_directory_that_cannot_be_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(Checkpoint(c=Counter(7)), tmp_path)

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as broken:
        broken.setattr(os, "listdir", refuse)
        with pytest.raises(PermissionError):
            manager.save(1)
    assert manager.save(1).endswith("step-00000001")


def test_a_launched_program_without_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.delenv("MPISTRAT_RANK_PID", raising=False)
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    steps = ms.Variable(0)
    with pytest.raises(
        RuntimeError,
        match=r"has 2 ranks, .*\(steps, model\) are of no .*, or one of these, in",
    ):
        Checkpoint(steps=steps, model=torch.nn.Linear(1, 1))
    with ms.OneDeviceStrategy("cpu:0").scope():
        assert Checkpoint(steps=steps).strategy is ms.get_strategy()
    monkeypatch.setenv("PMI_SIZE", "1")
    assert Checkpoint(steps=steps).strategy is ms.get_strategy()
