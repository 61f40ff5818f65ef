"""A simulated accelerator: `load()` gives torch the device kind "sim" and the module `torch.sim`.

It is a backend of torch (PrivateUse1) in C++ whose kernels are the CPU's, so numbers are the CPU's to the bit. Device
memory is at addresses that the host cannot read; streams run as late as they may; a check by vector clocks finds each
use of memory that nothing orders, and each `record_stream` that is missing. `build` compiles it once per version of
torch; `torch_sim` says what `torch.sim` has; `process_group` is its NCCL.

    streams.h      tasks, clocks, waits of the host       kernels.h      the fallback to the CPU's kernels
    memory.h       blocks, violations, allocators         copies.h       with the host and between devices
    device.h       guard, events, generators, hooks       collectives.h  kernels of a process group

What it cannot see:

- A wait of the host that is left out before the host itself uses device memory, as MPI does with a device's address:
  whoever simulates that calls `torch.sim.host_access`.
- What the host does with pinned memory, but for wrong numbers: copies are late, and come when they are waited for.
- A missing wait whose effect another wait hides: `event.synchronize()` on any thread counts for all threads, and a
  query that says "it has come" counts for its own thread.
- Kernels that are slow, or that block each other: they run when they are launched, on the launching thread. One that
  is launched behind a collective takes until that has ended.
- A captured graph: inside `torch.sim.capture()` kernels run, and what would make the host wait raises.
- The allocator's cache, fragmentation, and what a library keeps for itself: memory is the sum of tensors.
- Sparse tensors of other layouts than COO, `torch.compile` for the device, and quantized tensors: not supported.
"""

from support.simulated_accelerator.torch_sim import load as load
