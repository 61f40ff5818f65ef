"""Whatever stands in the files of the newest checkpoint, it is passed over, and an older whole one is restored."""

import copy
import itertools
import json
import os
import re
import shutil
import socket
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager, durable_files
from mpistrat.checkpoint.manifest import sealed

TERABYTE = 1 << 40
DEEP = b"[" * 100_000 + b"]" * 100_000
ABSENT: Any = ["absent"]
NO_COUNT = (None, True, -1, 1.5, "1", [], {}, 1 << 64, ABSENT)
NO_TEXT = (None, 3, [], {})

Path_ = tuple[Any, ...]


class Holder:
    """Keeps a state of all kinds of values."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "some tuple": (1, 2.5, float("inf")),
            "some complex": 1 + 2j,
            "some bytes": b"\x00",
            "some pairs": {0: [1], (1, 2): None},
            "of torch": [torch.Size([2]), torch.float32, torch.device("cpu")],
            "arrays": [torch.ones(2, 3), np.arange(3), np.float32(1), np.array(["a", "bc"])],
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Program:
    """Has objects of all kinds, in whose states `number` stands."""

    def __init__(self, number: int, directory: Path) -> None:
        strategy = ms.MirroredStrategy(("cpu:0", "cpu:1"))
        on_read = ms.VariableSynchronization.ON_READ
        with strategy.scope():
            self.model = torch.nn.Linear(2, 1)
            self.steps = ms.Variable(number)
            seen = ms.Variable(0.0, synchronization=on_read, aggregation=ms.VariableAggregation.SUM)
        torch.nn.init.constant_(self.model.weight, number)
        loader: Any = torch.utils.data.DataLoader(range(8), 4, shuffle=True)  # type: ignore[arg-type]
        files = ms.input.FileDataset(range(2), lambda number: iter(np.arange(4)), 2, shuffle=True)
        distribute = strategy.experimental_distribute_dataset
        checkpoint = Checkpoint(
            model=self.model,
            steps=self.steps,
            seen=seen,
            loader=distribute(loader),
            files=distribute(files),
            holder=Holder(),
        )
        self.inputs = [iter(checkpoint.objects[name]) for name in ("loader", "files")]
        for batches in self.inputs:
            next(batches)
        self.manager = CheckpointManager(checkpoint, directory)

    def numbers(self) -> list[float]:
        return [*self.model.weight.flatten().tolist(), float(self.steps.numpy())]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of two checkpoints."""
    directory = tmp_path_factory.mktemp("hostile") / "saved"
    for step in (1, 2):
        Program(step, directory).manager.save(step)
    return directory


class Directory:
    """A copy of `saved` whose newest checkpoint is changed again and again."""

    def __init__(self, saved: Path, path: Path) -> None:
        self._whole = saved / "step-00000002"
        self.older, self.newest = path / "step-00000001", path / "step-00000002"
        shutil.copytree(saved, path)
        self.program = Program(9, path)

    def text(self, name: str) -> bytes:
        return (self._whole / name).read_bytes()

    def json(self, name: str) -> Any:
        content = json.loads(self.text(name))
        return content["content"] if name == "manifest.json" else content

    def files(self) -> list[str]:
        return sorted(os.listdir(self._whole))

    def put(self, name: str, text: bytes) -> None:
        """`text` in a file, with the checksum made right."""
        (self.newest / name).write_bytes(text)
        self.seal(name, len(text), zlib.crc32(text))

    def seal(self, name: str, size: int, checksum: int) -> None:
        manifest = self.json("manifest.json")
        manifest["files"][name] = [size, checksum]
        self.put_manifest(manifest)

    def put_manifest(self, content: Any) -> None:
        (self.newest / "manifest.json").write_bytes(sealed(content))

    def put_json(self, name: str, content: Any) -> None:
        if name == "manifest.json":
            self.put_manifest(content)
        else:
            self.put(name, json.dumps(content).encode())

    def assert_passed_over(self, name: str, what: object) -> None:
        """And make the newest whole again."""
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = self.program.manager.restore_or_initialize()
        assert restored == str(self.older), what
        assert self.program.numbers() == [1, 1, 1], what
        (warning,) = map(str, (w.message for w in caught))
        assert f"{self.newest / name}" in warning, what
        assert warning.count(str(self.newest)) == 1, what
        assert "on rank 0" in warning, what
        assert time.monotonic() - began < 5, what
        for changed in {name, "manifest.json", "state.json", "rank-00000.json"}:
            file = self.newest / changed
            if file.is_dir() and not file.is_symlink():
                file.rmdir()
            else:
                file.unlink(missing_ok=True)
            file.write_bytes(self.text(changed))


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Directory:
    return Directory(saved, tmp_path / "copy")


def changed(tree: Any, path: Path_, value: Any) -> Any:
    """A copy of JSON in which `value` stands at `path`."""
    tree = copy.deepcopy(tree)
    if not path:
        return value
    place = tree
    for part in path[:-1]:
        place = place[part]
    if value is ABSENT:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return tree


def test_it_is_restored_as_it_is(directory: Directory) -> None:
    assert directory.program.manager.restore_or_initialize() == str(directory.newest)
    assert directory.program.numbers() == [2, 2, 2]


def test_each_field_of_a_manifest(directory: Directory) -> None:
    manifest = directory.json("manifest.json")
    cases: list[tuple[Path_, Any]] = [((), value) for value in (None, 3, "x", [], {})]
    for field in ("step", "number", "ranks"):
        cases += [((field,), value) for value in NO_COUNT]
    cases += [(("ranks",), value) for value in (0, 2, 10**15)]
    cases += [(("files",), value) for value in (None, 3, "x", [], {}, ABSENT)]
    for name, (size, checksum) in manifest["files"].items():
        at = ("files", name)
        cases += [(at, value) for value in (None, 3, "ab", {}, [], [size], [size, checksum, 0])]
        cases += [((*at, 0), value) for value in NO_COUNT if value is not ABSENT]
        cases += [((*at, 1), value) for value in NO_COUNT if value is not ABSENT]
        cases += [((*at, 0), size + 1), ((*at, 1), 1 << 32)]
    outside = ("/etc/passwd", "../step-00000001/state.json", "a/b.safetensors", "", ".", "..", "\0")
    others = (
        "manifest.json",
        "x.txt",
        ".lock",
        "rank-00001.json",
        "rank-0.json",
        "a.b.safetensors",
    )
    cases += [(("files", name), [1, 1]) for name in outside + others]
    for path, value in cases:
        directory.put_manifest(changed(manifest, path, value))
        # A wrong size or checksum is the file's, too.
        is_of_file = len(path) == 3 and type(value) is int and 0 <= value < 1 << 32
        directory.assert_passed_over(path[1] if is_of_file else "manifest.json", (path, value))
    for name in ("state.json", "rank-00000.json"):
        directory.put_manifest(changed(manifest, ("files", name), ABSENT))
        directory.assert_passed_over("manifest.json", name)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"3", b"\xff", DEEP, b"NaN", b"{" * 900])
def test_json_of_another_kind(directory: Directory, text: bytes) -> None:
    for name in ("state.json", "rank-00000.json"):
        if text == b"{}" and name == "state.json":
            continue  # of no objects, which is an error of its own
        directory.put(name, text)
        directory.assert_passed_over(name, text[:10])
    (directory.newest / "manifest.json").write_bytes(text)
    directory.assert_passed_over("manifest.json", text[:10])
    (directory.newest / "manifest.json").write_bytes(
        b'{"format": "mpistrat checkpoint 1", "crc32": 0, "content":\n' + text + b"}"
    )
    directory.assert_passed_over("manifest.json", text[:10])


def in_its_place(path: Path, kind: str, elsewhere: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket has at most 107 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)
    elif kind == "link out":
        elsewhere.write_bytes(content)
        path.symlink_to(elsewhere)
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        with open(path, "wb") as file:
            file.write(content)
            file.truncate(TERABYTE)


KINDS = ("folder", "pipe", "socket", "link out", "link to itself", "device", "sparse", "gone")


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_in_place_of_each_file(
    directory: Directory, tmp_path: Path, kind: str
) -> None:
    for name in directory.files():
        in_its_place(directory.newest / name, kind, tmp_path / "elsewhere")
        file = re.escape(str(directory.newest / name))
        with pytest.raises((ValueError, OSError), match=f"{file}.*on rank 0|on rank 0.*{file}"):
            directory.program.manager.restore(directory.newest)
        directory.assert_passed_over(name, kind)
        if kind == "sparse" and name != "manifest.json":
            in_its_place(directory.newest / name, kind, tmp_path / "elsewhere")
            directory.seal(name, TERABYTE, 0)
            directory.assert_passed_over(name, "of a size that the manifest says, too")


def test_what_does_not_fit_into_memory(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: len(directory.text(name)) for name in directory.files()}
    real = np.empty

    def full(size: Any, *args: Any, **kwargs: Any) -> Any:
        if size == sizes["model.safetensors"]:
            raise MemoryError
        return real(size, *args, **kwargs)

    monkeypatch.setattr(durable_files.np, "empty", full)
    with pytest.raises(ValueError, match="there is no memory for as many, on rank 0"):
        directory.program.manager.restore(directory.newest)


def nodes(tree: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """All that is in JSON, long lists of numbers by their first."""
    yield path, tree
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from nodes(value, (*path, key))
    elif isinstance(tree, list):
        for i, value in itertools.islice(enumerate(tree), 4):
            yield from nodes(value, (*path, i))


WRONG_CONTENTS: dict[str, tuple[Any, ...]] = {
    "dict": (None, 3, "x", [], [1]),
    "pairs": (None, 3, "x", {}, [1], [[1]], [[1, 2, 3]], [[[], 1]]),
    "tuple": (None, 3, "x", {}),
    "complex": (None, 3, [], [1], [1, "x"], [1, 2, 3]),
    "float": (None, 3, "x", "", []),
    "bytes": (None, 3, "?", "A", []),
    "size": (None, 3, "x", [-1], [1.5], ["x"], [1 << 64]),
    "dtype": (None, 3, "x", "nn", "Tensor", []),
    "device": (None, 3, "x", "cpu:x", "", []),
    **{kind: (None, 3, "no such", "", []) for kind in ("tensor", "array", "scalar")},
}


def is_node(value: Any) -> bool:
    return isinstance(value, dict) and next(iter(value), None) in WRONG_CONTENTS


def test_each_node_of_each_tree(directory: Directory) -> None:
    kinds = set()
    for name in ("state.json", "rank-00000.json"):
        tree = directory.json(name)
        for path, node in nodes(tree):
            if not is_node(node):
                continue
            (kind, content), *_ = node.items()
            kinds.add(kind)
            wrong = [{kind: value} for value in WRONG_CONTENTS[kind]]
            wrong += [{"unknown": content}, {}, {kind: content, "more": 1}]
            if kind in ("dict", "pairs"):
                wrong += [{**node, "of": of} for of in (None, 3, [], "object", "set")]
                wrong += [{kind: content, "metadata": 3}]
            for value in wrong:
                directory.put_json(name, changed(tree, path, value))
                directory.assert_passed_over(name, (name, path, value))
    assert kinds == WRONG_CONTENTS.keys()


HUGE = 1 << 62


def test_each_field_of_each_header(directory: Directory) -> None:
    for name in ("model.safetensors", "holder.safetensors", "rank-00000.safetensors"):
        content = directory.text(name)
        start = 8 + int.from_bytes(content[:8], "little")
        header, values = json.loads(content[8:start]), content[start:]

        def put(header: Any, name: str = name, values: bytes = values) -> None:
            text = header if isinstance(header, bytes) else json.dumps(header).encode()
            directory.put(name, len(text).to_bytes(8, "little") + text + values)

        for length in (0, len(content), HUGE, (1 << 64) - 1):
            directory.put(name, length.to_bytes(8, "little") + content[8:])
            directory.assert_passed_over(name, length)
        for text in (b"", b"1234567", content[:start], content + b"0", content[:-1]):
            directory.put(name, text)
            directory.assert_passed_over(name, text[:8])
        for wrong in (
            b"",
            b"{",
            b"[]",
            b"3",
            b'"x"',
            DEEP,
            None,
            {"new": 3},
            {**header, "new": {}},
        ):
            put(wrong)
            directory.assert_passed_over(name, wrong)
        for metadata in (None, 3, [], {"mpistrat": 3}, {"mpistrat": "["}, {"mpistrat": "[]"}):
            put({**header, "__metadata__": metadata})
            directory.assert_passed_over(name, metadata)
        for array, entry in header.items():
            if array == "__metadata__":
                continue
            first, end = entry["data_offsets"]
            wrong_fields: dict[str, tuple[Any, ...]] = {
                "dtype": (*NO_TEXT, "F7", "O", "F128", ABSENT),
                "shape": (None, 3, "x", {}, [-1], [1.5], ["x"], [HUGE], [HUGE] * 9, [7, 1], ABSENT),
                "data_offsets": (
                    *(None, 3, "x", {}, [], [first], [first, end, end], [end, first], ABSENT),
                    *([-1, end], [first, HUGE], [first + 1, end + 1], [first, end + 1]),
                    *([first, end - 1], ["x", end], [first, 1.5], [HUGE, HUGE + end - first]),
                ),
            }
            for field, values_ in wrong_fields.items():
                for value in values_:
                    put(changed(header, (array, field), value))
                    directory.assert_passed_over(name, (array, field, value))


def test_arrays_that_lie_in_each_other(directory: Directory) -> None:
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": offsets}
        for name, offsets in (("bias", [0, 8]), ("weight", [4, 12]))
    }
    text = json.dumps(header).encode()
    directory.put("model.safetensors", len(text).to_bytes(8, "little") + text + bytes(12))
    directory.assert_passed_over("model.safetensors", header)


def test_dtypes_that_only_numpy_has(directory: Directory) -> None:
    content = directory.text("holder.safetensors")
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    foreign = json.loads(header["__metadata__"]["mpistrat"])
    ((name, (dtype, shape)),) = foreign.items()
    entries = [None, 3, [], [dtype], [3, shape], [dtype, 3], [dtype, [-1]], [dtype, [HUGE, HUGE]]]
    entries += [[other, shape] for other in ("O", "V8", "i4,O", "no", "U0", "U99999999999", "U3")]
    for entry in entries:
        header["__metadata__"] = {"mpistrat": json.dumps({name: entry})}
        text = json.dumps(header).encode()
        directory.put(
            "holder.safetensors", len(text).to_bytes(8, "little") + text + content[start:]
        )
        is_known = isinstance(entry, list) and entry[1:] == [shape] and entry[0] != 3
        is_known = is_known or entry == [dtype, [HUGE, HUGE]]
        directory.assert_passed_over("state.json" if is_known else "holder.safetensors", entry)


NO_RANDOM = (None, 3, "x", {"tuple": []}, {"dict": {}})
OWN_STATES: list[tuple[str, Path_, tuple[Any, ...]]] = [
    *(("state.json", ("loader", "dict", field), NO_COUNT) for field in ("epoch", "steps", "ranks")),
    *(("state.json", ("files", "dict", field), NO_COUNT) for field in ("epoch", "steps", "ranks")),
    ("state.json", ("loader", "dict", "source"), (*NO_TEXT, ABSENT)),
    ("state.json", ("loader", "dict", "random"), (None, 3, [], {"dict": {}}, ABSENT)),
    *(
        ("state.json", ("loader", "dict", "random", "dict", part), (*NO_RANDOM, ABSENT))
        for part in ("torch", "python", "numpy", "own")
    ),
    ("state.json", ("loader", "dict", "random", "dict", "numpy", 2), (-1, 625, HUGE, 1.5, "x")),
    ("state.json", ("files", "dict", "finished"), (None, 3, "x", [2], [-1], ["x"], ABSENT)),
    ("state.json", ("files", "dict", "partly"), (None, 3, [], {"dict": {"0": 1}}, ABSENT)),
    ("state.json", ("files", "dict", "left"), (None, 3, [], {"pairs": [[0, [9]]]}, ABSENT)),
    ("state.json", ("strategy", "dict", "deterministic"), (None, 3, "x", ABSENT)),
    ("state.json", ("strategy", "dict", "num_replicas_in_sync"), (*NO_COUNT, 0)),
    ("state.json", ("steps", "dict", "value"), (None, 3, "x", [])),
    ("state.json", ("loader",), (None, 3, "x", [])),
    ("state.json", ("classes of objects",), (None, 3, "x", [], {"optimizer": 3})),
    *(
        ("rank-00000.json", ("dict", name, "dict", field), (*NO_COUNT, HUGE))
        for name in ("seen", "random")
        for field in ("first_replica", "replicas", "total")
    ),
    ("rank-00000.json", ("dict", "seen", "dict", "copies"), (None, 3, [], [1, 2], [1], ABSENT)),
    ("rank-00000.json", ("dict", "random", "dict", "torch"), (None, 3, [1], [[1]], [[], []])),
    *(
        ("rank-00000.json", ("dict", "random", "dict", part), (*NO_RANDOM, ABSENT))
        for part in ("python", "numpy")
    ),
    *(
        ("rank-00000.json", ("dict", "random", "dict", "python", "tuple", i), ("x", [], HUGE))
        for i in (0, 1, 2)
    ),
    *(
        ("rank-00000.json", ("dict", "random", "dict", "numpy", "tuple", i), (None, "x", [], HUGE))
        for i in (0, 1, 2)
    ),
    ("rank-00000.json", ("dict", "random", "dict", "device"), ("x", [], 1.5)),
]


def test_each_field_of_our_own_states(directory: Directory) -> None:
    for name, path, values in OWN_STATES:
        tree = directory.json(name)
        for value in values:
            directory.put_json(name, changed(tree, path, value))
            directory.assert_passed_over(name, (path, value))


def test_without_an_older_one_it_is_an_error(directory: Directory) -> None:
    shutil.rmtree(directory.older)
    directory.put_manifest({**directory.json("manifest.json"), "ranks": 10**15})
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* can be read: .*manifest\.json.*on rank 0"
    ):
        directory.program.manager.restore_or_initialize()
    assert directory.program.numbers() == [9, 9, 9]


def test_the_next_save_does_not_mind(directory: Directory) -> None:
    for name in directory.files():
        (directory.newest / name).unlink()
        os.mkfifo(directory.newest / name)
    manager = directory.program.manager
    assert manager.checkpoints == [str(directory.older)]
    assert manager.save() == str(directory.newest) + ".2"
