// Copies: between the host and a device, and between devices.
//
// A non-blocking copy of pinned memory is a task that runs as late as it may: the host that reads the result early, or
// writes over the source early, sees wrong numbers. All other copies with the host run at once, and the host waits.
#pragma once
#include "kernels.h"

namespace simulated {

inline void copy_bytes(const Tensor& to, const Tensor& from) {
  BelowAutograd below;
  to.copy_(from);
}

inline void enqueue_copy(StreamKey stream, uint64_t number, const Tensor& source, const Tensor& target,
                         const Tensor& from, const Tensor& to) {
  if (!on_device(target) && !tasks_pending && to.is_non_overlapping_and_dense())
    memset(to.data_ptr(), 0xFF, to.nbytes());  // what it holds before the copy is not to be used
  const Tensor& device_tensor = on_device(source) ? source : target;
  Task copy{number};
  copy.run = [from, to, memory = block_at(start_of(device_tensor))] { copy_bytes(to, from); };
  enqueue(stream, std::move(copy));
}

inline Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  BelowAutograd below;
  Lock lock;
  bool between_devices = on_device(source) && on_device(target);
  auto stream = current_stream((on_device(source) ? source : target).device().index());
  auto other = current_stream(target.device().type() == KIND ? target.device().index() : stream.device);
  const Tensor& host_tensor = on_device(source) ? target : source;
  bool late = non_blocking && !between_devices && is_pinned(start_of(host_tensor));
  if (!between_devices && !late) note_host_wait("copy");
  if (!late) drain(lock, stream);
  if (!(other == stream)) {  // as CUDA: both streams wait for each other
    drain(lock, other);
    join(streams[stream].clock, streams[other].clock);
  }
  uint64_t number = launch(stream);
  if (on_device(source)) access(source, stream, number, false);
  if (on_device(target)) access(target, stream, number, true);
  Aliases aliases;
  Tensor from = on_device(source) ? aliases.to_host(source) : source.detach();
  Tensor to = on_device(target) ? aliases.to_host(target) : target.detach();
  if (late) {
    enqueue_copy(stream, number, source, target, from, to);
  } else {
    copy_bytes(to, from);
    if (!between_devices) host_waits_for(lock, stream);
  }
  if (!(other == stream)) join(streams[other].clock, streams[stream].clock);
  return target;
}

inline Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

}  // namespace simulated
