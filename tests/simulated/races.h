// What orders what: a clock for each stream, and for each byte who has used it last. Found when a task is launched, so it
// does not matter in which order tasks then run.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace {

// For each stream: how many of its tasks are over before something else begins.
struct Clock {
  std::map<int64_t, int64_t> over;
  static int64_t key(int device, int64_t stream) { return (int64_t(device) << 32) + (int64_t(1) << 31) + stream; }
  void join(const Clock& other) { for (auto [id, count] : other.over) raise(id, count); }
  void raise(int64_t id, int64_t count) { auto& mine = over[id]; mine = std::max(mine, count); }
};

struct Use { uintptr_t begin, end; bool writes; };  // of memory, by a task
struct Access { int64_t stream = 0, at = -1, where = 0; bool writes = false; };
struct Race { int device; size_t nbytes; Access first, second; };

bool looks_for_races = false;
int64_t (*on_access)(const char*) = nullptr;  // numbers that place from 1; not to be called with the lock held
std::vector<Race> races;

// The place in the program that launches, for all that is launched while this lives.
thread_local int64_t place_now = 0;
struct Here {
  bool is_outermost = looks_for_races && !place_now;
  explicit Here(const char* what) { if (is_outermost) place_now = on_access(what); }
  ~Here() { if (is_outermost) place_now = 0; }
};

struct Bytes { uintptr_t end; Access written; std::vector<Access> read; };
std::map<uintptr_t, Bytes> last_uses;  // by where they begin; they do not overlap

void split_at(uintptr_t at) {
  auto it = last_uses.upper_bound(at);
  if (it == last_uses.begin()) return;
  --it;
  if (it->first >= at || it->second.end <= at) return;
  auto rest = it->second;
  it->second.end = at;
  last_uses[at] = rest;
}

void forget_uses(uintptr_t begin, uintptr_t end) {
  split_at(begin); split_at(end);
  last_uses.erase(last_uses.lower_bound(begin), last_uses.lower_bound(end));
}

// What a stream did up to `at` is over for whoever is given this memory, as `record_stream` has asked.
void forget_stream(uintptr_t begin, uintptr_t end, int64_t stream, int64_t at) {
  auto is_its = [&](const Access& access) { return access.stream == stream && access.at < at; };
  split_at(begin); split_at(end);
  for (auto it = last_uses.lower_bound(begin); it != last_uses.end() && it->first < end; ++it) {
    if (is_its(it->second.written)) it->second.written = {};
    std::erase_if(it->second.read, is_its);
  }
}

// `now` uses memory; `before` says what is over by then.
void check_use(int device, const Clock& before, const Use& use, Access now) {
  if (use.begin >= use.end) return;
  now.writes = use.writes;
  split_at(use.begin); split_at(use.end);
  auto is_over = [&](const Access& access) {
    if (access.at < 0 || access.stream == now.stream) return true;
    auto found = before.over.find(access.stream);
    return found != before.over.end() && found->second > access.at;
  };
  auto compare = [&](const Access& access) {
    if (!is_over(access)) races.push_back({device, size_t(use.end - use.begin), access, now});
  };
  for (auto at = use.begin; at < use.end;) {
    auto it = last_uses.lower_bound(at);
    if (it == last_uses.end() || it->first > at) {  // not used yet
      auto end = it == last_uses.end() ? use.end : std::min(use.end, it->first);
      it = last_uses.insert({at, {end, {}, {}}}).first;
    }
    auto& bytes = it->second;
    compare(bytes.written);
    if (use.writes) {
      for (auto& access : bytes.read) compare(access);
      bytes.written = now; bytes.read.clear();
    } else {
      std::erase_if(bytes.read, [&](const Access& access) { return access.stream == now.stream; });
      bytes.read.push_back(now);
    }
    at = bytes.end;
  }
}

}  // namespace
