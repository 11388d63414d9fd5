// The times of single ops and casts, for a trace.
//
// Locks: a mutex, which is held for no longer than an event is added or all are copied.

#pragma once

#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "counts.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  const OpInfo* op;  // that ran, or that needed the cast
  Clock::time_point begin, end;
  uint64_t thread = 0;
  int module = kNoModule;
  bool backward = false, is_cast = false;
  ScalarType source = ScalarType::Undefined, dtype = ScalarType::Undefined;  // of a cast; an op has what it computed in as `dtype`
  bool of_weight = false, is_hit = false;                                    // of a cast: whether it was found in a cache
  uint64_t bytes = 0;
};

// The number that the system and torch.profiler know this thread by.
uint64_t system_thread() {
#ifdef __linux__
  static thread_local const uint64_t thread = static_cast<uint64_t>(syscall(SYS_gettid));
  return thread;
#else
  return at::RecordFunction::currentThreadId();
#endif
}

// The first events of a recorder, up to a number.
class Events {
 public:
  void keep(size_t most) { most_ = most; }  // before the recorder starts
  bool are_kept() const { return most_ > 0; }

  void add(const Event& event) {
    std::lock_guard<std::mutex> lock(mutex);
    if (events_.size() < most_) {
      events_.push_back(event);
    } else {
      ++dropped_;
    }
  }

  std::pair<std::vector<Event>, uint64_t> copy() {
    std::lock_guard<std::mutex> lock(mutex);
    return {events_, dropped_};
  }

  // Nanoseconds since 1970 of a time. The system's clock may be set later, so it is read once.
  int64_t since_1970(Clock::time_point time) const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(system_start_.time_since_epoch() + (time - start_)).count();
  }

  std::mutex mutex;

 private:
  const Clock::time_point start_ = Clock::now();
  const std::chrono::system_clock::time_point system_start_ = std::chrono::system_clock::now();
  size_t most_ = 0;
  std::vector<Event> events_;
  uint64_t dropped_ = 0;
};

}  // namespace
