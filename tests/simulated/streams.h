// Streams, what makes them advance, and the programs (hosts) that launch and wait.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "races.h"

extern "C" {  // of Python, which has loaded this
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 4;
int device_count = DEVICES;
// Streams are numbered: 0 computes, the program's own are positive, and each communicator between hosts has a negative one.

using at::IntArrayRef;
using at::Tensor;
std::recursive_mutex lock;
std::condition_variable_any handed_over;
thread_local int current_device = 0;
thread_local std::map<int, int64_t> current_streams;

struct WithoutGil {  // around what may wait for a thread that needs it
  void* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() { if (state) PyEval_RestoreThread(state); }
};

struct Meeting;
struct Point { int device; int64_t stream; int64_t at; };  // in a stream: all tasks before number `at`
struct Task {
  std::string name;
  std::function<void()> run;
  std::optional<Point> after;         // a wait for another stream
  std::shared_ptr<Meeting> meeting;   // a part in a collective
  std::vector<Use> uses;
};
struct Stream {
  std::deque<Task> tasks;
  int64_t done = 0, queued = 0;
  bool advancing = false;
  std::vector<std::pair<size_t, size_t>> freed;  // offset and size of what the next allocation may overwrite
  Clock clock;                                   // what is over before its next task
};
struct Meeting {
  std::string what;
  int communicator, size;
  std::vector<std::optional<Point>> parts;
  std::vector<std::vector<Tensor>> outputs, inputs;
  std::vector<bool> arrived;
  int reduce = 0, root = 0;
  bool over = false;
};

enum Policy { LAZY, EAGER_SIDE, EAGER_COMPUTE, RANDOM };
Policy policy = LAZY;
std::mt19937 dice[DEVICES];
std::string failure;  // of a kernel; as on a real device every later call reports it
std::map<std::pair<int, int64_t>, std::shared_ptr<Meeting>> meetings;  // by communicator and number
std::map<std::pair<int, int>, int64_t> entered;                        // by communicator and member: how many so far
int64_t generation = 0;  // counts what may let a host that waits go on
void (*on_block)(const char*) = nullptr;

struct Device {
  std::map<int64_t, Stream> streams;
  int64_t last = 0, seed = 0, drawn = 0;
  Clock host;  // what its rank's program knows to be over
};
Device devices[DEVICES];

Stream& stream_at(int device, int64_t id) { return devices[device].streams[id]; }
int index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
int64_t current_stream(int device) { return current_streams[device]; }

// What is over when all that is in a stream now is.
Clock clock_of(int device, int64_t id) {
  auto clock = stream_at(device, id).clock;
  clock.raise(Clock::key(device, id), stream_at(device, id).queued);
  return clock;
}

void check_uses(int device, int64_t id, const std::vector<Use>& uses) {
  auto& stream = stream_at(device, id);
  stream.clock.join(devices[device].host);
  for (auto& use : uses) check_use(device, stream.clock, use, {Clock::key(device, id), stream.queued, place_now});
}

void check_failure() { TORCH_CHECK(failure.empty(), "the device has failed: ", failure); }

// CPU kernels and nothing else: no autograd, no autocast, no modes of whoever happens to wait.
struct Kernels {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                               c10::DispatchKey::PythonDispatcher, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                               c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

void happen(Meeting& meeting);
bool advance(int device, int64_t id, int64_t upto);

bool arrive(Meeting& meeting, int member) {
  meeting.arrived[member] = true;
  bool all = true;
  for (auto& part : meeting.parts) if (!part) all = false;
  for (int m = 0; all && m < meeting.size && !meeting.over; m++) {
    if (meeting.arrived[m]) continue;
    auto part = *meeting.parts[m];
    if (!advance(part.device, part.stream, part.at)) all = false;
    else meeting.arrived[m] = true;
  }
  if (all && !meeting.over) { happen(meeting); meeting.over = true; }
  return meeting.over;
}

// Run a stream's tasks before number `upto`, and of other streams what those wait for; false if that needs a host.
bool advance(int device, int64_t id, int64_t upto) {
  auto& stream = stream_at(device, id);
  if (stream.done >= upto) return true;
  if (stream.advancing) return false;  // it waits for itself, through others
  stream.advancing = true;
  bool goes_on = true;
  while (goes_on && stream.done < upto) {
    auto& task = stream.tasks.front();
    if (task.after) goes_on = advance(task.after->device, task.after->stream, task.after->at);
    else if (task.meeting) {
      auto meeting = task.meeting;
      int member = 0;
      while (!meeting->parts[member] || meeting->parts[member]->device != device ||
             meeting->parts[member]->stream != id || meeting->parts[member]->at != stream.done) member++;
      goes_on = arrive(*meeting, member);
    } else if (failure.empty()) {
      Kernels kernels;
      try { task.run(); }
      catch (const c10::Error& error) { failure = task.name + ": " + error.what_without_backtrace(); }
      catch (const std::exception& error) { failure = task.name + ": " + error.what(); }
    }
    if (goes_on) { stream.tasks.pop_front(); stream.done++; }
  }
  stream.advancing = false;
  return goes_on;
}

bool is_eager(int64_t id) {
  return (policy == EAGER_SIDE && id != 0) || (policy == EAGER_COMPUTE && id == 0);
}

int64_t launch(int device, int64_t id, Task task) {
  std::lock_guard guard(lock);
  check_failure();
  auto& stream = stream_at(device, id);
  bool meets = task.meeting != nullptr;
  if (looks_for_races) check_uses(device, id, task.uses);
  stream.tasks.push_back(std::move(task));
  int64_t at = stream.queued++;
  if (meets) {  // another rank's stream may go on now
    generation++;
    for (int d = 0; d < DEVICES; d++)
      for (auto& [other, s] : devices[d].streams) if (is_eager(other)) advance(d, other, s.queued);
  } else if (is_eager(id)) {
    advance(device, id, stream.queued);
  }
  if (policy == RANDOM) {
    auto& streams = devices[device].streams;
    for (unsigned n = dice[device]() % 3; n > 0; n--) {
      auto it = std::next(streams.begin(), dice[device]() % streams.size());
      advance(device, it->first, std::min(it->second.queued, it->second.done + 1 + int64_t(dice[device]() % 4)));
    }
  }
  return at;
}

// -- hosts ------------------------------------------------------------------------------------------------------------

struct Host { bool is_running = false; int64_t blocked_at = -1; std::string waits_for; };
Host hosts[DEVICES];
int running = -1;  // whose turn it is; -1 without ranks
std::string deadlock;

std::string describe(int device, int64_t id) {
  auto& stream = stream_at(device, id);
  std::string text = id < 0 ? "collective between hosts" : id == 0 ? "computing stream" : "stream " + std::to_string(id);
  if (stream.tasks.empty()) return text;
  auto& task = stream.tasks.front();
  if (task.after) return text + ", which waits for " + describe(task.after->device, task.after->stream);
  if (!task.meeting) return text;
  text += ", in " + task.meeting->what + " on communicator " + std::to_string(task.meeting->communicator) + ", where";
  for (int m = 0; m < task.meeting->size; m++) {
    auto& part = task.meeting->parts[m];
    text += " member " + std::to_string(m) + (!part ? " was not launched" : task.meeting->arrived[m] ? " is" : " has not come");
    text += m + 1 < task.meeting->size ? "," : "";
  }
  return text;
}

// Called with the lock held by a host that cannot go on, or ends.
void hand_over(int rank) {
  for (int n = 1; n < DEVICES; n++) {
    int next = (rank + n) % DEVICES;
    if (hosts[next].is_running && hosts[next].blocked_at != generation) { running = next; handed_over.notify_all(); return; }
  }
  if (hosts[rank].is_running && hosts[rank].blocked_at != generation) { running = rank; return; }
  for (int r = 0; r < DEVICES; r++)
    if (hosts[r].is_running) deadlock += "\n  rank " + std::to_string(r) + " waits for its " + hosts[r].waits_for;
  running = -1;
  handed_over.notify_all();
}

void wait_for_turn(std::unique_lock<std::recursive_mutex>& held, int rank) {
  handed_over.wait(held, [&] { return running == rank || !deadlock.empty(); });
  TORCH_CHECK(deadlock.empty(), "deadlock: every rank waits", deadlock);
}

void begin_ranks(int size) {
  std::lock_guard guard(lock);
  for (int rank = 0; rank < size; rank++) hosts[rank] = {true, -1, ""};
  running = 0;
}

void enter(int rank) {
  WithoutGil without;
  std::unique_lock held(lock);
  current_device = rank;
  handed_over.wait(held, [&] { return running == rank || !deadlock.empty(); });
}

void leave(int rank) {
  WithoutGil without;
  std::unique_lock held(lock);
  hosts[rank].is_running = false;
  generation++;
  bool any = false;
  for (auto& host : hosts) any = any || host.is_running;
  if (running != rank) return;
  running = -1;
  if (any) hand_over(rank);
}

// Have the host wait until the tasks of a stream before number `upto` are done, and with them what a clock says.
void block(int device, int64_t id, int64_t upto, const char* reason, const Clock* known = nullptr) {
  if (on_block) on_block(reason);
  WithoutGil without;
  std::unique_lock held(lock);
  if (looks_for_races) devices[device].host.join(known ? *known : clock_of(device, id));
  while (!advance(device, id, upto)) {
    check_failure();
    bool is_rank = hosts[device].is_running && running == device;
    if (!is_rank) {  // a thread beside a rank's: that one goes on
      TORCH_CHECK(running != -1, "deadlock: the host waits for its ", describe(device, id), ", and there is no other rank");
      handed_over.wait_for(held, std::chrono::milliseconds(5));
      continue;
    }
    hosts[device].blocked_at = generation;
    hosts[device].waits_for = describe(device, id);
    hand_over(device);
    wait_for_turn(held, device);
    hosts[device].blocked_at = -1;
  }
  check_failure();
}

void block(int device, int64_t id, const char* reason) {
  int64_t upto;
  { std::lock_guard guard(lock); upto = stream_at(device, id).queued; }
  block(device, id, upto, reason);
}

}  // namespace
