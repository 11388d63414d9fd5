// Deferred destruction: objects that need the GIL to be freed, queued by threads that must not wait for it.

#pragma once

#include "tensors.h"

namespace {

class DeferredDestruction {
 public:
  void add(std::shared_ptr<void> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_.push_back(std::move(object));
  }

  // The GIL must be held. May run Python.
  void run() {
    std::vector<std::shared_ptr<void>> taken;  // destroyed after the lock is released
    std::lock_guard<std::mutex> lock(mutex_);
    taken.swap(objects_);
  }

  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<void>> objects_;
};

}  // namespace
