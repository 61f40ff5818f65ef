// Streams, events and the clocks by which the simulator knows what comes before what.
//
// A stream is a queue of tasks that run as late as they may: when the host waits for them, when a kernel that is
// launched needs them, or one at a time when the host asks whether an event has come. Kernels themselves run at once
// when they are launched (their results' shapes are needed), after all that their stream holds; if that includes a
// collective that is under way, the launch takes until the collective has ended, as with a device whose queue is full.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

extern "C" {  // of the Python that has loaded this library
int PyGILState_Check();
struct _ts* PyEval_SaveThread();
void PyEval_RestoreThread(struct _ts*);
}

namespace simulated {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

struct StreamKey {
  int device;
  int64_t id;  // 0: the device's default stream
  bool operator<(const StreamKey& other) const { return std::tie(device, id) < std::tie(other.device, other.id); }
  bool operator==(const StreamKey& other) const { return device == other.device && id == other.id; }
};

inline StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

inline std::string name_of(StreamKey stream) {
  return "stream " + std::to_string(stream.id) + " of sim:" + std::to_string(stream.device);
}

// Vector clocks: of each stream, the number of the last task that is known to come before.
using Clock = std::map<StreamKey, uint64_t>;

inline void join(Clock& into, const Clock& other) {
  for (auto& [stream, number] : other) into[stream] = std::max(into[stream], number);
}

inline bool knows(const Clock& clock, StreamKey stream, uint64_t number) {
  auto known = clock.find(stream);
  return known != clock.end() && known->second >= number;
}

// Closed until something outside of the device has happened; tasks behind it do not run.
struct Gate {
  bool open = false;
};

struct Task {
  uint64_t number;                      // of its stream, ascending
  std::function<void()> run;            // empty: the task only waits
  std::shared_ptr<Gate> gate;           // waits until it opens
  StreamKey awaited{-1, 0};             // waits for this stream …
  uint64_t awaited_number = 0;          // … up to this task
};

struct StreamState {
  std::deque<Task> queue;
  Clock clock;          // what the next task of this stream comes after
  uint64_t number = 0;  // of the last task
};

// Everything below is guarded by one mutex. Tasks that have run are dropped after it is released: what they keep alive
// may belong to Python, whose lock is always taken before this one.
inline std::mutex everything;
inline std::condition_variable changed;  // a gate has opened

// Who has the mutex may need Python's lock (to drop a tensor that Python knows, say), so nobody waits for the mutex with
// Python's lock in hand.
class Lock : public std::unique_lock<std::mutex> {
 public:
  Lock() : std::unique_lock<std::mutex>(everything, std::defer_lock) { take(); }
  ~Lock() {
    if (owns_lock()) unlock();
    finished.clear();
  }
  // Let others have the mutex until a gate has opened.
  void wait_for_change() {
    struct _ts* python = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    changed.wait(*this);
    if (!python) return;
    unlock();
    PyEval_RestoreThread(python);
    take();
  }
  std::vector<Task> finished;

 private:
  void take() {
    while (!try_lock()) {
      struct _ts* python = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
      lock();
      if (!python) return;
      unlock();
      PyEval_RestoreThread(python);
    }
  }
};

inline auto& streams = *new std::map<StreamKey, StreamState>;
inline auto& host_clock = *new Clock;       // what the host has waited for
inline thread_local Clock thread_clock;     // what this thread has seen by asking events
inline int64_t tasks_pending = 0;
inline int64_t next_stream = 1;
inline thread_local int current_device = 0;
inline thread_local std::map<int, int64_t> current_streams;

// As CUDA, which opens a context on a device at the first call that needs one: a call that names a stream, or memory,
// on that of the stream or the memory; a question about an event on the device that is current on the calling thread,
// and that is device 0 on each new thread. Bit i stands for device i.
inline auto& contexts = *new std::atomic<uint64_t>{0};
inline void open_context(int device) { contexts |= uint64_t(1) << device; }

inline StreamKey current_stream(int device) { return {device, current_streams[device]}; }

enum class Step { none, ran, blocked };

// Run the next task of `stream` up to the one of `number`, or what that waits for. Never blocks.
inline Step step(Lock& lock, StreamKey stream, uint64_t number) {
  auto& queue = streams[stream].queue;
  if (queue.empty() || queue.front().number > number) return Step::none;
  Task& next = queue.front();
  if (next.gate && !next.gate->open) return Step::blocked;
  if (next.awaited.device >= 0)
    if (Step other = step(lock, next.awaited, next.awaited_number); other != Step::none) return other;
  lock.finished.push_back(std::move(next));
  queue.pop_front();
  tasks_pending--;
  if (auto& run = lock.finished.back().run) run();
  return Step::ran;
}

// Run all tasks of `stream` up to the one of `number`; waits for gates, with the mutex released.
inline void drain(Lock& lock, StreamKey stream, uint64_t number = UINT64_MAX) {
  for (Step last; (last = step(lock, stream, number)) != Step::none;)
    if (last == Step::blocked) lock.wait_for_change();
}

// The host gives `stream` something to do: it comes after all that the host has waited for. Returns its number.
inline uint64_t launch(StreamKey stream) {
  open_context(stream.device);
  auto& state = streams[stream];
  join(state.clock, host_clock);
  join(state.clock, thread_clock);
  return state.clock[stream] = ++state.number;
}

inline void enqueue(StreamKey stream, Task task) {
  streams[stream].queue.push_back(std::move(task));
  tasks_pending++;
}

// `stream` waits for all that `clock` knows, which is of `awaited` up to its task `number`.
inline void wait_for_stream(StreamKey stream, StreamKey awaited, uint64_t number, const Clock& clock) {
  open_context(stream.device);
  auto& state = streams[stream];
  Task wait{++state.number};
  wait.awaited = awaited;
  wait.awaited_number = number;
  enqueue(stream, std::move(wait));
  join(state.clock, clock);
  state.clock[stream] = state.number;
}

// ---- the host waits -------------------------------------------------------------------------------------------------

struct HostWait {
  std::string kind;  // "event", "stream", "device", "item", "copy", "query"
  int64_t thread;
};
inline auto& host_waits = *new std::vector<HostWait>;
inline bool capturing = false;          // as between the begin and the end of a CUDA graph
inline bool refuse_host_waits = false;  // as torch.cuda.set_sync_debug_mode("error")

inline int64_t this_thread() { return int64_t(std::hash<std::thread::id>()(std::this_thread::get_id()) >> 1); }

inline void note_host_wait(const std::string& kind) {
  TORCH_CHECK(!capturing, "simulated device: operation not permitted when stream is capturing (", kind, ")");
  TORCH_CHECK(!(refuse_host_waits && kind != "query"), "simulated device: the host waits (", kind, ")");
  host_waits.push_back({kind, this_thread()});
}

inline void host_waits_for(Lock& lock, StreamKey stream) {
  open_context(stream.device);
  drain(lock, stream);
  join(host_clock, streams[stream].clock);
}

// ---- events ---------------------------------------------------------------------------------------------------------

struct EventState {
  StreamKey stream;
  uint64_t number;  // the last task before the event
  Clock clock;
  double milliseconds;
};

}  // namespace simulated
