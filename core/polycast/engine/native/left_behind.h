// What waits for the next holder of the GIL.
//
// Owns what was left. Locks: one mutex, never held while something is freed.

#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace {

// What is to be freed by somebody who holds the GIL, left by those who must not wait for it. Lives as long as the process.
class LeftBehind {
 public:
  static LeftBehind& things() {
    static auto* const only = new LeftBehind();
    return *only;
  }

  void leave(std::shared_ptr<void> thing) {
    std::lock_guard<std::mutex> lock(mutex_);
    things_.push_back(std::move(thing));
  }

  // Called with the GIL held.
  void free() {
    std::vector<std::shared_ptr<void>> found;
    std::lock_guard<std::mutex> lock(mutex_);
    found.swap(things_);
  }  // the lock goes before what was found

  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<void>> things_;
};

}  // namespace
