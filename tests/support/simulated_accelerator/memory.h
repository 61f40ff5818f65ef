// Device memory, and the check of who may use it when.
//
// An address of device memory is the host's with one bit flipped: the host cannot read it, and faults. Fresh memory is
// all ones: NaN in floating point, so that what nobody has written is seen. Each block keeps the accesses of its bytes
// with the clocks of their streams; an access that is not ordered after an earlier one of another stream, where one of
// the two writes, is a violation, and so is memory that is freed while another stream uses it.
#pragma once
#include "streams.h"

#include <cstring>
#include <set>

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

namespace simulated {

using at::Tensor;

constexpr uintptr_t DEVICE_BIT = uintptr_t(1) << 50;

// The device's address of what the host has at `address`, or the other way round.
inline void* flipped(const void* address) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) ^ DEVICE_BIT);
}

inline bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

inline const void* start_of(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->unsafe_storage().data(); }

// ---- violations -----------------------------------------------------------------------------------------------------

inline auto& violations = *new std::vector<std::string>;
inline bool raise_violations = true;

inline void violation(const std::string& text, bool may_raise = true) {
  violations.push_back(text);
  TORCH_CHECK(!(may_raise && raise_violations), "simulated device: ", text);
}

// ---- which bytes of a block a tensor covers -------------------------------------------------------------------------

struct Region {
  size_t begin, end;  // in bytes, of the block
  bool dense;         // all bytes between
  std::vector<int64_t> sizes, strides;
  size_t itemsize;

  explicit Region(const Tensor& tensor)
      : begin(tensor.storage_offset() * tensor.itemsize()), end(begin + tensor.itemsize()),
        dense(tensor.is_non_overlapping_and_dense()), sizes(tensor.sizes().vec()), strides(tensor.strides().vec()),
        itemsize(tensor.itemsize()) {
    for (size_t i = 0; i < sizes.size(); i++) end += (sizes[i] - 1) * strides[i] * itemsize;
  }
  // All of a block of `size` bytes.
  explicit Region(size_t size) : begin(0), end(size), dense(true), itemsize(1) {}

  bool contains(const Region& other) const {
    if (begin == other.begin && sizes == other.sizes && strides == other.strides && end == other.end) return true;
    return dense && begin <= other.begin && other.end <= end;
  }

  bool overlaps(const Region& other) const {
    if (begin >= other.end || other.begin >= end) return false;
    if (dense && other.dense) return true;
    size_t first = std::min(begin, other.begin), last = std::max(end, other.end);
    std::vector<bool> mine(last - first), theirs(last - first);
    mark(mine, first);
    other.mark(theirs, first);
    for (size_t i = 0; i < mine.size(); i++)
      if (mine[i] && theirs[i]) return true;
    return false;
  }

 private:
  void mark(std::vector<bool>& bytes, size_t first) const { mark(bytes, begin - first, 0); }
  void mark(std::vector<bool>& bytes, size_t at, size_t dimension) const {
    if (dimension == sizes.size()) {
      std::fill_n(bytes.begin() + at, itemsize, true);
      return;
    }
    for (int64_t i = 0; i < sizes[dimension]; i++) mark(bytes, at + i * strides[dimension] * itemsize, dimension + 1);
  }
};

struct Access {
  Region region;
  StreamKey stream;
  uint64_t number;
  bool writes;
};

struct Block {
  char* host;
  size_t size;
  StreamKey stream;              // the one that was current when it was allocated
  std::set<StreamKey> recorded;  // by record_stream
  std::vector<Access> accesses;
  ~Block() { free(host); }
};

inline auto& blocks = *new std::map<uintptr_t, std::shared_ptr<Block>>;  // by the device's address

inline std::shared_ptr<Block> block_at(const void* address) {
  auto after = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  return after == blocks.begin() ? nullptr : std::prev(after)->second;
}

// `stream` uses `tensor` in its task of `number`: check that this comes after what other streams do with it.
inline void access(const Tensor& tensor, StreamKey stream, uint64_t number, bool writes) {
  if (!tensor.numel() || !start_of(tensor)) return;
  auto block = block_at(start_of(tensor));
  if (!block) return;
  Region region(tensor);
  auto& clock = streams[stream].clock;
  std::vector<Access> kept;
  for (auto& earlier : block->accesses) {
    bool before = earlier.stream == stream || knows(clock, earlier.stream, earlier.number);
    if (!before && (writes || earlier.writes) && earlier.region.overlaps(region))
      violation(name_of(stream) + (writes ? " writes" : " reads") + " what " + name_of(earlier.stream) +
                (earlier.writes ? " writes" : " reads") + ", without having waited for it");
    bool replaced = before && region.contains(earlier.region) && (writes || !earlier.writes);
    if (!replaced) kept.push_back(earlier);
  }
  kept.push_back({region, stream, number, writes});
  block->accesses = std::move(kept);
}

// The host itself uses `tensor`, as MPI does with a device's address: all streams that use it must have been waited for.
inline void host_access(const Tensor& tensor, bool writes) {
  auto block = block_at(start_of(tensor));
  if (!block) return;
  Region region(tensor);
  for (auto& earlier : block->accesses) {
    bool waited = knows(host_clock, earlier.stream, earlier.number) || knows(thread_clock, earlier.stream, earlier.number);
    if (!waited && (writes || earlier.writes) && earlier.region.overlaps(region))
      violation(std::string("the host ") + (writes ? "writes" : "reads") + " what " + name_of(earlier.stream) +
                (earlier.writes ? " writes" : " reads") + ", without having waited for it");
  }
}

// ---- allocators -----------------------------------------------------------------------------------------------------

inline auto& bytes_used = *new std::map<int, size_t>;
inline auto& bytes_peak = *new std::map<int, size_t>;

// A caching allocator gives freed memory to the next that asks on the block's own stream, which waits for no other.
inline void check_freed(const Block& block) {
  auto& clock = streams[block.stream].clock;
  for (auto& earlier : block.accesses) {
    bool over = earlier.stream == block.stream || knows(clock, earlier.stream, earlier.number) ||
        knows(host_clock, earlier.stream, earlier.number) || knows(thread_clock, earlier.stream, earlier.number);
    // The allocator waits for what a recorded stream holds now, and so for what that has waited for.
    for (auto& recorded : block.recorded)
      over = over || recorded == earlier.stream || knows(streams[recorded].clock, earlier.stream, earlier.number);
    if (over) continue;
    violation("memory of " + name_of(block.stream) + " is freed while " + name_of(earlier.stream) +
                  " uses it: record_stream is missing", /*may_raise=*/false);
    return;
  }
}

inline void free_block(void* address) {
  Lock lock;
  auto found = blocks.find(reinterpret_cast<uintptr_t>(address));
  if (found == blocks.end()) return;
  auto block = found->second;  // tasks that are to come may keep it
  blocks.erase(found);
  bytes_used[block->stream.device] -= block->size;
  check_freed(*block);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device(KIND, current_device);
    if (!size) return {nullptr, device};
    auto block = std::make_shared<Block>();
    block->host = static_cast<char*>(aligned_alloc(64, (size + 63) / 64 * 64));
    TORCH_CHECK_WITH(OutOfMemoryError, block->host, "simulated device: out of memory");
    block->size = size;
    open_context(current_device);
    memset(block->host, 0xFF, size);
    Lock lock;
    block->stream = current_stream(current_device);
    void* address = flipped(block->host);
    // A caching allocator gives out what the stream may not be done with: others have to wait for it before they use it.
    if (uint64_t last = streams[block->stream].number)
      block->accesses.push_back({Region(size), block->stream, last, true});
    blocks[reinterpret_cast<uintptr_t>(address)] = block;
    auto& used = bytes_used[current_device];
    auto& peak = bytes_peak[current_device];
    used += size;
    peak = std::max(peak, used);
    return {address, address, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(flipped(to), flipped(from), size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    Lock lock;
    if (auto block = block_at(memory.get())) block->recorded.insert(key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = bytes_used[device];
    stats.allocated_bytes[0].peak = bytes_peak[device];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock;
    bytes_peak[device] = bytes_used[device];
  }
};
inline DeviceAllocator device_allocator;

// Copy `size` bytes of the host into new memory of `device`.
inline c10::DataPtr new_memory(c10::Device device, const void* from, size_t size, size_t copied) {
  c10::DeviceGuard guard(device);
  auto memory = device_allocator.allocate(size);
  if (copied) memcpy(flipped(memory.get()), from, copied);
  return memory;
}

// Pinned memory is the host's; only the copies know that it is pinned, and run late. Tasks that end free some while the
// other mutex is held, so it has one of its own.
inline std::mutex pinned_mutex;
inline auto& pinned = *new std::map<uintptr_t, size_t>;

inline void free_pinned(void* address) {
  std::lock_guard guard(pinned_mutex);
  pinned.erase(reinterpret_cast<uintptr_t>(address));
  free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = aligned_alloc(64, (size + 64) / 64 * 64);
    memset(address, 0xFF, size);
    std::lock_guard guard(pinned_mutex);
    pinned[reinterpret_cast<uintptr_t>(address)] = std::max<size_t>(size, 1);
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
inline PinnedAllocator pinned_allocator;

inline bool is_pinned(const void* address) {
  std::lock_guard guard(pinned_mutex);
  auto number = reinterpret_cast<uintptr_t>(address);
  auto after = pinned.upper_bound(number);
  if (after == pinned.begin()) return false;
  auto [start, size] = *std::prev(after);
  return number < start + size;
}

}  // namespace simulated
