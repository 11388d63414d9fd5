// The store of a WeightCache: casts and prepacked weights, shared by threads, outliving regions.
//
// Holds casts without history, and a Python weakref to each weight, whose callback drops its entries.
//
// Locks. A store's mutex is never held while the GIL is taken, a tensor is cast or a tensor is destroyed: each of these may
// wait for the GIL, and a weakref's callback holds the GIL and waits for the mutex. Code that runs Python may also end the
// region that has the store, so a caller holds a shared_ptr. The mutex of the list of all stores is taken before theirs.

#pragma once

#include <unordered_set>

#include "admission.h"
#include "deferred_destruction.h"
#include "entry_table.h"
#include "python.h"
#include "views.h"
#include "weights.h"

namespace {

// Set by bind().
PyObject* stale_weight_error = nullptr;
std::string stale_weight_message;

struct Statistics {
  size_t casts = 0, cast_bytes = 0;
  uint64_t hits, misses, evictions;
  size_t prepacked = 0, prepacked_bytes = 0;
};

class UserStore;

struct AllStores {
  std::mutex mutex;
  std::unordered_set<UserStore*> stores;  // to be read with the mutex held
};

class UserStore : public std::enable_shared_from_this<UserStore> {
 public:
  UserStore(std::optional<size_t> max_bytes, bool verify) : table_(max_bytes), verify_(verify) {
    std::lock_guard<std::mutex> lock(only<AllStores>().mutex);
    only<AllStores>().stores.insert(this);
  }

  ~UserStore() {
    {
      std::lock_guard<std::mutex> lock(only<AllStores>().mutex);
      only<AllStores>().stores.erase(this);
    }
    defer_destruction(table_.weights());  // a store may be destroyed where the GIL must not be waited for
  }

  // Return a weight or a view of one in another dtype, without history; set `is_new` if it was cast now.
  Tensor cast(const Source& source, ScalarType dtype, bool& is_new) {
    const Key key = source.key(dtype);
    if (std::optional<Tensor> found = find<Tensor>(source.tensor, key)) {
      return *std::move(found);
    }
    only<PendingCollectives>().drop_finished();  // a finished one holds the memory of its weights until then
    const uint64_t position = only<InvalidationLog>().length();
    VersionStamp stamp(source.tensor);
    const Tensor cast = make_cast(source.tensor, dtype, /*reusable=*/{}, /*lasts=*/true);
    is_new = true;
    insert(source, key, std::make_shared<Entry>(std::move(stamp), Tensors{cast}), position);
    return cast;
  }

  // Return the prepacked weight, empty if the kernel cannot prepack it, or nothing if none is cached.
  std::optional<Tensors> find_prepacked(const Source& source, int prepack_id) {
    return find<Tensors>(source.tensor, source.key(ScalarType::Undefined, prepack_id));
  }

  // Cache a prepacked weight if it is admitted. The stamp and the position in the log are from before it was made.
  void insert_prepacked(const Source& source, int prepack_id, VersionStamp stamp, Tensors prepacked, uint64_t position) {
    auto entry = std::make_shared<Entry>(std::move(stamp), std::move(prepacked));
    if (verify_) {
      const at::NoGradGuard no_grad;
      entry->original = source.tensor.detach().clone();
    }
    insert(source, source.key(ScalarType::Undefined, prepack_id), std::move(entry), position);
  }

  // Add a cast or a prepacked weight that was made earlier, of the same values; returns as insert().
  std::optional<bool> adopt(const Source& source, const Key& key, Tensors tensors) {
    only<PendingCollectives>().drop_finished();  // a finished one holds the memory of its weights until then
    const uint64_t position = only<InvalidationLog>().length();
    auto entry = std::make_shared<Entry>(VersionStamp(source.tensor), std::move(tensors));
    return insert(source, key, std::move(entry), position, /*is_new=*/false);
  }

  struct Stored {
    Object reference;  // a weakref to the weight
    Key key;
    std::shared_ptr<Entry> entry;
  };

  // Return all entries, of which some may be stale. The GIL must be held.
  std::vector<Stored> entries() {
    std::vector<Stored> found;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, entry] : table_.entries()) {
      if (PyObject* const reference = table_.reference(key.weight); reference != nullptr) {
        found.push_back({Object::borrow(reference), key, entry});
      }
    }
    return found;
  }

  // The room for a new entry: enough; too little; or a view would not fit beside the other views of its weight.
  enum class Room : uint8_t { kEnough, kTooLittle, kViewsAreFull };

  // Return the room for a prepacked weight: to make one that is not cached is more work than it saves.
  Room room_for_prepacked(const Source& source, int prepack_id) {
    const Key key = source.key(ScalarType::Undefined, prepack_id);
    const auto elements = static_cast<size_t>(source.tensor.numel());
    Dying dying;
    std::lock_guard<std::mutex> lock(mutex_);
    table_.erase(key, dying);  // it is stale, or it would have been found
    const size_t bytes = table_.budget.prepacked_size(key, elements);
    if (key.view != 0 && !table_.views_fit(source.weight, bytes, dying)) {
      return Room::kViewsAreFull;
    }
    return table_.budget.has_room(key, elements, bytes) ? Room::kEnough : Room::kTooLittle;
  }

  // Drop all entries and the weakrefs to the weights. The GIL must not be held.
  void clear() {
    only<InvalidationLog>().add_all();  // casts that other threads are making now are not to be cached
    {
      EntryTable::Contents dying;
      std::lock_guard<std::mutex> lock(mutex_);
      dying = table_.release();
      defer_destruction(dying.weights);
    }
    only<InvalidationLog>().add_all();  // nor are casts with history that threads have made of the entries to be used
    const Gil gil;
    only<DeferredDestruction>().run();
  }

  Statistics statistics() {
    std::lock_guard<std::mutex> lock(mutex_);
    Statistics now{.hits = hits_, .misses = misses_, .evictions = evictions_};
    for (const auto& [key, entry] : table_.entries()) {
      const bool is_prepacked = key.prepack_id != 0;
      ++(is_prepacked ? now.prepacked : now.casts);
      (is_prepacked ? now.prepacked_bytes : now.cast_bytes) += entry->usage->bytes;
    }
    return now;
  }

  // Drop the entries of weights in storages that were written.
  void invalidate(const Storages& written, Dying& dying) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const StorageImpl* const storage : written) {
      table_.erase_storage(storage, dying);
    }
  }

  // Drop the entries of a weight, and the weakref to it. The GIL must be held.
  void forget(TensorImpl* weight) {
    Dying dying;
    PyObject* reference = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      reference = table_.erase_weight(weight, dying);
    }
    Py_XDECREF(reference);
  }

  std::mutex& mutex() { return mutex_; }

 private:
  // The callback of a weakref.
  struct Callback {
    std::weak_ptr<UserStore> store;
    TensorImpl* weight;

    static Object make(Callback callback) {
      static PyMethodDef function{"forget", &call, METH_O, "Drop the entries of a weight that was garbage-collected."};
      const Object capsule = Object::steal(PyCapsule_New(new Callback(std::move(callback)), nullptr, [](PyObject* object) {
        delete static_cast<Callback*>(PyCapsule_GetPointer(object, nullptr));
      }));
      return Object::steal(PyCFunction_NewEx(&function, capsule.get(), nullptr));
    }

    static PyObject* call(PyObject* capsule, PyObject*) {
      const auto* const callback = static_cast<Callback*>(PyCapsule_GetPointer(capsule, nullptr));
      if (const auto alive = callback->store.lock()) {
        alive->forget(callback->weight);
      }
      return Py_NewRef(Py_None);
    }
  };

  // Found is Tensor for a cast and Tensors for a prepacked weight, so that a hit copies no vector.
  template <class Found>
  std::optional<Found> find(const Tensor& tensor, const Key& key) {
    const std::optional<c10::Stream> stream = current_stream(tensor);
    std::optional<c10::Stream> made_on;
    std::optional<Found> found;
    Tensor original;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const Entry* const entry = table_.find(key);
      if (entry == nullptr || !entry->stamp.matches(tensor) || !entry->is_unwritten()) {
        return std::nullopt;
      }
      ++hits_;
      table_.budget.note_hit(entry->usage);
      if constexpr (std::is_same_v<Found, Tensor>) {
        found = entry->tensors.front();
      } else {
        found = entry->tensors;
      }
      original = entry->original;
      if (stream && std::find(entry->streams.begin(), entry->streams.end(), *stream) == entry->streams.end()) {
        made_on = entry->streams.front();
      }
    }
    const at::ArrayRef<Tensor> tensors(*found);
    if (made_on && !tensors.empty()) {
      for (const Tensor& each : tensors) {
        synchronize_streams(each, *made_on, *stream);
      }
      std::lock_guard<std::mutex> lock(mutex_);
      Entry* const entry = table_.find(key);
      if (entry != nullptr && !entry->tensors.empty() && entry->tensors.front().is_same(tensors.front())) {
        entry->streams.push_back(*stream);
      }
    }
    if (verify_ && !is_fresh(tensor, tensors, original)) {
      const Gil gil;
      PyErr_SetString(stale_weight_error, stale_weight_message.c_str());
      throw_python_error();
    }
    return found;
  }

  static bool is_fresh(const Tensor& weight, at::ArrayRef<Tensor> tensors, const Tensor& original) {
    const at::NoGradGuard no_grad;
    const Tensor& kept = original.defined() ? original : tensors.front();
    const Tensor expected = original.defined() ? weight.detach() : weight.detach().to(kept.scalar_type());
    return expected.nan_to_num().equal(kept.nan_to_num()) && expected.isnan().equal(kept.isnan());
  }

  // Return whether the entry was admitted; nothing if there is no room for it.
  std::optional<bool> insert(
      const Source& source, const Key& key, std::shared_ptr<Entry> entry, uint64_t position, bool is_new = true) {
    const Tensor& weight = source.weight;
    const bool is_admitted = user_store_allows(weight, entry->stamp);
    const auto elements = static_cast<size_t>(source.tensor.numel());
    const size_t bytes = entry->nbytes();
    Dying dying;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      misses_ += is_new ? 1 : 0;
      table_.erase(key, dying);
      const bool has_room =
          table_.budget.has_room(key, elements, bytes) && (key.view == 0 || table_.views_fit(weight, bytes, dying));
      if (!has_room && key.prepack_id != 0) {
        table_.budget.note_refused_size(key, elements, bytes);
      }
      // An invalidation since may be of this weight.
      if (!has_room || !is_admitted || position != only<InvalidationLog>().length()) {
        return has_room ? std::optional(false) : std::nullopt;
      }
      while (const auto evicted = table_.budget.next_to_evict(bytes)) {
        table_.erase(*evicted, dying);
        ++evictions_;
      }
      if (const auto stream = current_stream(weight)) {
        entry->streams.push_back(*stream);
      }
      if (table_.insert(key, std::move(entry)) != nullptr) {
        return true;
      }
    }
    watch(weight);
    return true;
  }

  // Drop the entries of a weight when it is garbage-collected. Allocating here may run the garbage collector, and so anything.
  void watch(const Tensor& weight) {
    const Gil gil;
    only<DeferredDestruction>().run();
    const Object object = python_tensor(weight);
    TensorImpl* const impl = weight.unsafeGetTensorImpl();
    Object reference = Object::steal(PyWeakref_NewRef(object.get(), Callback::make({weak_from_this(), impl}).get()));
    std::lock_guard<std::mutex> lock(mutex_);
    if (PyObject*& known = table_.reference(impl); known == nullptr) {
      known = reference.release();
    }
  }

  static void defer_destruction(const EntryTable::Weights& weights) {
    for (const auto& [impl, weight] : weights) {
      if (weight.reference != nullptr) {
        only<DeferredDestruction>().add({static_cast<void*>(weight.reference), [](void* reference) {
                                            Py_DECREF(static_cast<PyObject*>(reference));
                                          }});
      }
    }
  }

  std::mutex mutex_;
  EntryTable table_;
  uint64_t hits_ = 0, misses_ = 0, evictions_ = 0;
  const bool verify_;
};

// Return the stores that are alive, holding them.
std::vector<std::shared_ptr<UserStore>> all_stores() {
  std::vector<std::shared_ptr<UserStore>> found;
  std::lock_guard<std::mutex> lock(only<AllStores>().mutex);
  for (UserStore* const store : only<AllStores>().stores) {
    if (auto alive = store->weak_from_this().lock()) {
      found.push_back(std::move(alive));
    }
  }
  return found;
}

void invalidate_user_stores(const Storages& written) {
  Dying dying;
  std::lock_guard<std::mutex> lock(only<AllStores>().mutex);
  for (UserStore* const store : only<AllStores>().stores) {
    store->invalidate(written, dying);
  }
}

}  // namespace
