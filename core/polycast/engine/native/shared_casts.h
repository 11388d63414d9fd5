// A region's cached cast, and the process-wide index that lets threads which run the same model share their casts.
//
// The index holds casts weakly. Its mutex is taken where a cast is made that will be cached, never at a hit; nothing is called
// while it is held.

#pragma once

#include "admission.h"
#include "weights.h"

namespace {

struct CachedCast {
  VersionStamp stamp;
  RegionAdmission admission;
  Tensor cast;                        // without history, or undefined
  Tensor with_history;                // the same memory with history, or undefined
  std::optional<c10::Stream> stream;  // on which it was made; others do not use it

  CachedCast(const Tensor& weight, bool for_view)
      : stamp(weight), admission(weight, stamp, for_view), stream(current_stream(weight)) {}

  bool matches(const Tensor& weight) const {
    return stamp.matches(weight) && stream == current_stream(weight) && is_unwritten(cast.defined() ? cast : with_history);
  }
};

class SharedCasts {
 public:
  Tensor find(const Key& key, const Tensor& weight) {
    Tensor cast;  // destroyed after the lock is released: this may become the last reference
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = casts_.find(key);
    if (found != casts_.end() && found->second->stamp.matches(weight) && found->second->stream == current_stream(weight) &&
        found->second->position == only<InvalidationLog>().length()) {
      if (Tensor alive(found->second->cast.lock()); alive.defined() && is_unwritten(alive)) {
        cast = std::move(alive);
      }
    }
    return cast;
  }

  void add(const Key& key, const CachedCast& cached, uint64_t position) {
    Casts dead;  // destroyed after the lock is released
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
    slot = std::make_unique<Shared>(Shared{cached.stamp, Weak(cached.cast.getIntrusivePtr()), cached.stream, position});
  }

  // Drop the entries of casts that no thread holds. Their weights have no weak references then, so that they can be swapped.
  void drop_dead(const std::vector<Key>& keys) {
    Casts dead;  // destroyed after the lock is released
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
    VersionStamp stamp;
    Weak cast;
    std::optional<c10::Stream> stream;
    uint64_t position;  // in the invalidation log
  };
  using Casts = ska::flat_hash_map<Key, std::unique_ptr<Shared>, KeyHash>;

  std::mutex mutex_;
  Casts casts_;
  size_t sweep_at_ = 64;
};

// The number of threads that have entered regions.
std::atomic<int> threads_with_regions{0};

}  // namespace
