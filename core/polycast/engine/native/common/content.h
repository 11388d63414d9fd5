// What tells that a weight is still what it was.
//
// Owns weak references: to the version counter of a weight, which tells the weight from another tensor at its address (the key),
// and to its storage, for freed memory may be given to another storage. There is none to the weight itself, for
// torch.utils.swap_tensors refuses tensors that have any. Locks: one mutex, with nothing called.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <mutex>
#include <type_traits>
#include <utility>

#include "tensors.h"

namespace {

// Of a cast of a weight; of what it was packed into, which has no dtype, the kind of packing. `view` tells a weight's views
// apart by a hash: an entry's content has the sizes and strides themselves. 0 is the weight itself.
struct Key {
  TensorImpl* weight;
  ScalarType dtype;
  int packing = 0;
  uint64_t view = 0;
  bool operator==(const Key& other) const {
    return weight == other.weight && dtype == other.dtype && packing == other.packing && view == other.view;
  }
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<void*>()(key.weight) * 31 + static_cast<size_t>(key.dtype) + static_cast<size_t>(key.packing) * 1021 + key.view;
  }
};

// Returns the member of torch's VersionVariable that all tensors with one count of writes share.
struct SharedCounter {
  friend constexpr auto member_of(SharedCounter);
};
template <class Tag, auto member>
struct Exposed {
  friend constexpr auto member_of(Tag) { return member; }
};
template struct Exposed<SharedCounter, &c10::VariableVersion::version_counter_>;

const auto& counter_of(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().*member_of(SharedCounter());
}
using Counter = std::decay_t<decltype(*counter_of(std::declval<const Tensor&>()))>;
using WeakCounter = c10::weak_intrusive_ptr<Counter>;

// Return how many hold the memory of a weight, the weight among them. The object that Python keeps of a storage once it has been
// asked for is one only while something else in Python refers to it.
size_t count_holders(const Tensor& weight) {
  const c10::Storage& storage = weight.unsafeGetTensorImpl()->unsafe_storage();
  const size_t count = storage.use_count();
  if (count == 1) {
    return count;
  }
  PyObject* const object = storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj();
  return object != nullptr && Py_REFCNT(object) == 1 ? count - 1 : count;
}

// Version counters that do not tell all: of tensors on different memory, or on memory that was given to what counts nothing.
class PartialCounters {
 public:
  static PartialCounters& set() {
    static auto* const only = new PartialCounters();
    return *only;
  }

  void add(const Tensor& tensor) {
    const auto& counter = counter_of(tensor);
    if (!counter) {
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (counters_.size() >= sweep_at_) {
      for (auto it = counters_.begin(); it != counters_.end();) {
        it = it->second.expired() ? counters_.erase(it) : std::next(it);
      }
      sweep_at_ = std::max<size_t>(64, 2 * counters_.size());
    }
    counters_.emplace(counter.get(), WeakCounter(counter));
  }

  bool has(const Tensor& tensor) {
    std::lock_guard<std::mutex> lock(mutex_);
    return counters_.count(counter_of(tensor).get()) != 0;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;
  ska::flat_hash_map<const Counter*, WeakCounter> counters_;
  size_t sweep_at_ = 64;
};

// Who else holds the memory of a weight: nobody; tensors that count their writes with it, such as detach() and views make; or
// others, whose writes are not seen.
enum class Holders : uint8_t { kNone, kVersioned, kUnversioned };

// What a weight was when a cast of it was made.
//
// What can make a kept cast wrong, and what sees it:
//   an in-place op, an optimizer's step, load_state_dict    the version
//   weight.data = ..., set_, resize_                        the storage, the address, sizes and strides
//   either of these while it is cast                        this is made before the cast is
//   another tensor at the address of a dead one             the weak references
//   ops that write and count no version                     writes.h
//   memory that another process writes                      is_shared(): no cast of it is kept
//   what holds the memory when the cast is made             holders(): no cast is kept where its writes are not seen
//   an alias made later: .data, NumPy, DLPack, a pointer    alias_hooks.h: the cast is dropped as the alias is made
//   a pointer that is used after the next cast was made     nothing; WeightCache(verify=True) finds it
//
// And of the cast itself:
//   who was given it writes it                              its version: is_unwritten()
//   a stream that has not seen it made, or uses it longer   the streams that may use it; share_between()
//
// Made before the cast is. An alias that is made after that finds the weak reference to the storage, and one that lived before is
// found by holders(), unless it has died, with all its writes done. (torch counts both kinds of references in one atomic number: of an
// alias and a Content that are made at once, one finds the other.)
class Content {
 public:
  explicit Content(const Tensor& weight)
      : counter_(counter_of(weight)),
        storage_(weight.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl()),
        data_(weight.const_data_ptr()),
        version_(weight._version()),
        sizes_and_strides_(weight.sizes()) {
    const auto strides = weight.strides();
    sizes_and_strides_.append(strides.begin(), strides.end());
    if (const size_t count = count_holders(weight); count > 1) {
      const bool is_versioned = count == counter_of(weight).use_count() && !PartialCounters::set().has(weight);
      holders_ = is_versioned ? Holders::kVersioned : Holders::kUnversioned;
    }
  }

  // Whether a weight, whose key this is found by, is what it was.
  bool is_that_of(const Tensor& weight) const {
    const TensorImpl* const impl = weight.unsafeGetTensorImpl();
    const auto sizes = impl->sizes(), strides = impl->strides();
    return counter_._unsafe_get_target() == counter_of(weight).get() &&
        version_ == impl->version_counter().current_version() && data_ == impl->data() &&
        storage_._unsafe_get_target() == storage_of(weight) && sizes_and_strides_.size() == 2 * sizes.size() &&
        std::equal(sizes.begin(), sizes.end(), sizes_and_strides_.begin()) &&
        std::equal(strides.begin(), strides.end(), sizes_and_strides_.begin() + sizes.size());
  }

  // Whether nobody has written a weight, or given it other memory, since this was the content of it or of a view of it.
  bool is_of_now(const Tensor& weight) const {
    return counter_._unsafe_get_target() == counter_of(weight).get() &&
        version_ == weight.unsafeGetTensorImpl()->version_counter().current_version() &&
        storage_._unsafe_get_target() == storage_of(weight);
  }

  const StorageImpl* storage() const { return storage_._unsafe_get_target(); }
  bool memory_is_alive() const { return storage_.use_count() > 0; }
  Holders holders() const { return holders_; }

 private:
  WeakCounter counter_;
  c10::weak_intrusive_ptr<StorageImpl> storage_;
  const void* data_;
  uint32_t version_;
  Holders holders_ = Holders::kNone;
  c10::SmallVector<int64_t, 8> sizes_and_strides_;
};

}  // namespace
