// The entries of a user store, indexed by weight and by storage.
//
// Locks: none; the store calls it with its mutex held. What is erased is moved to `dying`, which the caller destroys after it
// has released the mutex.

#pragma once

#include "byte_budget.h"
#include "version_stamp.h"

namespace {

using Dying = std::vector<std::shared_ptr<void>>;  // declared before a lock is taken
using Tensors = c10::SmallVector<Tensor, 3>;

struct Entry {
  VersionStamp stamp;
  Tensors tensors;  // the cast, or the parts of the prepacked weight
  c10::SmallVector<uint32_t, 3> versions;  // of these when they were made
  Tensor original;  // if a prepacked weight is to be verified, a copy of the weight
  c10::SmallVector<c10::Stream, 1> streams;  // that may use it, first the one that made it
  ByteBudget::Handle usage = {};

  Entry(VersionStamp stamp, Tensors tensors) : stamp(std::move(stamp)), tensors(std::move(tensors)) {
    for (const Tensor& tensor : this->tensors) {
      versions.push_back(version_of(tensor));
    }
  }

  size_t nbytes() const {
    size_t bytes = 0;
    for (const Tensor& tensor : tensors) {
      bytes += tensor.nbytes();
    }
    return bytes;
  }

  bool is_unwritten() const {
    return std::equal(tensors.begin(), tensors.end(), versions.begin(), [](const Tensor& tensor, uint32_t version) {
      return version_of(tensor) == version;
    });
  }
};

class EntryTable {
 public:
  using Entries = ska::flat_hash_map<Key, std::shared_ptr<Entry>, KeyHash>;
  using Keys = std::vector<Key>;

  struct Weight {
    PyObject* reference = nullptr;  // a weakref, whose callback calls erase_weight()
    Keys keys;                      // of its entries
    size_t view_bytes = 0;          // of the entries of its views
  };
  using Weights = std::unordered_map<TensorImpl*, Weight>;

  struct Contents {
    Entries entries;
    Weights weights;
  };

  explicit EntryTable(std::optional<size_t> max_bytes) : budget(max_bytes) {}

  ByteBudget budget;

  Entry* find(const Key& key) {
    const auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : found->second.get();
  }

  // Add an entry whose key is not in the table; return the weakref of its weight, if there is one.
  PyObject* insert(const Key& key, std::shared_ptr<Entry> entry) {
    const size_t bytes = entry->nbytes();
    entry->usage = budget.add(key, bytes);
    on_storage_[entry->stamp.storage()].push_back(key);
    entries_.emplace(key, std::move(entry));
    Weight& weight = weights_[key.weight];
    weight.keys.push_back(key);
    weight.view_bytes += key.view != 0 ? bytes : 0;
    return weight.reference;
  }

  void erase(const Key& key, Dying& dying) {
    const auto found = entries_.find(key);
    if (found == entries_.end()) {
      return;
    }
    Entry& entry = *found->second;
    const auto same_storage = on_storage_.find(entry.stamp.storage());
    std::erase(same_storage->second, key);
    if (same_storage->second.empty()) {
      on_storage_.erase(same_storage);
    }
    Weight& weight = weights_[key.weight];
    std::erase(weight.keys, key);
    weight.view_bytes -= key.view != 0 ? entry.usage->bytes : 0;
    budget.remove(entry.usage);
    dying.push_back(std::move(found->second));
    entries_.erase(found);
  }

  void erase_storage(const StorageImpl* storage, Dying& dying) {
    if (const auto found = on_storage_.find(storage); found != on_storage_.end()) {
      for (const Key& key : Keys(found->second)) {
        erase(key, dying);
      }
    }
  }

  // Return the weakref, which the caller releases.
  PyObject* erase_weight(TensorImpl* impl, Dying& dying) {
    const auto found = weights_.find(impl);
    if (found == weights_.end()) {
      return nullptr;
    }
    for (const Key& key : Keys(found->second.keys)) {
      erase(key, dying);
    }
    PyObject* const reference = found->second.reference;
    weights_.erase(found);
    return reference;
  }

  // Return whether so many bytes may be added for views of a weight: together they take no more memory than the weight. Parts
  // that do not overlap fit, in any dtype; where each call takes another slice, caching would be of no use.
  bool views_fit(const Tensor& weight, size_t bytes, Dying& dying) {
    const size_t limit = weight.nbytes();
    const auto found = weights_.find(weight.unsafeGetTensorImpl());
    if (found == weights_.end() || found->second.view_bytes + bytes <= limit) {
      return bytes <= limit;
    }
    for (const Key& key : Keys(found->second.keys)) {
      if (key.view != 0 && !entries_.find(key)->second->stamp.matches_version(weight)) {
        erase(key, dying);
      }
    }
    return found->second.view_bytes + bytes <= limit;
  }

  // Empty the table, and return what was in it.
  Contents release() {
    on_storage_.clear();
    budget.clear();
    return {std::exchange(entries_, Entries()), std::exchange(weights_, Weights())};
  }

  PyObject*& reference(TensorImpl* impl) { return weights_[impl].reference; }
  const Entries& entries() const { return entries_; }
  const Weights& weights() const { return weights_; }

 private:
  Entries entries_;
  Weights weights_;
  std::unordered_map<const StorageImpl*, Keys> on_storage_;
};

}  // namespace
