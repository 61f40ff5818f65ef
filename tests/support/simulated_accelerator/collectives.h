// Collectives as a native process group enqueues them: kernels of the group's stream that end when all ranks have come.
//
// The group's thread (process_group.py) takes the inputs when the stream has come to the collective, and gives the
// results; they appear in device memory as late as they may.
#pragma once
#include "copies.h"

namespace simulated {

struct Collective {
  StreamKey stream;
  uint64_t number;
  std::vector<Tensor> inputs, outputs;  // CPU tensors over the device's bytes, flat
  std::vector<std::shared_ptr<Block>> memory;
  std::vector<Tensor> results;
  std::shared_ptr<Gate> gate = std::make_shared<Gate>();
};

inline auto& collectives = *new std::map<int64_t, std::shared_ptr<Collective>>;  // that have not ended
inline int64_t next_collective = 0;

// All bytes of a tensor in the order of memory. Its strides must leave none out.
inline Tensor flat_over(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
  auto flat = tensor_over(host_storage_over(tensor.storage()), tensor, ON_HOST);
  flat.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef{tensor.numel()}, c10::IntArrayRef{1},
                                                   tensor.storage_offset());
  return flat;
}

inline int64_t start_collective(std::vector<Tensor> inputs, std::vector<Tensor> outputs, int64_t device,
                                int64_t stream_id) {
  auto collective = std::make_shared<Collective>();
  Lock lock;
  auto stream = collective->stream = StreamKey{int(device), stream_id};
  uint64_t number = collective->number = launch(stream);
  for (auto& tensor : inputs) {
    collective->inputs.push_back(flat_over(tensor));
    collective->memory.push_back(block_at(start_of(tensor)));
    access(tensor, stream, number, false);
  }
  for (auto& tensor : outputs) {
    collective->outputs.push_back(flat_over(tensor));
    collective->memory.push_back(block_at(start_of(tensor)));
    access(tensor, stream, number, true);
  }
  Task end{number};
  end.gate = collective->gate;
  int64_t id = ++next_collective;
  end.run = [collective, id] {
    collectives.erase(id);
    for (size_t i = 0; i < collective->results.size(); i++)
      copy_bytes(collective->outputs[i], collective->results[i]);
  };
  enqueue(stream, std::move(end));
  collectives[id] = collective;
  return id;
}

// Copies of the inputs, flat, once the stream has come to the collective.
inline std::vector<Tensor> collective_inputs(int64_t id) {
  Lock lock;
  auto collective = collectives.at(id);
  drain(lock, collective->stream, collective->number - 1);
  BelowAutograd below;
  std::vector<Tensor> copies;
  for (auto& input : collective->inputs) copies.push_back(input.clone());
  return copies;
}

// The kernel can end: it writes `results`, flat, one for each output; none after an abort.
inline void end_collective(int64_t id, std::vector<Tensor> results) {
  Lock lock;
  auto found = collectives.find(id);
  if (found == collectives.end() || found->second->gate->open) return;
  found->second->results = std::move(results);
  found->second->gate->open = true;
  changed.notify_all();
}

inline bool collective_has_ended(int64_t id) {
  Lock lock;
  return !collectives.count(id);
}

}  // namespace simulated
