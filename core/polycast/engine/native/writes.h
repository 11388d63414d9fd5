// Writes that count no version: seeing them, and telling the stores.
//
// Owns a log of the storages that were written, by address, and the storages that collectives may still write. Both live as
// long as the process.
//
// Locks. One mutex for each; nothing is called with it held. How many writes there were is atomic: a thread's own casts
// compare it at each look-up, and read the log only where it has grown.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "weights.h"

namespace {

using Storages = ska::flat_hash_set<const StorageImpl*>;

class Writes {
 public:
  static Writes& log() {
    static auto* const only = new Writes();
    return *only;
  }

  uint64_t count() const { return count_.load(std::memory_order_acquire); }

  void add(const Storages& written) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t count = count_.load(std::memory_order_relaxed);
    for (const StorageImpl* storage : written) {
      ring_[count++ % ring_.size()] = storage;
    }
    count_.store(count, std::memory_order_release);
  }

  // As if every storage had been written.
  void add_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    known_from_ = count_.load(std::memory_order_relaxed) + 1;
    count_.store(known_from_, std::memory_order_release);
  }

  // What was written after the first `seen` writes, and how many there are now; nothing where that is not known any more.
  std::pair<std::optional<Storages>, uint64_t> since(uint64_t seen) {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t count = count_.load(std::memory_order_relaxed);
    if (seen < known_from_ || count - seen > ring_.size()) {
      return {std::nullopt, count};
    }
    Storages written;
    for (; seen < count; ++seen) {
      written.insert(ring_[seen % ring_.size()]);
    }
    return {std::move(written), count};
  }

  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;
  std::atomic<uint64_t> count_{0};
  uint64_t known_from_ = 0;
  std::array<const StorageImpl*, 4096> ring_{};
};

// The storages that a collective may write until its Work is gone.
class InFlight {
 public:
  using Work = c10::weak_intrusive_ptr<torch::CustomClassHolder>;

  static InFlight& storages() {
    static auto* const only = new InFlight();
    return *only;
  }

  void add(Work work, Storages written) {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.emplace_back(std::move(work), std::move(written));
    any_.store(true, std::memory_order_release);
  }

  bool has(const StorageImpl* storage) {
    if (!any_.load(std::memory_order_acquire)) {
      return false;
    }
    forget_ended();
    std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(pending_.begin(), pending_.end(), [&](const auto& one) { return one.second.count(storage) != 0; });
  }

  // A Work that has ended keeps its tensors for as long as it is referred to, weakly too. Freeing it may run Python.
  void forget_ended() {
    if (!any_.load(std::memory_order_acquire)) {
      return;
    }
    Pending ended;  // before the lock, so that it is destroyed after it is let go
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

// Set by bind(); it lives as long as the process.
PyObject* storages_are_rewritten = nullptr;

// Whether a weight's memory may be written at times that nobody tells: by other processes, by a collective, or by FSDP, which
// gathers weights into memory that it holds and writes without a version (see storages_are_rewritten in engine/weights.py).
// Python may run.
bool is_written_by_others(const Tensor& weight, const Content& before) {
  if (memory_of(weight) == Memory::kShared || InFlight::storages().has(storage_of(weight))) {
    return true;
  }
  if (before.holders() == Holders::kNone) {
    return false;
  }
  const Gil gil;
  return is_true(call(storages_are_rewritten));
}

// Whether a user's store may keep what is made of a weight after `before`.
bool may_be_stored(const Tensor& weight, const Content& before) {
  return before.holders() != Holders::kUnversioned && !is_written_by_others(weight, before);
}

// Whether all writes of a weight are seen, if nobody else comes to hold its memory: now it does alone, or with a view that is used.
bool has_memory_alone(const Tensor& weight, const Content& before, bool with_view) {
  const bool is_alone = with_view ? before.holders() == Holders::kVersioned && count_holders(weight) == 2
                                  : before.holders() == Holders::kNone;
  return is_alone && memory_of(weight) == Memory::kTorchs;
}

// Set by store.h, whose stores are told at once; a thread's own casts look at the log.
void tell_stores(const Storages& written);

void announce(const Storages& written) {
  if (!written.empty()) {
    Writes::log().add(written);
    tell_stores(written);
  }
}

// While one of these lives, its thread reads a weight to pack it: the weight's memory is given to nobody who writes it. That of
// others may be: packing runs Python, and so anything.
class OnlyReads {
 public:
  explicit OnlyReads(const Tensor& weight) : outer_(std::exchange(innermost_, this)), storage_(storage_of(weight)) {}
  OnlyReads(const OnlyReads&) = delete;
  ~OnlyReads() { innermost_ = outer_; }

  static bool in_thread(const StorageImpl* storage) {
    const OnlyReads* reading = innermost_;
    while (reading != nullptr && reading->storage_ != storage) {
      reading = reading->outer_;
    }
    return reading != nullptr;
  }

 private:
  static inline thread_local const OnlyReads* innermost_ = nullptr;

  const OnlyReads* const outer_;
  const StorageImpl* const storage_;
};

// Announce that a tensor's memory may be written by what was given it just now. Nobody keeps anything of it where its storage
// has no weak reference, which a Content has.
void announce_alias(const Tensor& tensor) {
  if (tensor.defined() && tensor.has_storage() && count_weak_references(storage_of(tensor)) > 1 &&
      !OnlyReads::in_thread(storage_of(tensor))) {
    announce({storage_of(tensor)});
  }
}

void collect_storages(const c10::IValue& value, Storages& found) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.has_storage()) {
      found.insert(storage_of(tensor));
    }
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      collect_storages(item, found);
    }
  }
}

// Runs in front of an op that writes, at the key where torch counts versions, and announces what it has written. The schema of
// a collective does not say which arguments those are, and it may write after it has returned.
class Announcing final : public c10::OperatorKernel {
 public:
  explicit Announcing(bool is_collective) : is_collective_(is_collective) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto& arguments = handle.schema().arguments();
    Storages written;
    InFlight::storages().forget_ended();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* const alias = arguments[i].alias_info();
      if (is_collective_ || (alias != nullptr && alias->isWrite())) {
        collect_storages((*stack)[stack->size() - arguments.size() + i], written);
      }
    }
    try {
      handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, DispatchKey::ADInplaceOrView), stack);
    } catch (...) {  // some of it may be written
      announce(written);
      throw;
    }
    if (is_collective_) {
      for (auto result = stack->end() - handle.schema().returns().size(); result != stack->end(); ++result) {
        if (result->isObject()) {
          InFlight::storages().add(InFlight::Work(result->toObject()->getSlot(0).toCapsule()), written);
        }
      }
    }
    announce(written);
  }

 private:
  using DispatchKey = c10::DispatchKey;
  const bool is_collective_;
};

// The announcing kernels, in place until this is gone.
class Announcers {
 public:
  Announcers(const std::vector<std::string>& ops, const std::vector<std::string>& collectives) {
    add(ops, false);
    add(collectives, true);
  }

 private:
  void add(const std::vector<std::string>& names, bool is_collective) {
    for (const std::string& name : names) {
      const auto dot = name.find('.');
      const auto handle = c10::Dispatcher::singleton().findSchema(
          {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
      if (!handle || handle->hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) {
        continue;  // not in this torch; or it counts versions by now
      }
      registered_.push_back(c10::Dispatcher::singleton().registerImpl(
          handle->operator_name(),
          c10::DispatchKey::ADInplaceOrView,
          c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Announcing>(is_collective)),
          std::nullopt,
          nullptr,
          "polycast"));
    }
  }

  std::vector<c10::RegistrationHandleRAII> registered_;
};

}  // namespace
