"""What torch calls when it is imported: its entry point for backends. It makes "mpistrat" known.

A module of its own, which imports nothing of ours: one in the package `mpistrat` would load the package's `__init__`,
which begins to observe a rank, with every `import torch`: tens of milliseconds, where 2 are allowed.
"""

import sys
from typing import Any

_NAME, _SCHEME = "mpistrat", "mpi"


def register() -> None:
    """Make the backend and `init_method="mpi://"` known. Raises nothing: `import torch` must not fail for it."""
    try:
        dist = sys.modules["torch"].distributed
        if not dist.is_available() or _NAME in dist.Backend.backend_list:
            return
        dist.Backend.register_backend(
            _NAME, _create, extended_api=True, devices=["cpu", "cuda", "xpu"]
        )
        dist.register_rendezvous_handler(_SCHEME, _rendezvous)
    except Exception as error:
        sys.stderr.write(
            f"mpistrat: torch.distributed does not know the backend {_NAME!r}: "
            f"{type(error).__name__}: {error}\n"
        )


def _create(options: Any, backend_options: Any = None) -> Any:
    from mpistrat.torch_distributed.backend import create

    return create(options, backend_options)


def _rendezvous(url: str, **arguments: Any) -> Any:
    from mpistrat.torch_distributed.backend import rendezvous

    return rendezvous(url, **arguments)
