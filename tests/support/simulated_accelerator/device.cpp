// A simulated accelerator for tests: PrivateUse1 over host memory at addresses the host cannot read (TAG), CPU kernels,
// streams whose copies run as late as they may, and a happens-before check of what streams do to memory.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {
using c10::Device; using c10::DeviceIndex; using c10::Stream; using at::Tensor; using c10::IValue;
constexpr auto DT = c10::DeviceType::PrivateUse1;
constexpr uintptr_t TAG = uintptr_t(1) << 50;
void* tagged(void* p) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) ^ TAG); }
int device_count() { static int n = [] { auto e = getenv("SIMULATED_DEVICES"); return e ? atoi(e) : 2; }(); return n; }

// ---- streams: what they were given, what they know -------------------------------------------------------------
using Key = std::pair<int, int64_t>;  // device, stream id
using Clock = std::map<Key, uint64_t>;
struct Task { uint64_t seq; std::function<void()> run; bool wait; Key of; uint64_t upto; };
struct StreamState { std::deque<Task> queue; Clock clock; uint64_t seq = 0; };
struct Access { size_t lo, hi; Key stream; uint64_t seq; bool write; };
struct Block { char* host; size_t n; Key stream; std::set<Key> recorded; std::vector<Access> seen; ~Block() { free(host); } };
struct EventState { Key stream; uint64_t seq; Clock clock; double ms; };

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
std::map<Key, StreamState>& streams() { static auto* m = new std::map<Key, StreamState>; return *m; }
std::map<uintptr_t, std::shared_ptr<Block>>& blocks() { static auto* m = new std::map<uintptr_t, std::shared_ptr<Block>>; return *m; }
std::map<uintptr_t, size_t>& pinned() { static auto* m = new std::map<uintptr_t, size_t>; return *m; }
std::vector<std::string>& violations() { static auto* v = new std::vector<std::string>; return *v; }
Clock host_clock;
int64_t next_stream = 1, raise_mode = 1, pending = 0;
std::map<int, size_t> bytes_used, bytes_peak;
thread_local int current_device = 0;
thread_local std::map<int, int64_t> current_stream;

void join(Clock& into, const Clock& from) { for (auto& [k, v] : from) { auto& mine = into[k]; mine = std::max(mine, v); } }
Key key(Stream s) { return {s.device_index(), s.id()}; }
Key current_key(int d) { return {d, current_stream[d]}; }
std::string name(Key k) { return "stream " + std::to_string(k.second) + " of sim:" + std::to_string(k.first); }

bool run_one(Key k, uint64_t upto);
void drain(Key k, uint64_t upto = UINT64_MAX) { while (run_one(k, upto)) {} }
bool run_one(Key k, uint64_t upto) {
  auto& s = streams()[k];
  if (s.queue.empty() || s.queue.front().seq > upto) return false;
  Task task = std::move(s.queue.front()); s.queue.pop_front(); pending--;
  if (task.wait) drain(task.of, task.upto); else task.run();
  return true;
}
void host_waits(Key k) { drain(k); join(host_clock, streams()[k].clock); }
uint64_t launch(Key k) {  // the host gives `k` something: it comes after what the host has waited for
  auto& s = streams()[k]; join(s.clock, host_clock); return s.clock[k] = ++s.seq;
}
void violation(const std::string& text, bool may_raise = true) {
  violations().push_back(text);
  TORCH_CHECK(!(may_raise && raise_mode), "simulated device: ", text);
}
std::shared_ptr<Block> block_at(const void* p) {
  auto it = blocks().upper_bound(reinterpret_cast<uintptr_t>(p));
  return it == blocks().begin() ? nullptr : std::prev(it)->second;
}
void touch(const Tensor& t, Key k, uint64_t seq, bool write) {
  if (!t.numel() || !t.unsafeGetTensorImpl()->unsafe_storage().data()) return;
  auto b = block_at(t.unsafeGetTensorImpl()->unsafe_storage().data()); if (!b) return;
  size_t lo = t.storage_offset() * t.itemsize(), hi = lo + t.itemsize();
  for (int i = 0; i < t.dim(); i++) hi += (t.size(i) - 1) * t.stride(i) * t.itemsize();
  auto& clock = streams()[k].clock;
  std::vector<Access> kept;
  for (auto& a : b->seen) {
    bool overlap = a.lo < hi && lo < a.hi, before = a.stream == k || clock[a.stream] >= a.seq;
    if (overlap && !before && (write || a.write))
      violation(name(k) + (write ? " writes" : " reads") + " what " + name(a.stream) + (a.write ? " writes" : " reads") + ", without having waited for it");
    if (!(before && a.lo >= lo && a.hi <= hi && (write || !a.write))) kept.push_back(a);
  }
  kept.push_back({lo, hi, k, seq, write}); b->seen = std::move(kept);
}

// ---- memory ------------------------------------------------------------------------------------------------------
void free_block(void* p) {
  Lock lock(mutex);
  auto it = blocks().find(reinterpret_cast<uintptr_t>(p)); if (it == blocks().end()) return;
  auto b = it->second; blocks().erase(it); bytes_used[b->stream.first] -= b->n;
  auto& clock = streams()[b->stream].clock;
  for (auto& a : b->seen)
    if (a.stream != b->stream && clock[a.stream] < a.seq && host_clock[a.stream] < a.seq && !b->recorded.count(a.stream))
      { violation("memory of " + name(b->stream) + " is freed while " + name(a.stream) + " uses it: record_stream is missing", false); break; }
}
struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    Device d(DT, current_device);
    if (!n) return {nullptr, d};
    auto b = std::make_shared<Block>(); b->host = static_cast<char*>(aligned_alloc(64, (n + 63) / 64 * 64)); b->n = n;
    TORCH_CHECK_WITH(OutOfMemoryError, b->host, "simulated device out of memory");
    memset(b->host, 0xFF, n);  // NaN: what nobody has written yet
    Lock lock(mutex);
    b->stream = current_key(current_device); void* p = tagged(b->host); blocks()[reinterpret_cast<uintptr_t>(p)] = b;
    bytes_used[d.index()] += n; bytes_peak[d.index()] = std::max(bytes_peak[d.index()], bytes_used[d.index()]);
    return {p, p, &free_block, d};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(tagged(to), tagged(const_cast<void*>(from)), n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, Stream s) override { Lock l(mutex); if (auto b = block_at(p.get())) b->recorded.insert(key(s)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats s; s.allocated_bytes[0].current = bytes_used[d]; s.allocated_bytes[0].peak = bytes_peak[d]; return s;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override { bytes_peak[d] = bytes_used[d]; }
};
Allocator allocator;
REGISTER_ALLOCATOR(DT, &allocator)

void free_pinned(void* p) { Lock l(mutex); pinned().erase(reinterpret_cast<uintptr_t>(p)); free(p); }
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = aligned_alloc(64, (n + 64) / 64 * 64); memset(p, 0xFF, n);
    Lock l(mutex); pinned()[reinterpret_cast<uintptr_t>(p)] = n ? n : 1;
    return {p, p, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
PinnedAllocator pinned_allocator;
bool is_pinned(const void* p) {
  Lock l(mutex); auto a = reinterpret_cast<uintptr_t>(p); auto it = pinned().upper_bound(a);
  return it != pinned().begin() && (--it, a < it->first + it->second);
}

// ---- devices, streams, events -------------------------------------------------------------------------------------
double now() { return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DT; }
  int index(Device d) const { return d.index() < 0 ? current_device : d.index(); }
  Device exchangeDevice(Device d) const override { Device old = getDevice(); setDevice(d); return old; }
  Device getDevice() const override { return Device(DT, current_device); }
  void setDevice(Device d) const override {
    TORCH_CHECK(index(d) < device_count(), "simulated device: invalid device ordinal ", d, ", there are ", device_count());
    current_device = index(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = index(d); }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  Stream of(int d, int64_t id) const { return Stream(Stream::UNSAFE, Device(DT, d), id); }
  Stream getStream(Device d) const override { return of(index(d), current_stream[index(d)]); }
  Stream getDefaultStream(Device d) const override { return of(index(d), 0); }
  Stream getNewStream(Device d, int) const override { Lock l(mutex); return of(index(d), next_stream++); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override { auto old = getStream(s.device()); current_stream[s.device_index()] = s.id(); return old; }
  void* getStreamNativeHandle(const Stream s) const override { return reinterpret_cast<void*>(s.id() + 1); }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    Lock l(mutex); auto k = key(s); auto& st = streams()[k];
    if (!*e) *e = new EventState;
    join(st.clock, host_clock);
    *static_cast<EventState*>(*e) = {k, st.seq, st.clock, now()};
  }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete static_cast<EventState*>(e); }
  void block(void* e, const Stream& s) const override {
    if (!e) return;
    Lock l(mutex); auto& ev = *static_cast<EventState*>(e); auto& st = streams()[key(s)];
    st.queue.push_back({++st.seq, {}, true, ev.stream, ev.seq}); pending++;
    join(st.clock, ev.clock); st.clock[key(s)] = st.seq;
  }
  bool queryEvent(void* e) const override {
    if (!e) return true;
    Lock l(mutex); auto& ev = *static_cast<EventState*>(e);
    if (run_one(ev.stream, ev.seq)) return false;  // asking is what lets time pass
    join(host_clock, ev.clock); return true;
  }
  void synchronizeEvent(void* e) const override { if (e) { Lock l(mutex); auto& ev = *static_cast<EventState*>(e); drain(ev.stream, ev.seq); join(host_clock, ev.clock); } }
  bool queryStream(const Stream& s) const override { Lock l(mutex); if (run_one(key(s), UINT64_MAX)) return false; host_waits(key(s)); return true; }
  void synchronizeStream(const Stream& s) const override { Lock l(mutex); host_waits(key(s)); }
  void synchronizeDevice(const DeviceIndex d) const override { Lock l(mutex); std::vector<Key> ks; for (auto& [k, s] : streams()) if (k.first == d) ks.push_back(k); for (auto& k : ks) host_waits(k); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { allocator.recordStream(p, s); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override { return static_cast<EventState*>(b)->ms - static_cast<EventState*>(a)->ms; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct SimGenerator final : at::CPUGeneratorImpl {
  explicit SimGenerator(int d) { device_ = Device(DT, d); key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }
};
at::Generator& default_generator(int d) {
  static auto* all = [] { auto* v = new std::vector<at::Generator>; for (int i = 0; i < device_count(); i++) v->push_back(at::make_generator<SimGenerator>(i)); return v; }();
  return all->at(d < 0 ? current_device : d);
}
struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice(Device(DT, d)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto o = current_device; setCurrentDevice(d); return o; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void* p) const override { Lock l(mutex); auto b = block_at(p); TORCH_CHECK(b, "not device memory"); return Device(DT, b->stream.first); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<SimGenerator>(d < 0 ? current_device : d); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    c10::DeviceGuard g(s.device()); auto p = allocator.allocate(n);
    if (s.data() && n) memcpy(tagged(p.get()), tagged(const_cast<void*>(s.data())), std::min(n, s.nbytes()));
    s.set_data_ptr_noswap(std::move(p)); s.set_nbytes(n);
  }
};
bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// ---- kernels: those of the CPU, on the same memory ---------------------------------------------------------------
bool here(const Tensor& t) { return t.defined() && t.device().type() == DT; }
Tensor over(const c10::Storage& s, const Tensor& like, c10::DispatchKey k) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(s), c10::DispatchKeySet(k), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return t;
}
struct Call {
  std::unordered_map<c10::StorageImpl*, c10::Storage> down, up;      // device -> host, host -> device
  std::unordered_map<c10::TensorImpl*, Tensor> back;                 // host -> device
  int device = -1;
  Tensor to_host(const Tensor& t) {
    auto storage = t.unsafeGetTensorImpl()->unsafe_storage(); auto* impl = storage.unsafeGetStorageImpl();
    if (!down.count(impl)) {
      void* p = const_cast<void*>(storage.data());
      c10::Storage s(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(p ? tagged(p) : nullptr, Device(c10::kCPU)), c10::GetCPUAllocator(), true);
      down.emplace(impl, s); up.emplace(s.unsafeGetStorageImpl(), storage);
    }
    auto h = over(down.at(impl), t, c10::DispatchKey::CPU); back.emplace(h.unsafeGetTensorImpl(), t); return h;
  }
  Tensor to_device(const Tensor& h) {
    if (!h.defined() || here(h)) return h;
    if (auto it = back.find(h.unsafeGetTensorImpl()); it != back.end()) return it->second;
    TORCH_CHECK(h.layout() == c10::kStrided, "simulated device: ", h.layout(), " tensors are not supported");
    auto hs = h.storage();
    if (!up.count(hs.unsafeGetStorageImpl())) {
      c10::DeviceGuard g(Device(DT, device)); auto p = allocator.allocate(hs.nbytes());
      if (hs.nbytes()) memcpy(tagged(p.get()), hs.data(), hs.nbytes());
      up.emplace(hs.unsafeGetStorageImpl(), c10::Storage(c10::Storage::use_byte_size_t(), hs.nbytes(), std::move(p), &allocator, true));
    }
    return over(up.at(hs.unsafeGetStorageImpl()), h, c10::DispatchKey::PrivateUse1);
  }
  void follow(const Tensor& h, const Tensor& t) {  // an op resized what it writes
    auto hs = h.storage(); auto ts = t.storage(); void* p = const_cast<void*>(ts.data());
    if (hs.data() != (p ? tagged(p) : nullptr)) {
      c10::DeviceGuard g(t.device()); auto fresh = allocator.allocate(hs.nbytes());
      if (hs.nbytes()) memcpy(tagged(fresh.get()), hs.data(), hs.nbytes());
      ts.set_data_ptr_noswap(std::move(fresh)); ts.set_nbytes(hs.nbytes());
    }
    if (h.sizes() != t.sizes() || h.strides() != t.strides() || h.storage_offset() != t.storage_offset())
      t.unsafeGetTensorImpl()->set_sizes_and_strides(h.sizes(), h.strides(), h.storage_offset());
  }
};
std::mutex random_mutex;
struct Randoms {  // the CPU's generator plays the device's for a while
  std::unique_lock<std::mutex> lock; at::Generator of, cpu; c10::intrusive_ptr<c10::TensorImpl> saved;
  explicit Randoms(at::Generator g) : lock(random_mutex), of(g), cpu(at::detail::getDefaultCPUGenerator()) { saved = cpu.unsafeGetGeneratorImpl()->get_state(); cpu.unsafeGetGeneratorImpl()->set_state(*of.unsafeGetGeneratorImpl()->get_state()); }
  ~Randoms() { of.unsafeGetGeneratorImpl()->set_state(*cpu.unsafeGetGeneratorImpl()->get_state()); cpu.unsafeGetGeneratorImpl()->set_state(*saved); }
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto& schema = op.schema(); auto n = schema.arguments().size(), at = stack->size() - n;
  Call call; std::optional<at::Generator> generator; std::vector<std::pair<Tensor, Tensor>> written; std::vector<Tensor> read;
  bool indexing = schema.name().find("aten::index") == 0 || schema.name() == "aten::_index_put_impl_" || schema.name() == "aten::_unsafe_index";
  const Tensor* host_tensor = nullptr; std::vector<Tensor> hosts; hosts.reserve(64);
  auto note = [&](const Tensor& t, bool writes, bool index) {
    if (!t.defined()) return;
    if (here(t)) {
      TORCH_CHECK(call.device < 0 || call.device == t.device().index(), "Expected all tensors to be on the same device, but found at least two devices, sim:", call.device, " and ", t.device(), "! (when checking ", schema.name(), ")");
      call.device = t.device().index();
    } else if (!(index && indexing) && (writes || t.dim())) { hosts.push_back(t); host_tensor = &hosts.back(); }
  };
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[at + i]; auto* info = schema.arguments()[i].alias_info(); bool w = info && info->isWrite();
    if (v.isTensor()) note(v.toTensor(), w, false);
    else if (v.isTensorList()) for (Tensor t : v.toTensorVector()) note(t, w, false);
    else if (v.isOptionalTensorList()) for (std::optional<Tensor> t : v.toOptionalTensorList()) { if (t) note(*t, w, true); }
    else if (v.isDevice() && v.toDevice().type() == DT) { if (call.device < 0) call.device = v.toDevice().index(); v = Device(c10::kCPU); }
    else if (v.isGenerator()) {
      TORCH_CHECK(v.toGenerator().device().type() == DT, "Expected a 'sim' device type for generator but found '", v.toGenerator().device(), "'");
      generator = v.toGenerator(); v = IValue();
    }
  }
  if (call.device < 0) call.device = current_device;
  TORCH_CHECK(!host_tensor, "Expected all tensors to be on the same device, but found at least two devices, sim:", call.device, " and cpu! (when checking ", schema.name(), ")");
  auto down = [&](const Tensor& t, bool w) { if (!here(t)) return t; auto h = call.to_host(t); if (w) written.emplace_back(h, t); else read.push_back(t); return h; };
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[at + i]; auto* info = schema.arguments()[i].alias_info(); bool w = info && info->isWrite();
    if (v.isTensor()) v = down(v.toTensor(), w);
    else if (v.isTensorList()) { c10::List<Tensor> l; for (Tensor t : v.toTensorVector()) l.push_back(down(t, w)); v = l; }
    else if (v.isOptionalTensorList()) { c10::List<std::optional<Tensor>> l; for (std::optional<Tensor> t : v.toOptionalTensorList()) l.push_back(t ? std::optional<Tensor>(down(*t, w)) : t); v = l; }
  }
  bool view = false, to_host = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  for (auto& r : schema.returns()) { view |= r.alias_info() && !r.alias_info()->isWrite(); }
  Key k = current_key(call.device); uint64_t seq = 0;
  if (!view) {
    Lock l(mutex); drain(k); seq = launch(k);
    for (auto& t : read) touch(t, k, seq, false);
    for (auto& [h, t] : written) touch(t, k, seq, true);
  }
  {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    std::optional<Randoms> randoms; if (generator || op.hasTag(at::Tag::nondeterministic_seeded)) randoms.emplace(generator ? *generator : default_generator(call.device));
    auto target = schema.name() == "aten::convolution_overrideable" ? c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "") : op;
    if (target.hasKernelForDispatchKey(c10::DispatchKey::CPU)) target.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); else target.callBoxed(stack);
  }
  for (auto& [h, t] : written) call.follow(h, t);
  auto results = schema.returns().size(), first = stack->size() - results;
  auto up = [&](const Tensor& h) { auto t = call.to_device(h); if (!view && here(t)) { Lock l(mutex); touch(t, k, seq, true); } return t; };
  for (size_t i = 0; i < results; i++) {
    auto& v = (*stack)[first + i];
    if (v.isTensor()) v = up(v.toTensor());
    else if (v.isTensorList()) { c10::List<Tensor> l; for (Tensor t : v.toTensorVector()) l.push_back(up(t)); v = l; }
    else to_host = true;
  }
  if (to_host) { Lock l(mutex); host_waits(k); }
}

// ---- what has no CPU kernel, and copies ----------------------------------------------------------------------------
Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard g(Device(DT, Guard().index(device.value_or(Device(DT, -1)))));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard g(Device(DT, Guard().index(device.value_or(Device(DT, -1)))));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Lock l(mutex); c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  int device = here(self) ? self.device().index() : dst.device().index(); Key k = current_key(device);
  bool across = here(self) && here(dst) && self.device() != dst.device();
  Key other = across ? current_key(dst.device().index()) : k;
  if (across) { drain(other); join(streams()[k].clock, streams()[other].clock); }
  const Tensor& host = here(self) ? dst : self;
  bool later = non_blocking && !here(host) && is_pinned(host.storage().data());
  if (!later) drain(k);
  uint64_t seq = launch(k);
  if (here(self)) touch(self, k, seq, false);
  if (here(dst)) touch(dst, k, seq, true);
  auto call = std::make_shared<Call>(); Tensor from = here(self) ? call->to_host(self) : self.detach(), to = here(dst) ? call->to_host(dst) : dst.detach();
  std::vector<std::shared_ptr<Block>> alive; if (here(self)) alive.push_back(block_at(self.storage().data())); if (here(dst)) alive.push_back(block_at(dst.storage().data()));
  if (later) {
    if (!here(dst) && !pending && to.is_non_overlapping_and_dense()) memset(to.data_ptr(), 0xFF, to.nbytes());  // not there yet
    call.reset();
    streams()[k].queue.push_back({seq, [from, to, alive] { c10::impl::ExcludeDispatchKeyGuard b(c10::autograd_dispatch_keyset_with_ADInplaceOrView); to.copy_(from); }, false, {}, 0}); pending++;
  } else {
    to.copy_(from);
    if (!here(host)) host_waits(k);
  }
  if (across) join(streams()[other].clock, streams()[k].clock);
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) { dst.resize_(self.sizes()); return copy_from(self, dst, false); }
void record_stream(Tensor& t, Stream s) { allocator.recordStream(t.storage().data_ptr(), s); }
Tensor& set_storage(Tensor& t, c10::Storage s, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl(); impl->set_storage_keep_dtype(s);
  auto sz = C10_AS_INTARRAYREF_SLOW(size); std::vector<int64_t> st = C10_AS_INTARRAYREF_SLOW(stride).vec();
  if (st.empty()) { st.resize(sz.size()); int64_t x = 1; for (size_t i = sz.size(); i--;) { st[i] = x; x *= std::max<int64_t>(sz[i], 1); } }
  impl->set_sizes_and_strides(sz, st, offset.expect_int()); return t;
}
Tensor& set_whole(Tensor& t, c10::Storage s) { int64_t n = s.nbytes() / t.itemsize(); return set_storage(t, s, 0, {c10::SymInt(n)}, {}); }
Tensor& set_nothing(Tensor& t) { c10::DeviceGuard g(t.device()); return set_storage(t, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true), 0, {c10::SymInt(0)}, {}); }
Tensor& set_tensor(Tensor& t, const Tensor& o) { return set_storage(t, o.storage(), o.storage_offset(), c10::fromIntArrayRefSlow(o.sizes()), c10::fromIntArrayRefSlow(o.strides())); }
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  c10::List<bool> m; for (bool b : mask) m.push_back(b);
  auto ints = [](c10::SymIntArrayRef a) { c10::List<int64_t> l; for (auto& x : a) l.push_back(x.expect_int()); return IValue(l); };
  c10::List<int64_t> bias; bias.push_back(grad.size(1));
  torch::jit::Stack s{grad, input, weight, IValue(bias), ints(stride), ints(padding), ints(dilation), transposed, ints(output_padding), groups.expect_int(), m};
  fallback(op, {}, &s);
  return {s[0].toTensor(), s[1].toTensor(), s[2].toTensor()};
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define OPT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { AT_FORALL_LOWER_PRECISION_FP(LOW) AT_FORALL_FP32(WIDE) AT_FORALL_FP32_SET_OPT_DTYPE(OPT) }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty); m.impl("empty_strided", empty_strided); m.impl("_copy_from", copy_from); m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream); m.impl("set_.source_Storage_storage_offset", set_storage); m.impl("set_.source_Storage", set_whole); m.impl("set_", set_nothing); m.impl("set_.source_Tensor", set_tensor);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>()); m.impl("convolution_backward_overrideable", convolution_backward);
}
std::vector<std::string> take_violations() { Lock l(mutex); auto v = violations(); violations().clear(); return v; }
void set_raise(int64_t m) { raise_mode = m; }
int64_t host_address(int64_t p) { return p ^ int64_t(TAG); }
void seed(int64_t s, int64_t d) { default_generator(d).set_current_seed(s); }
Tensor rng_state(int64_t d) { return default_generator(d).get_state(); }
void set_rng_state(const Tensor& s, int64_t d) { default_generator(d).set_state(s); }
TORCH_LIBRARY(simdev, m) {
  m.def("device_count() -> int", [] { return int64_t(device_count()); });
  m.def("violations() -> str[]", take_violations); m.def("set_raise(int mode) -> ()", set_raise); m.def("host_address(int p) -> int", host_address);
  m.def("seed(int s, int d) -> ()", seed); m.def("rng_state(int d) -> Tensor", rng_state); m.def("set_rng_state(Tensor s, int d) -> ()", set_rng_state);
}
}  // namespace
