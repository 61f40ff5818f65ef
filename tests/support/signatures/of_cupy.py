"""What the package uses of CuPy. Needs neither CuPy nor the package's own dependencies."""

import ast
from pathlib import Path

from support.signatures.uses import Library, Use, uses_in

PACKAGE = Path(__file__).parents[3] / "mpistrat"
NCCL = PACKAGE / "communicators/transports/accelerator/nccl.py"

LIBRARY = Library(
    modules=("cupy", "cupyx"),
    values={
        "cupy.empty()": "cupy.ndarray",
        "cupy.full()": "cupy.ndarray",
        "cupy.ndarray.data": "cupy.cuda.MemoryPointer",
        "cupy.ndarray.device": "cupy.cuda.Device",
        "cupy.cuda.get_current_stream()": "cupy.cuda.Stream",
        "cupy.cuda.Stream.record()": "cupy.cuda.Event",
        # What transports are written against; torch's streams and events have the same methods.
        "DeviceLibrary.new_stream()": "cupy.cuda.Stream",
        "DeviceLibrary.current_stream()": "cupy.cuda.Stream",
        "DeviceLibrary.record()": "cupy.cuda.Event",
    },
    names={
        "CupyLibrary": {
            "buffer": "cupy.ndarray",
            "stream": "cupy.cuda.Stream",
            "event": "cupy.cuda.Event",
        },
    },
)


def uses() -> list[tuple[str, Use]]:
    """With the place of each."""
    found = uses_in(LIBRARY, PACKAGE)
    return [(place, use) for place, use in found if use.name.startswith(LIBRARY.modules)]


def names() -> dict[str, bool]:
    """What is used, and whether it is called; with NCCL's constants, whose names are put together."""
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(NCCL.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    endings = (*tables["DTYPES"], *tables["OPS"])
    constants = [f"cupy.cuda.nccl.NCCL_{ending.upper()}" for ending in endings]
    found = dict.fromkeys(constants, False)
    for _, use in uses():
        is_called = found.get(use.name, False)
        found[use.name] = is_called or use.call is not None
    return dict(sorted(found.items()))
