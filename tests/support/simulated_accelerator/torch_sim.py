"""`torch.sim`: what `torch.cuda` is for CUDA, for the simulated accelerator, and what tests ask of it beside.

Loading it is once per process and for good: torch's one place for devices of other makers is taken, and every later
`torch.accelerator` names "sim". A pytest process that loads it gives all its later tests an accelerator.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from support.simulated_accelerator.build import library
from support.simulated_accelerator.process_group import ProcessGroupSim, faults, register

KIND = "sim"


def load(devices: int | None = None) -> Any:
    """Make `torch.sim`, of `devices` devices: by default SIMULATED_DEVICES, or 2. A second call returns the first's.

    Raises: NoCompiler without g++; RuntimeError where the process has another number of devices already.
    """
    loaded = getattr(torch, KIND, None)
    if loaded is None:
        os.environ["SIMULATED_DEVICES"] = str(devices or os.environ.get("SIMULATED_DEVICES", 2))
        loaded = _load()
    if devices not in (None, loaded.device_count()):
        raise RuntimeError(f"torch.sim has {loaded.device_count()} devices here, not {devices}")
    return loaded


def _load() -> Any:
    rename_privateuse1_backend(KIND)
    torch.ops.load_library(str(library()))
    module = types.ModuleType(f"torch.{KIND}")
    for name, value in {**_torch_cuda_names(), **_test_names()}.items():
        setattr(module, name, value)
    torch._register_device_module(KIND, module)
    sys.modules[f"torch.{KIND}"] = module
    generate_methods_for_privateuse1_backend()
    register()
    return module


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Stream:
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, _device(device), priority=priority)


class Event(torch.Event):
    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        return super().__new__(
            cls, KIND, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def _device(device: Any) -> torch.device:
    if device is None:
        return torch.device(KIND, torch.accelerator.current_device_index())
    if isinstance(device, int):
        return torch.device(KIND, device)
    device = torch.device(device)
    return _device(None) if device.index is None else device


def _torch_cuda_names() -> dict[str, Any]:
    ops = torch.ops.simulated
    accelerator = torch.accelerator

    def every_device() -> range:
        return range(device_count())

    def device_count() -> int:
        return ops.device_count()

    def manual_seed_all(seed: int) -> None:
        for index in every_device():
            ops.seed(seed, index)

    @contextlib.contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        with stream or contextlib.nullcontext():
            yield
        # torch.cuda.stream has CUDA make the device current again that was so before.
        if stream is not None:
            ops.open_context(accelerator.current_device_index())

    def get_device_properties(device: Any = None) -> types.SimpleNamespace:
        index = _device(device).index
        machine = os.environ.get("SIMULATED_UUIDS", str(os.getpid()))
        return types.SimpleNamespace(
            name="simulated accelerator",
            uuid=f"{os.uname().nodename}-{machine}-{index}",
            total_memory=1 << 34,
        )

    return {
        "is_available": lambda: device_count() > 0,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": device_count,
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(_device(device).index),
        "device": lambda device: accelerator.device_index(_device(device).index),
        "synchronize": lambda device=None: accelerator.synchronize(_device(device)),
        "current_stream": lambda device=None: accelerator.current_stream(_device(device)),
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0,
            device_index=_device(device).index,
            device_type=accelerator.current_stream().device_type,
        ),
        "set_stream": accelerator.set_stream,
        "stream": stream,
        "Stream": Stream,
        "Event": Event,
        "manual_seed": lambda seed: ops.seed(seed, _device(None).index),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: ops.rng_state(_device(device).index),
        "set_rng_state": lambda state, device=None: ops.set_rng_state(state, _device(device).index),
        "get_rng_state_all": lambda: [ops.rng_state(index) for index in every_device()],
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_properties": get_device_properties,
        "get_device_name": lambda device=None: get_device_properties(device).name,
        "memory_allocated": lambda device=None: accelerator.memory_allocated(_device(device)),
        "max_memory_allocated": lambda device=None: accelerator.max_memory_allocated(
            _device(device)
        ),
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats(
            _device(device)
        ),
        "empty_cache": lambda: None,
    }


def _test_names() -> dict[str, Any]:
    ops = torch.ops.simulated

    def host_waits() -> list[str]:
        """The kinds of waits of the host since the last call: "event", "stream", "device", "item", "copy", "query".

        Queries of other threads are no waits of the program.
        """
        this = ops.this_thread()
        waits = zip(*ops.host_waits(), strict=True)
        return [kind for kind, thread in waits if kind != "query" or thread == this]

    @contextlib.contextmanager
    def capture() -> Iterator[None]:
        """As while a CUDA graph is captured: whatever makes the host wait raises. Kernels run all the same."""
        ops.capture(True)
        try:
            yield
        finally:
            ops.capture(False)

    def set_sync_debug_mode(mode: str) -> None:
        """With "error", whatever makes the host wait raises; "default" lets it."""
        ops.refuse_host_waits(mode == "error")

    return {
        "contexts": ops.contexts,
        "violations": ops.violations,
        "raise_violations": ops.raise_violations,
        "host_waits": host_waits,
        "set_sync_debug_mode": set_sync_debug_mode,
        "capture": capture,
        "is_current_stream_capturing": ops.is_capturing,
        "host_address": ops.host_address,
        "host_access": ops.host_access,
        "ProcessGroupSim": ProcessGroupSim,
        "faults": faults,
    }
