// Memory that only tasks can reach, its stream-ordered caching allocator, and page-locked memory of the host.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include "streams.h"

namespace {

struct Arena {
  static constexpr size_t NBYTES = size_t(1) << 36, EACH = NBYTES / DEVICES;
  char *device, *host;  // the same pages: without access, and for tasks
  int file;
  Arena() {
    file = memfd_create("simulated device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, NBYTES) == 0, "no memory for the simulated device");
    device = (char*)mmap(nullptr, NBYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    host = (char*)mmap(nullptr, NBYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(device != MAP_FAILED && host != MAP_FAILED, "no memory for the simulated device");
  }
  char* for_tasks(const void* address) const { return host + ((const char*)address - device); }
  bool has(const void* address) const { return address >= device && address < device + NBYTES; }
};
Arena& arena() { static Arena made; return made; }

constexpr size_t MIB = 1 << 20, SMALLEST = 512;

struct Segment;
struct Block {
  size_t offset, nbytes, requested = 0;
  int64_t stream;
  bool is_small, is_used = false;
  Block *before = nullptr, *after = nullptr;
  std::set<int64_t> recorded;     // streams that `record_stream` named
  std::vector<Point> uses;        // where those were when it was freed
};
struct BySize {
  bool operator()(const Block* a, const Block* b) const { return std::tie(a->nbytes, a->offset) < std::tie(b->nbytes, b->offset); }
};

// As CUDA's caching allocator: free blocks belong to the stream that they were allocated on, and are split and joined.
struct Pool {
  int device;
  std::map<std::pair<int64_t, bool>, std::set<Block*, BySize>> free;
  std::map<size_t, Block*> used;      // by offset
  std::vector<Block*> late;           // freed, and still used by other streams
  std::multimap<size_t, size_t> holes;
  size_t end = 0;
  int64_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0, requested = 0, segments = 0, made = 0, calls = 0;

  size_t base() const { return device * Arena::EACH; }

  size_t segment(size_t nbytes) {
    reserved += nbytes; reserved_peak = std::max(reserved_peak, reserved); segments++; made++;
    auto hole = holes.find(nbytes);
    if (hole != holes.end()) { auto at = hole->second; holes.erase(hole); return at; }
    TORCH_CHECK(end + nbytes <= Arena::EACH, "the simulated device is out of memory");
    end += nbytes;
    return base() + end - nbytes;
  }

  Block* take(size_t requested_nbytes, int64_t stream) {
    for (size_t i = 0; i < late.size();) {
      bool over = true;
      for (auto& use : late[i]->uses) over = over && stream_at(use.device, use.stream).done >= use.at;
      if (!over) { i++; continue; }
      auto* block = late[i]; late.erase(late.begin() + i);
      auto begin = uintptr_t(arena().device + block->offset);
      for (auto& use : block->uses) forget_stream(begin, begin + block->nbytes, Clock::key(use.device, use.stream), use.at);
      give(block);
    }
    size_t nbytes = std::max(SMALLEST, (requested_nbytes + SMALLEST - 1) / SMALLEST * SMALLEST);
    bool is_small = nbytes <= MIB;
    auto& fitting = free[{stream, is_small}];
    Block wanted{0, nbytes, 0, stream, is_small};
    auto found = fitting.lower_bound(&wanted);
    Block* block;
    if (found != fitting.end()) { block = *found; fitting.erase(found); }
    else {
      size_t whole = is_small ? 2 * MIB : nbytes < 10 * MIB ? 20 * MIB : (nbytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
      block = new Block{segment(whole), whole, 0, stream, is_small};
    }
    size_t rest = block->nbytes - nbytes;
    if (is_small ? rest >= SMALLEST : rest > MIB) {
      auto* other = new Block{block->offset + nbytes, rest, 0, stream, is_small};
      other->before = block; other->after = block->after;
      if (block->after) block->after->before = other;
      block->after = other; block->nbytes = nbytes;
      fitting.insert(other);
    }
    block->is_used = true; block->requested = requested_nbytes; block->recorded.clear(); block->uses.clear();
    used[block->offset] = block;
    allocated += block->nbytes; allocated_peak = std::max(allocated_peak, allocated); requested += requested_nbytes; calls++;
    return block;
  }

  void free_block(Block* block) {
    used.erase(block->offset);
    allocated -= block->nbytes; requested -= block->requested;
    for (auto id : block->recorded) if (id != block->stream) block->uses.push_back({device, id, stream_at(device, id).queued});
    if (block->uses.empty()) give(block); else late.push_back(block);
  }

  void give(Block* block) {
    block->is_used = false;
    stream_at(device, block->stream).freed.push_back({block->offset, block->nbytes});
    auto& fitting = free[{block->stream, block->is_small}];
    auto join = [&](Block* other) { return other && !other->is_used && fitting.count(other); };
    if (join(block->before)) {
      auto* first = block->before; fitting.erase(first);
      first->nbytes += block->nbytes; first->after = block->after;
      if (block->after) block->after->before = first;
      delete block; block = first;
    }
    if (join(block->after)) {
      auto* last = block->after; fitting.erase(last);
      block->nbytes += last->nbytes; block->after = last->after;
      if (last->after) last->after->before = block;
      delete last;
    }
    fitting.insert(block);
  }

  void release() {  // whole segments, as `empty_cache`
    for (auto& [key, blocks] : free)
      for (auto it = blocks.begin(); it != blocks.end();) {
        auto* block = *it;
        if (block->before || block->after) { ++it; continue; }
        it = blocks.erase(it);
        madvise(arena().host + block->offset, block->nbytes, MADV_REMOVE);
        forget_uses(uintptr_t(arena().device + block->offset), uintptr_t(arena().device + block->offset + block->nbytes));
        holes.insert({block->nbytes, block->offset}); reserved -= block->nbytes; segments--;
        delete block;
      }
  }
};
Pool pools[DEVICES] = {{0}, {1}, {2}, {3}};

struct Allocation { int device; Block* block; };

void deallocate(void* context) {
  auto* allocation = static_cast<Allocation*>(context);
  std::lock_guard guard(lock);
  if (allocation->block) pools[allocation->device].free_block(allocation->block);
  delete allocation;
}

c10::DataPtr allocate(size_t nbytes, int device) {
  Here here("allocation");
  std::lock_guard guard(lock);
  c10::Device place(SIM, device);
  if (nbytes == 0) return {nullptr, new Allocation{device, nullptr}, &deallocate, place};
  int64_t id = current_stream(device);
  auto* block = pools[device].take(nbytes, id);
  // What this stream freed before may be overwritten from here on, in its order: now, not when it was freed.
  auto ranges = std::move(stream_at(device, id).freed);
  stream_at(device, id).freed.clear();
  std::vector<std::pair<size_t, size_t>> poisoned{{block->offset, block->nbytes}};
  for (auto [offset, size] : ranges) {  // without what has been handed out since
    auto it = pools[device].used.upper_bound(offset);
    if (it != pools[device].used.begin()) --it;
    for (; it != pools[device].used.end() && it->first < offset + size; ++it) {
      auto from = it->first, to = from + it->second->nbytes;
      if (to <= offset) continue;
      if (from > offset) poisoned.push_back({offset, from - offset});
      size -= std::min(size, to - offset); offset = to;
      if (!size) break;
    }
    if (size) poisoned.push_back({offset, size});
  }
  Task task{"allocation", [poisoned] { for (auto [offset, size] : poisoned) memset(arena().host + offset, 0xFF, size); }};
  for (auto [offset, size] : poisoned)
    task.uses.push_back({uintptr_t(arena().device + offset), uintptr_t(arena().device + offset + size), true});
  launch(device, id, std::move(task));
  return {arena().device + block->offset, new Allocation{device, block}, &deallocate, place};
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override { return ::allocate(nbytes, current_device); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "a copy past the device's streams"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { std::lock_guard guard(lock); pools[current_device].release(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard guard(lock);
    if (data.get()) static_cast<Allocation*>(data.get_context())->block->recorded.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard guard(lock);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& pool = pools[device];
    auto set = [](auto& stat, int64_t now, int64_t peak, int64_t all) { stat[0].current = now; stat[0].peak = peak; stat[0].allocated = all; };
    set(stats.allocated_bytes, pool.allocated, pool.allocated_peak, 0);
    set(stats.active_bytes, pool.allocated, pool.allocated_peak, 0);
    set(stats.reserved_bytes, pool.reserved, pool.reserved_peak, 0);
    set(stats.requested_bytes, pool.requested, pool.requested, 0);
    set(stats.segment, pool.segments, pool.segments, pool.made);
    set(stats.allocation, int64_t(pool.used.size()), 0, pool.calls);
    stats.num_device_alloc = pool.made;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { pools[device].made = pools[device].calls = 0; }
  void resetPeakStats(c10::DeviceIndex device) override {
    pools[device].allocated_peak = pools[device].allocated; pools[device].reserved_peak = pools[device].reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {Arena::EACH - pools[device].reserved, Arena::EACH};
  }
};
Memory memory;

// Page-locked memory. A block that copies under way still use is not given back before they are over, as in torch.
struct Pinned final : c10::Allocator {
  struct Page { size_t nbytes; int uses = 0; bool is_freed = false; };
  std::map<uintptr_t, Page> pages;
  void drop(uintptr_t at) {
    auto it = pages.find(at);
    if (it->second.is_freed && !it->second.uses) { free((void*)at); pages.erase(it); }
  }
  static void freed(void* at) {
    std::lock_guard guard(lock);
    auto& self = static_cast<Pinned&>(*instance());
    self.pages.at((uintptr_t)at).is_freed = true; self.drop((uintptr_t)at);
  }
  static Pinned* instance() { static Pinned made; return &made; }
  std::map<uintptr_t, Page>::iterator find(const void* address) {
    auto it = pages.upper_bound((uintptr_t)address);
    if (it == pages.begin()) return pages.end();
    --it;
    return (uintptr_t)address < it->first + std::max<size_t>(it->second.nbytes, 1) ? it : pages.end();
  }
  c10::DataPtr allocate(size_t nbytes) override {
    std::lock_guard guard(lock);
    if (!nbytes) return {nullptr, c10::Device(c10::kCPU)};
    void* at = nullptr;
    TORCH_CHECK(posix_memalign(&at, 4096, nbytes) == 0, "out of page-locked memory");
    memset(at, 0xFF, nbytes);
    pages[(uintptr_t)at] = {nbytes};
    forget_uses(uintptr_t(at), uintptr_t(at) + nbytes);
    return {at, at, &freed, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freed; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};

}  // namespace
