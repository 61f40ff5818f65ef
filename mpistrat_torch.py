"""The entry point that torch calls at the end of `import torch`. It makes the backend "mpistrat" known.

This is a top-level module, and it imports nothing of `mpistrat` before the backend is used. Loading a module of the
package would run the package's `__init__`, and this starts the observation of a rank. That takes tens of milliseconds,
and this module may add at most 2 ms to each `import torch`.
"""

import sys
from typing import Any

_NAME, _SCHEME = "mpistrat", "mpi"


def register() -> None:
    """Make the backend "mpistrat" and `init_method="mpi://"` known to torch.distributed. Called by: torch, on import.

    Does nothing if torch has no torch.distributed, or knows the backend.

    Raises: nothing, because `import torch` must not fail. An error is written to stderr instead.
    """
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
