"""PyTorch's own tests of its backends, for the backend "mpistrat", on ranks that MPI has started.

PyTorch starts new processes for each test. Here the ranks go on, and each test has a default group, a folder, a seed
and an environment of its own. Conditions on the backend's name, which close tests to others' backends, are opened;
assertions stay as they are.
"""

import contextlib
import datetime
import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest, mock

import torch
import torch.distributed as dist

BACKEND = "mpistrat"
INIT_METHOD = "mpi://"
_INTERNAL = "torch.testing._internal"


class _EveryName(str):
    """The backend's name, which equals "gloo" and "mpi", too."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other in (BACKEND, "gloo", "mpi")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")  # for sets of names


class TestsOfTorch:
    """Those of `torch.testing._internal.distributed.distributed_test`. Made once: importing it takes two seconds."""

    __test__ = False  # none of pytest's

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._environment = {"WORLD_SIZE": str(size), "INIT_METHOD": INIT_METHOD}
        self._environment |= {"BACKEND": BACKEND, "TEMP_DIR": "."}
        common = importlib.import_module(f"{_INTERNAL}.common_distributed")
        common.DistTestCases.backend_feature["plugin"].add(BACKEND)
        names = {**os.environ, **self._environment, "BACKEND": _EveryName(BACKEND)}
        with (
            mock.patch.object(os, "environ", names),
            mock.patch.object(common, "skip_if_small_worldsize", lambda test: test),
        ):
            self._module: Any = importlib.import_module(f"{_INTERNAL}.distributed.distributed_test")
        self._skips = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
        self._set_seed = importlib.import_module(f"{_INTERNAL}.common_utils").set_rng_seed

        class RankTest(self._module.TestDistBackend, self._module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
            init_method = INIT_METHOD

        self._tests = RankTest

    def run(self, name: str, folder: Path) -> None:
        """Run one test on this rank; all ranks do.

        Args: folder: seen by all ranks; it has the empty folders "barrier", "test_dir" and "init_dir".
        Raises: what the test does; AssertionError if torch skips it.
        """
        test = self._tests(name)
        test.rank = self._rank
        test.file_name = str(folder / "file")
        seconds = self._module.CUSTOM_PG_TIMEOUT.get(name, self._module.default_pg_timeout)
        environment = {**self._environment, "TEMP_DIR": str(folder)}
        with _all_restored(), mock.patch.dict(os.environ, environment):
            os.environ["MASTER_ADDR"] = self._module.MASTER_ADDR
            self._module.Barrier.barrier_id = 0
            timeout = datetime.timedelta(seconds=seconds)
            dist.init_process_group(BACKEND, init_method=INIT_METHOD, timeout=timeout)
            self._set_seed(1234)
            try:
                getattr(test, name)()
            except SkipTest as skip:
                raise AssertionError(f"torch skips {name}: {skip}") from skip
            except SystemExit as end:
                why = self._skips.get(end.code, end)
                raise AssertionError(f"torch skips {name}: {why}") from end
            finally:
                test.doCleanups()


@contextlib.contextmanager
def _all_restored() -> Iterator[None]:
    """What a test has left behind is gone after the block."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_default_dtype(torch.float32)
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]
        gc.collect()
