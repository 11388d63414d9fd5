// Locks over a fork: they are taken before it, in the order in which they nest, and given back after it, on both sides.
//
// Owns the list of those that are held. Locks: those that it is given.

#pragma once

#ifndef _WIN32
#include <pthread.h>
#endif

#include <mutex>
#include <vector>

namespace {

class AtForkLock {
 public:
  // Have a function called before each fork, which takes what is to be held.
  static void have(void (*take_all)()) {
#ifndef _WIN32
    static std::once_flag once;
    std::call_once(once, [take_all] { pthread_atfork(take_all, &give_back, &give_back); });
#endif
  }

  static void take(std::mutex& mutex) {
    mutex.lock();
    held().push_back(&mutex);
  }

 private:
  static void give_back() {
    while (!held().empty()) {
      std::mutex* const last = held().back();
      held().pop_back();  // before the last one is given back, for it guards this list
      last->unlock();
    }
  }

  static std::vector<std::mutex*>& held() {
    static auto* const only = new std::vector<std::mutex*>();
    return *only;
  }
};

}  // namespace
