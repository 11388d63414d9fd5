// Mutexes that are held during a fork: acquired before it, in the order in which they nest, and released after it in both
// processes.

#pragma once

#ifndef _WIN32
#include <pthread.h>
#endif

#include "tensors.h"

namespace {

class AtForkLock {
 public:
  // Call `acquire_all`, which takes the mutexes, before each fork.
  static void install(void (*acquire_all)()) {
#ifndef _WIN32
    static std::once_flag once;
    std::call_once(once, [acquire_all] { pthread_atfork(acquire_all, &release, &release); });
#endif
  }

  static void acquire(std::mutex& mutex) {
    mutex.lock();
    held().push_back(&mutex);
  }

 private:
  static void release() {
    while (!held().empty()) {
      std::mutex* const last = held().back();
      held().pop_back();  // before unlocking: the last one to be unlocked guards this list
      last->unlock();
    }
  }

  static std::vector<std::mutex*>& held() { return only<std::vector<std::mutex*>>(); }
};

}  // namespace
