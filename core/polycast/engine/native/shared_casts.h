// What the casts of regions have in common over all threads: an index of those that are kept, held weakly, so that threads
// which run the same model share them; and the count of the bytes in recent casts.
//
// Owns neither casts nor weights.
//
// Locks. The index's mutex, which is taken where a cast is made that will be kept, never at a hit, and with nothing called.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "weights.h"
#include "writes.h"

namespace {  // all is one unit, binding.cpp

struct CachedCast {
  explicit CachedCast(const Tensor& weight) : of(weight), stream(current_stream(weight)) {}

  const Content of;
  Tensor cast;                        // without history; or undefined
  Tensor linked;                      // the same memory with history; or undefined
  std::optional<c10::Stream> stream;  // that it was made on: nobody says when another may use it
  bool sees_all_writes = false;       // see may_serve()

  // Whether the cast may serve a weight that is as it was, or a view of it. torch's own regions keep no cast of a weight that requires
  // no grad, and none of a view, so all writes are to be seen: nobody else had the memory then, nor has it now. (Aliases are told of
  // as they are made, save by C++.) Of others they keep what they have, whatever is written.
  bool may_serve(const Tensor& weight, bool for_view) const {
    return (sees_all_writes && count_holders(weight) == (for_view ? 2 : 1)) || (weight.requires_grad() && !for_view);
  }

  bool is_that_of(const Tensor& weight) const {
    return of.is_that_of(weight) && stream == current_stream(weight) && is_unwritten(cast.defined() ? cast : linked);
  }
};

// The casts that threads keep for their regions, held weakly.
class SharedCasts {
 public:
  static SharedCasts& index() {
    static auto* const only = new SharedCasts();
    return *only;
  }

  Tensor find(const Key& key, const Tensor& weight) {
    Tensor cast;  // before the lock: this may come to be the last that holds it
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = casts_.find(key);
    if (found != casts_.end() && found->second->of.is_that_of(weight) && found->second->stream == current_stream(weight) &&
        found->second->seen == Writes::log().count()) {
      if (Tensor alive(found->second->cast.lock()); alive.defined() && is_unwritten(alive)) {
        cast = std::move(alive);
      }
    }
    return cast;
  }

  void add(const Key& key, const CachedCast& kept, uint64_t seen) {
    Casts dead;  // before the lock
    std::lock_guard<std::mutex> lock(mutex_);
    if (casts_.size() >= sweep_at_) {
      for (auto it = casts_.begin(); it != casts_.end();) {
        if (it->second->cast.expired()) {
          dead.emplace(it->first, std::move(it->second));
          it = casts_.erase(it);
        } else {
          ++it;
        }
      }
      sweep_at_ = std::max<size_t>(64, 2 * casts_.size());
    }
    auto& slot = casts_[key];
    if (slot != nullptr) {
      dead.emplace(key, std::move(slot));
    }
    slot = std::make_unique<Shared>(Shared{kept.of, Weak(kept.cast.getIntrusivePtr()), kept.stream, seen});
  }

  // Forget those of these casts that no thread keeps any more. Their weights are referred to no longer, so that they can be swapped.
  void forget_dead(const std::vector<Key>& keys) {
    Casts dead;  // before the lock
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Key& key : keys) {
      const auto found = casts_.find(key);
      if (found != casts_.end() && found->second->cast.expired()) {
        dead.emplace(key, std::move(found->second));
        casts_.erase(found);
      }
    }
  }

  std::mutex& mutex() { return mutex_; }

 private:
  using Weak = c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl>;
  struct Shared {
    Content of;
    Weak cast;
    std::optional<c10::Stream> stream;
    uint64_t seen;  // how many writes there were
  };
  using Casts = ska::flat_hash_map<Key, std::unique_ptr<Shared>, KeyHash>;

  std::mutex mutex_;
  Casts casts_;
  size_t sweep_at_ = 64;
};

// The bytes in recent casts, of all threads together: at most twice the largest cast.
class RecentBytes {
 public:
  static bool take(size_t bytes) {
    size_t largest = largest_.load(std::memory_order_relaxed);
    while (bytes > largest && !largest_.compare_exchange_weak(largest, bytes, std::memory_order_relaxed)) {
    }
    largest = std::max(largest, bytes);
    size_t taken = taken_.load(std::memory_order_relaxed);
    do {
      if (taken + bytes > 2 * largest + kOfSmallOnes) {
        return false;
      }
    } while (!taken_.compare_exchange_weak(taken, taken + bytes, std::memory_order_relaxed));
    return true;
  }

  static void give_back(size_t bytes) { taken_.fetch_sub(bytes, std::memory_order_relaxed); }

  static constexpr size_t kOfSmallOnes = 1 << 20;

 private:
  static inline std::atomic<size_t> taken_{0}, largest_{0};
};

// How many threads have entered regions so far.
std::atomic<int> threads_with_regions{0};

}  // namespace
