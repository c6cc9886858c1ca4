// An accelerator in host memory whose streams run as late, as early or as mixed as a policy lets them.
//
// Every kernel, copy and collective is a task of the stream that was current when it was launched, and is computed by
// the CPU's kernels when that stream advances. Nothing here is a thread: whoever launches or waits makes streams advance.
//
//   Arena      memory that CPU kernels cannot reach: its pages at device addresses have no access rights, and the tasks
//              use a second mapping of them
//   Device     streams, the stream-ordered caching allocator, statistics
//   Clock      what orders what, to look for races in whatever order tasks run
//   Meeting    one collective: it happens when the last of its members has come to it
//   Host       a rank's program. One runs at a time; it hands over when it must wait for another one, so that a run is
//              the same each time, and so that a deadlock is found when it is there and not by a time-out
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "collectives.h"

namespace {

struct Event { Point point; Clock clock; };

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using D = c10::Device;
  using S = c10::Stream;
  static S at(int device, int64_t id) { return S(S::UNSAFE, D(SIM, device), id); }
  c10::DeviceType type() const override { return SIM; }
  D exchangeDevice(D d) const override { auto before = current_device; current_device = index_of(d); return D(SIM, before); }
  D getDevice() const override { return D(SIM, current_device); }
  void setDevice(D d) const override { current_device = index_of(d); }
  void uncheckedSetDevice(D d) const noexcept override { current_device = index_of(d); }
  S getStream(D d) const override { return at(index_of(d), current_stream(index_of(d))); }
  S getDefaultStream(D d) const override { return at(index_of(d), 0); }
  S getStreamFromGlobalPool(D d, bool) const override { return getNewStream(d, 0); }
  S getNewStream(D d, int) const override {
    std::lock_guard guard(lock);
    auto id = ++devices[index_of(d)].last;
    stream_at(index_of(d), id);
    return at(index_of(d), id);
  }
  S exchangeStream(S s) const override {
    auto before = current_stream(s.device_index());
    current_streams[s.device_index()] = s.id();
    return at(s.device_index(), before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void** event, const S& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard guard(lock);
    if (!*event) *event = new Event;
    auto* made = static_cast<Event*>(*event);
    made->point = {s.device_index(), s.id(), stream_at(s.device_index(), s.id()).queued};
    made->clock = looks_for_races ? clock_of(s.device_index(), s.id()) : Clock();
  }
  void block(void* event, const S& s) const override {
    if (!event) return;
    auto point = static_cast<Event*>(event)->point;
    if (point.device == s.device_index() && point.stream == s.id()) return;
    std::lock_guard guard(lock);
    launch(s.device_index(), s.id(), {"wait", nullptr, point});
    stream_at(s.device_index(), s.id()).clock.join(static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto point = static_cast<Event*>(event)->point;
    std::lock_guard guard(lock);
    auto& stream = stream_at(point.device, point.stream);
    bool over = stream.done >= point.at;
    if (!over) advance(point.device, point.stream, stream.done + 1);  // who asks again and again is answered in the end
    else devices[point.device].host.join(static_cast<Event*>(event)->clock);
    return over;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const S& s) const override {
    std::lock_guard guard(lock);
    auto& stream = stream_at(s.device_index(), s.id());
    bool over = stream.done >= stream.queued;
    if (over && looks_for_races) devices[s.device_index()].host.join(clock_of(s.device_index(), s.id()));
    return over;
  }
  void synchronizeStream(const S& s) const override { ::block(s.device_index(), s.id(), "stream.synchronize"); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto point = static_cast<Event*>(event)->point;
    ::block(point.device, point.stream, point.at, "event.synchronize", &static_cast<Event*>(event)->clock);
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    int device = d < 0 ? current_device : d;
    std::vector<std::pair<int64_t, int64_t>> ends;
    { std::lock_guard guard(lock); for (auto& [id, s] : devices[device].streams) ends.push_back({id, s.queued}); }
    const char* reason = "device.synchronize";
    for (auto [id, end] : ends)
      if (stream_at(device, id).done < end || reason) { ::block(device, id, end, reason ? reason : ""); reason = nullptr; }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const S& s) const override { memory.recordStream(data, s); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current_device = d; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { auto before = current_device; current_device = d; return before; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return Pinned::instance(); }
  bool isPinnedPtr(const void* p) const override {
    std::lock_guard guard(lock);
    return Pinned::instance()->find(p) != Pinned::instance()->pages.end();
  }
  at::Device getDeviceFromPtr(void* p) const override { return at::Device(SIM, ((char*)p - arena().device) / Arena::EACH); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    // As on CUDA: another block, and what was there is copied in the order of the current stream.
    int device = storage.device().index();
    Here here("resize");
    auto fresh = allocate(nbytes, device);
    auto kept = std::min(nbytes, storage.nbytes());
    if (kept) {
      auto *to = arena().for_tasks(fresh.get()), *from = arena().for_tasks(storage.data());
      auto read = uintptr_t(storage.data()), written = uintptr_t(fresh.get());
      std::vector<Use> uses{{read, read + kept, false}, {written, written + kept, true}};
      launch(device, current_stream(device), {"resize", [=] { memcpy(to, from, kept); }, std::nullopt, nullptr, uses});
    }
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};

Tensor empty_memory_format(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(SIM, device ? index_of(*device) : current_device));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(SIM, device ? index_of(*device) : current_device));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride); else impl->set_sizes_contiguous(size);
  return self;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("as_strided", [](const Tensor& x, IntArrayRef z, IntArrayRef s, std::optional<int64_t> o) { return at::native::as_strided_tensorimpl(x, z, s, o); });
  m.impl("view", [](const Tensor& x, IntArrayRef z) { return at::native::view(x, z); });
  m.impl("_reshape_alias", [](const Tensor& x, IntArrayRef z, IntArrayRef s) { return at::native::_reshape_alias(x, z, s); });
  m.impl("unfold", [](const Tensor& x, int64_t d, int64_t z, int64_t s) { return at::native::unfold(x, d, z, s); });
  m.impl("resize_", [](const Tensor& x, IntArrayRef z, std::optional<at::MemoryFormat> f) -> const Tensor& { return at::native::resize_(x, z, f); });
  m.impl("set_.source_Tensor", [](Tensor& x, const Tensor& y) -> Tensor& { return at::native::set_tensor_(x, y); });
  m.impl("set_.source_Storage", [](Tensor& x, at::Storage s) -> Tensor& { return at::native::set_(x, std::move(s)); });
  m.impl("set_.source_Storage_storage_offset", set_storage);
  for (auto name : {"native_layer_norm", "native_group_norm", "mish_backward", "addr", "mse_loss"})  // not what CUDA makes them of, but
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());                // the CPU's own kernels
  m.impl("record_stream", [](Tensor& x, at::Stream s) { memory.recordStream(x.storage().data_ptr(), s); });
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // products, as everywhere
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}
TORCH_LIBRARY(simulated, m) {
  m.def("meet(int communicator, int member, int size, str what, Tensor[] outputs, Tensor[] inputs, int reduce, int root) -> int", meet);
  m.def("wait_on_host(int communicator, int upto) -> ()", wait_on_host);
}

}  // namespace

// -- what Python calls ------------------------------------------------------------------------------------------------

extern "C" {
void simulated_start(int count) {
  device_count = count;
  arena();
  c10::SetAllocator(SIM, &memory, 0);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  static Guard guard;
  static c10::impl::DeviceGuardImplRegistrar registrar(SIM, &guard);
}
void simulated_on_block(void (*callback)(const char*)) { on_block = callback; }
void simulated_begin_ranks(int size) { begin_ranks(size); }
void simulated_enter(int rank) { enter(rank); }
void simulated_leave(int rank) { leave(rank); }
// Begin anew: what is queued is dropped, what has failed is forgotten.
void simulated_reset(int order, int seed) {
  std::lock_guard guard(lock);
  policy = Policy(order);
  failure.clear(); deadlock.clear(); meetings.clear(); entered.clear(); last_uses.clear();
  running = -1;
  for (int d = 0; d < DEVICES; d++) {
    dice[d].seed(seed * DEVICES + d);
    hosts[d] = {};
    devices[d].seed = devices[d].drawn = 0;
    for (auto& [id, stream] : devices[d].streams) {
      stream.tasks.clear(); stream.done = stream.queued; stream.advancing = false;
    }
  }
}
// From here on look for races; without a callback, do not.
void simulated_look_for_races(int64_t (*callback)(const char*)) {
  std::lock_guard guard(lock);
  on_access = callback; looks_for_races = callback != nullptr;
  races.clear(); last_uses.clear();
  for (auto& device : devices) {
    device.host = {};
    for (auto& [id, stream] : device.streams) stream.clock = {};
  }
}
int64_t simulated_races() { return int64_t(races.size()); }
// One of them: device, bytes, and of either access where, in which stream (0 computes), whether it writes.
void simulated_race(int64_t number, int64_t* into) {
  std::lock_guard guard(lock);
  auto& race = races.at(number);
  *into++ = race.device; *into++ = int64_t(race.nbytes);
  for (auto& access : {race.first, race.second}) {
    *into++ = access.where; *into++ = access.stream - Clock::key(race.device, 0); *into++ = access.writes;
  }
}
void simulated_seed(int device, int64_t seed) { devices[device].seed = seed; devices[device].drawn = 0; }
int64_t simulated_drawn(int device) { return devices[device].drawn; }
int64_t simulated_seed_of(int device) { return devices[device].seed; }
void simulated_set_drawn(int device, int64_t seed, int64_t drawn) { devices[device].seed = seed; devices[device].drawn = drawn; }
int64_t simulated_pending(int device) {
  std::lock_guard guard(lock);
  int64_t count = 0;
  for (auto& [id, stream] : devices[device].streams) count += stream.queued - stream.done;
  return count;
}
const char* simulated_failure() { return failure.c_str(); }
}
