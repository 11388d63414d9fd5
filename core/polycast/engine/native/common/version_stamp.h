// A weight's version stamp: what a cached cast of the weight is checked against at each lookup.
//
// Owns weak references to the weight's version counter, which tells the weight from another tensor at the same address, and to
// its storage, since freed memory may be reused by another one. It has none to the weight itself: torch.utils.swap_tensors
// refuses tensors with weak references. Locks: one mutex; nothing is called while it is held.

#pragma once

#include "python.h"
#include "tensors.h"

namespace {

// The key of a cached cast, or of a prepacked weight, which has an id in place of a dtype. `view` is a hash that tells the
// views of a weight apart (their stamps hold the exact sizes and strides); 0 is the weight itself.
struct Key {
  TensorImpl* weight;
  ScalarType dtype;
  int prepack_id = 0;
  uint64_t view = 0;
  bool operator==(const Key& other) const = default;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<void*>()(key.weight) * 31 + static_cast<size_t>(key.dtype) + static_cast<size_t>(key.prepack_id) * 1021 +
        key.view;
  }
};

// Access to a private member of torch's VariableVersion: the counter that a tensor, its views and detach() of it share.
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

uint32_t version_of(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->version_counter().current_version(); }

// The layout of CPython's weak references, and the offset of the list of those to the Python object of a storage.
struct WeakReference {
  PyObject head;
  PyObject *object, *callback;
  Py_hash_t hash;
  const WeakReference *previous, *next;
};
Py_ssize_t weak_references_of_storage = 0;  // set by bind()
PyTypeObject* weak_id_ref = nullptr;        // the type of those in dictionaries in which torch looks tensors up; set by bind()

// Return whether anything refers weakly to the Python object of a storage, and may write through it.
bool is_referred_to_weakly(PyObject* storage) {
  const auto* const list =
      reinterpret_cast<const WeakReference* const*>(reinterpret_cast<const char*>(storage) + weak_references_of_storage);
  if (*list == nullptr) {
    return false;
  }
  const Gil gil;
  const WeakReference* reference = *list;
  while (reference != nullptr && Py_TYPE(&reference->head) == weak_id_ref) {
    reference = reference->next;
  }
  return reference != nullptr;
}

// Return how many references a weight's storage has, the weight's included. The Python object that a storage keeps once it has
// been asked for counts only while something else in Python refers to it.
size_t count_holders(const Tensor& weight) {
  const c10::Storage& storage = weight.unsafeGetTensorImpl()->unsafe_storage();
  const size_t count = storage.use_count();
  if (count == 1) {
    return count;
  }
  PyObject* const object = storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj();
  return object != nullptr && Py_REFCNT(object) == 1 && !is_referred_to_weakly(object) ? count - 1 : count;
}

// Version counters that miss writes: shared by tensors on different memory, or of memory exposed to code that counts none.
class UnreliableCounters {
 public:
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

  bool contains(const Tensor& tensor) {
    std::lock_guard<std::mutex> lock(mutex_);
    return counters_.count(counter_of(tensor).get()) != 0;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;
  ska::flat_hash_map<const Counter*, WeakCounter> counters_;
  size_t sweep_at_ = 64;
};

// The other holders of a weight's memory: none; only tensors that share its version counter, such as views and detach(); or
// others, whose writes are not seen. A view that another thread is making is one of the others until it has the counter.
enum class Holders : uint8_t { kNone, kVersioned, kUnversioned };

// Taken before a weight is cast.
//
// What can make a cached cast stale, and what detects it:
//   an in-place op, an optimizer's step, load_state_dict    the version
//   weight.data = ..., set_, resize_                        the storage, the address, sizes and strides
//   either of these during the cast                         the stamp is taken before
//   another tensor at the address of a dead weight          the weak references
//   ops that write, or make aliases, and count no version   write_hooks.h
//   ops in a dispatch mode's handler or a device's graph    recorded_writes.h
//   memory that another process writes                      is_shared(): the cast is not cached
//   others that hold the memory during the cast             holders(): not cached where their writes are not seen
//   an alias made later: .data, NumPy, DLPack, a pointer    alias_hooks.h: the alias drops the cast
//   a pointer that is used after the next cast was made     nothing; WeightCache(verify=True) finds it
//
// And the cast itself:
//   whoever was given it writes to it                       its version: is_unwritten()
//   a stream that runs ahead of the cast, or outlives it    the streams that may use it: synchronize_streams()
//
// No alias escapes. One that is made after the stamp finds the stamp's weak reference to the storage. One that was made before
// shows in holders(), or is dead and has done its writes. (torch counts both kinds of references in one atomic integer, so of
// an alias and a stamp that are made at once, one sees the other.)
class VersionStamp {
 public:
  // Only the engine may find the holders: the observer, a library with its own globals, has neither what bind() sets nor the engine's
  // UnreliableCounters.
  explicit VersionStamp(const Tensor& weight, bool finds_holders = true)
      : counter_(counter_of(weight)),
        storage_(weight.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl()),
        data_(weight.const_data_ptr()),
        version_(weight._version()),
        sizes_and_strides_(weight.sizes()) {
    const auto strides = weight.strides();
    sizes_and_strides_.append(strides.begin(), strides.end());
    if (const size_t count = finds_holders ? count_holders(weight) : 1; count > 1) {
      const bool is_versioned = count == counter_of(weight).use_count() && !only<UnreliableCounters>().contains(weight);
      holders_ = is_versioned ? Holders::kVersioned : Holders::kUnversioned;
    }
  }

  // Return whether a weight (found by its key) is unchanged.
  bool matches(const Tensor& weight) const {
    const TensorImpl* const impl = weight.unsafeGetTensorImpl();
    const auto sizes = impl->sizes(), strides = impl->strides();
    return matches_version(weight) && data_ == impl->data() && sizes_and_strides_.size() == 2 * sizes.size() &&
        std::equal(sizes.begin(), sizes.end(), sizes_and_strides_.begin()) &&
        std::equal(strides.begin(), strides.end(), sizes_and_strides_.begin() + sizes.size());
  }

  // Return whether a weight has the same version and storage, where the stamp may be that of a view.
  bool matches_version(const Tensor& weight) const {
    return counter_._unsafe_get_target() == counter_of(weight).get() && version_ == version_of(weight) &&
        storage_._unsafe_get_target() == storage_of(weight);
  }

  at::IntArrayRef sizes() const { return at::IntArrayRef(sizes_and_strides_).slice(0, sizes_and_strides_.size() / 2); }
  at::IntArrayRef strides() const { return at::IntArrayRef(sizes_and_strides_).slice(sizes_and_strides_.size() / 2); }
  const void* data() const { return data_; }
  const StorageImpl* storage() const { return storage_._unsafe_get_target(); }
  bool storage_is_alive() const { return storage_.use_count() > 0; }
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
