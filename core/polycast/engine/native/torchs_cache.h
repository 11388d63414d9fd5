// Clears torch's cache of casts, but not during a fork: the child would find the cache's mutex held by a thread that it lacks.
//
// Python takes this as a lock before a fork (engine.py). The counts are accessed with the GIL held; a thread's own never stop it.

#pragma once

#include <thread>

#include "autocast.h"
#include "extension.h"

namespace {

class TorchsCache {
 public:
  static void clear() {
    if (C10_UNLIKELY(forks_ != forks_here_)) {
      wait_for_forks();
    }
    ++clears_;
    ++clears_here_;
    {
      // A thread that holds the mutex may wait for the GIL, to free a cast that has a Python object.
      const WithoutGil others_may_run;
      at::autocast::clear_cache();
    }
    --clears_;
    --clears_here_;
  }

  static bool acquire_for_fork(bool blocking) {
    while (clears_ != clears_here_) {
      if (!blocking) {
        return false;
      }
      let_others_run();
    }
    ++forks_;
    ++forks_here_;
    return true;
  }

  static void release_after_fork() {
    --forks_;
    --forks_here_;
  }

  // In a forked child: the other threads do not exist there, so nothing would ever end what they had begun.
  static void forget_other_threads() {
    forks_ = forks_here_;
    clears_ = clears_here_;
  }

 private:
  // Gives up after 50 ms: another library's fork hook may wait for this thread. Then a child may find the mutex held, as without polycast.
  static void wait_for_forks() {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + std::chrono::milliseconds(50);
    while (forks_ != forks_here_ && Clock::now() < end) {
      let_others_run();
    }
  }

  static void let_others_run() {
    const WithoutGil others_may_run;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

  static inline int clears_ = 0, forks_ = 0;
  static inline constinit thread_local int clears_here_ = 0, forks_here_ = 0;
};

}  // namespace
