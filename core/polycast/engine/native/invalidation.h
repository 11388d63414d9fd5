// Invalidation: the log of writes that change no version, and the storages that collectives may still write.
//
// A thread's own casts compare the log's length at each lookup and read the log only when it has grown. User stores are
// notified at once. Locks: one mutex each; nothing is called while it is held.

#pragma once

#include "tensors.h"

namespace {

using Storages = ska::flat_hash_set<const StorageImpl*>;

// The storages that were written, by address.
class InvalidationLog {
 public:
  uint64_t length() const { return length_.load(std::memory_order_acquire); }

  void add(const Storages& written) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t length = length_.load(std::memory_order_relaxed);
    for (const StorageImpl* storage : written) {
      ring_[length++ % ring_.size()] = storage;
    }
    length_.store(length, std::memory_order_release);
  }

  // As if every storage had been written.
  void add_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    complete_from_ = length_.load(std::memory_order_relaxed) + 1;
    length_.store(complete_from_, std::memory_order_release);
  }

  // Return the storages that were written from a position on, or nothing if all may have been; and the length.
  std::pair<std::optional<Storages>, uint64_t> since(uint64_t position) {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t length = length_.load(std::memory_order_relaxed);
    if (position < complete_from_ || length - position > ring_.size()) {
      return {std::nullopt, length};
    }
    Storages written;
    for (; position < length; ++position) {
      written.insert(ring_[position % ring_.size()]);
    }
    return {std::move(written), length};
  }

  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;
  std::atomic<uint64_t> length_{0};
  uint64_t complete_from_ = 0;
  std::array<const StorageImpl*, 4096> ring_{};
};

// The storages that a collective may write until its Work is gone.
class PendingCollectives {
 public:
  using Work = c10::weak_intrusive_ptr<torch::CustomClassHolder>;

  void add(Work work, Storages written) {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.emplace_back(std::move(work), std::move(written));
    any_.store(true, std::memory_order_release);
  }

  bool may_write(const StorageImpl* storage) {
    if (!any_.load(std::memory_order_acquire)) {
      return false;
    }
    drop_finished();
    std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(pending_.begin(), pending_.end(), [&](const auto& one) { return one.second.count(storage) != 0; });
  }

  // Drop the references to Works that have ended: each keeps its tensors as long as it is referred to, even weakly. May run
  // Python.
  void drop_finished() {
    if (!any_.load(std::memory_order_acquire)) {
      return;
    }
    Pending ended;  // destroyed after the lock is released
    std::lock_guard<std::mutex> lock(mutex_);
    const auto first_ended =
        std::partition(pending_.begin(), pending_.end(), [](const auto& one) { return !one.first.expired(); });
    ended.assign(std::make_move_iterator(first_ended), std::make_move_iterator(pending_.end()));
    pending_.erase(first_ended, pending_.end());
    any_.store(!pending_.empty(), std::memory_order_release);
  }

  std::mutex& mutex() { return mutex_; }

 private:
  using Pending = std::vector<std::pair<Work, Storages>>;

  std::mutex mutex_;
  std::atomic<bool> any_{false};
  Pending pending_;
};

// The storages that were written while a device's graph was captured, which each replay writes again.
class CapturedWrites {
  using Written = ska::flat_hash_map<const StorageImpl*, c10::weak_intrusive_ptr<StorageImpl>>;

 public:
  ~CapturedWrites() { end(); }

  void begin() {
    std::lock_guard<std::mutex> lock(only<All>().mutex);
    only<All>().captures.push_back(this);
    any_.store(true, std::memory_order_release);
  }

  void end() {
    Written alive, dead;  // destroyed after the lock is released: a storage may have an object in Python
    std::lock_guard<std::mutex> lock(only<All>().mutex);
    std::erase(only<All>().captures, this);
    any_.store(!only<All>().captures.empty(), std::memory_order_release);
    for (auto& [storage, reference] : storages_) {
      (reference.expired() ? dead : alive).emplace(storage, std::move(reference));
    }
    storages_.swap(alive);
  }

  static bool are_noted() { return any_.load(std::memory_order_acquire); }

  // Note storages that are alive, for all graphs that are being captured, on whichever thread.
  static void note(const Storages& written) {
    if (!are_noted()) {
      return;
    }
    std::lock_guard<std::mutex> lock(only<All>().mutex);
    for (CapturedWrites* const capture : only<All>().captures) {
      for (const StorageImpl* const storage : written) {
        capture->storages_.emplace(storage, weak_reference(storage));
      }
    }
  }

  // Return those of which something may be cached.
  Storages cached_storages() {
    std::lock_guard<std::mutex> lock(only<All>().mutex);
    Storages alive;
    for (const auto& [storage, reference] : storages_) {
      if (!reference.expired() && count_weak_references(storage) > 2) {  // this one, and one of something that is cached
        alive.insert(storage);
      }
    }
    return alive;
  }

  static std::mutex& mutex() { return only<All>().mutex; }

 private:
  struct All {
    std::mutex mutex;
    std::vector<CapturedWrites*> captures;
  };

  static inline std::atomic<bool> any_{false};

  Written storages_;
};

// Defined in user_store.h.
void invalidate_user_stores(const Storages& written);

// Drop what is cached of weights in storages that were written.
void invalidate(const Storages& written) {
  if (!written.empty()) {
    only<InvalidationLog>().add(written);
    invalidate_user_stores(written);
  }
}

// While one lives, its thread only reads a weight, as to prepack it: aliases of this weight's memory drop no caches. The reader
// runs Python, so it may expose and write other weights.
class ReadGuard {
 public:
  explicit ReadGuard(const Tensor& weight)
      : outer_(std::exchange(innermost_, this)), storage_(weight.has_storage() ? storage_of(weight) : nullptr) {}
  ReadGuard(const ReadGuard&) = delete;
  ~ReadGuard() { innermost_ = outer_; }

  static bool covers(const StorageImpl* storage) {
    const ReadGuard* guard = innermost_;
    while (guard != nullptr && guard->storage_ != storage) {
      guard = guard->outer_;
    }
    return guard != nullptr;
  }

 private:
  static inline thread_local const ReadGuard* innermost_ = nullptr;

  const ReadGuard* const outer_;
  const StorageImpl* const storage_;
};

// Return whether something may be cached of a storage: a VersionStamp has a weak reference to it.
bool may_be_cached(const StorageImpl* storage) { return count_weak_references(storage) > 1; }

// Note for captured graphs that tensors were written, and drop what is cached of their memory.
void note_written(at::ArrayRef<Tensor> tensors) {
  Storages written;
  for (const Tensor& tensor : tensors) {
    if (C10_UNLIKELY(CapturedWrites::are_noted())) {
      CapturedWrites::note({storage_of(tensor)});
    }
    if (may_be_cached(storage_of(tensor))) {
      written.insert(storage_of(tensor));
    }
  }
  invalidate(written);
}

// The same for a tensor that was just exposed to code which may write it.
void invalidate_alias(const Tensor& tensor) {
  if (tensor.defined() && tensor.has_storage() && !ReadGuard::covers(storage_of(tensor))) {
    note_written(tensor);
  }
}

}  // namespace
