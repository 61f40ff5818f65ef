// What torch asks of a device: its guard (current device, streams, events), its hooks, and its random generators.
#pragma once
#include "memory.h"

#include <chrono>
#include <cstdlib>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {

inline int device_count() {
  static int count = [] {
    const char* number = getenv("SIMULATED_DEVICES");
    return number ? atoi(number) : 2;
  }();
  return count;
}

inline int index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }

inline double now_in_milliseconds() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }

  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::Device getDevice() const override { return c10::Device(KIND, current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < device_count(), "simulated device: invalid device ordinal ", device, ", there are ",
                device_count());
    current_device = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = getDevice();
    setDevice(device);
    return old;
  }

  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index_of(device), current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock;
    return stream(index_of(device), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto old = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const {  // overrides, but in torch 2.9
    return reinterpret_cast<void*>(stream.id() + 1);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock;
    note_host_wait("query");
    open_context(stream.device_index());
    if (step(lock, key_of(stream), UINT64_MAX) != Step::none) return false;
    join(thread_clock, streams[key_of(stream)].clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock;
    note_host_wait("stream");
    host_waits_for(lock, key_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock;
    note_host_wait("device");
    std::vector<StreamKey> all;
    for (auto& [stream, state] : streams)
      if (stream.device == device) all.push_back(stream);
    for (auto& stream : all) host_waits_for(lock, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    open_context(stream.device_index());
    auto& state = streams[key_of(stream)];
    join(state.clock, host_clock);
    join(state.clock, thread_clock);
    if (!*event) *event = new EventState;
    *static_cast<EventState*>(*event) = {key_of(stream), state.number, state.clock, now_in_milliseconds()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Lock lock;
    auto& state = *static_cast<EventState*>(event);
    wait_for_stream(key_of(stream), state.stream, state.number, state.clock);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Lock lock;
    note_host_wait("query");
    open_context(current_device);
    auto& state = *static_cast<EventState*>(event);
    if (step(lock, state.stream, state.number) != Step::none) return false;
    join(thread_clock, state.clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock;
    note_host_wait("event");
    open_context(current_device);
    auto state = *static_cast<EventState*>(event);
    drain(lock, state.stream, state.number);
    join(host_clock, state.clock);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return static_cast<EventState*>(second)->milliseconds - static_cast<EventState*>(first)->milliseconds;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    device_allocator.recordStream(memory, stream);
  }
};

// ---- random numbers: a generator per device with the CPU's algorithm, so that equal seeds give equal numbers ---------

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = c10::Device(KIND, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

inline at::Generator& default_generator(int device) {
  static auto& all = *[] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(device < 0 ? current_device : device);
}

// The CPU's default generator plays `generator` while this lives.
class PlayedByTheCPU {
 public:
  explicit PlayedByTheCPU(at::Generator generator)
      : alone_(playing()), generator_(generator), cpu_(at::detail::getDefaultCPUGenerator()),
        saved_(cpu_.unsafeGetGeneratorImpl()->get_state()) {
    cpu_.unsafeGetGeneratorImpl()->set_state(*generator_.unsafeGetGeneratorImpl()->get_state());
  }
  ~PlayedByTheCPU() {
    generator_.unsafeGetGeneratorImpl()->set_state(*cpu_.unsafeGetGeneratorImpl()->get_state());
    cpu_.unsafeGetGeneratorImpl()->set_state(*saved_);
  }

 private:
  static std::mutex& playing() {
    static auto& one_at_a_time = *new std::mutex;
    return one_at_a_time;
  }
  std::unique_lock<std::mutex> alone_;
  at::Generator generator_, cpu_;
  c10::intrusive_ptr<c10::TensorImpl> saved_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(c10::Device(KIND, device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(c10::Device(KIND, device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void* address) const override {
    Lock lock;
    auto block = block_at(address);
    TORCH_CHECK(block, "simulated device: this is not an address of device memory");
    return c10::Device(KIND, block->stream.device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    size_t copied = storage.data() ? std::min(size, storage.nbytes()) : 0;
    auto memory = new_memory(storage.device(), flipped(storage.data()), size, copied);
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(size);
  }
};

}  // namespace simulated
