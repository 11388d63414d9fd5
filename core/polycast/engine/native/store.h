// The user's stores of casts (WeightCache), which threads share, and which outlive regions.
//
// Owns casts without history, and a Python weakref on each weight, that tells of its death at once.
//
// Locks. A Store has a mutex, which is never held while the GIL is taken, a tensor is cast or a tensor is destroyed: each of
// these may wait for the GIL, and a weakref's callback comes with the GIL and waits for the mutex. What runs Python may also
// end the region that has the store: whoever calls it holds a shared_ptr. All stores are in a list with a mutex of its own,
// which is taken before theirs. References that dead stores left wait, under a third mutex, for the next holder of the GIL.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "content.h"
#include "left_behind.h"
#include "python.h"
#include "views.h"
#include "weights.h"
#include "writes.h"

namespace {

// Set by bind(); they live as long as the process.
PyObject* stale_weight_error = nullptr;
std::string stale_weight_message;

struct Statistics {
  size_t casts, cast_bytes;
  uint64_t hits, misses, evictions;
  size_t packings, packed_bytes;
};

class Store;

// The stores that there are, to be walked with the mutex held.
struct AllStores {
  static AllStores& list() {
    static auto* const only = new AllStores();
    return *only;
  }

  std::mutex mutex;
  std::unordered_set<Store*> stores;
};

class Store : public std::enable_shared_from_this<Store> {
 public:
  Store(std::optional<size_t> max_bytes, bool verify) : max_bytes_(max_bytes), verify_(verify) {
    std::lock_guard<std::mutex> lock(AllStores::list().mutex);
    AllStores::list().stores.insert(this);
  }

  // A store may die where the GIL must not be waited for.
  ~Store() {
    {
      std::lock_guard<std::mutex> lock(AllStores::list().mutex);
      AllStores::list().stores.erase(this);
    }
    leave_behind(watchers_);
  }

  // Return a weight or a view of one in another dtype, without history: the kept cast, or a new one, which is kept where it may be.
  Tensor cast(const Source& source, ScalarType dtype, bool& made) {
    const Tensor& weight = source.tensor;
    const Key key = source.key(dtype);
    const std::optional<c10::Stream> stream = current_stream(weight);
    std::optional<c10::Stream> made_on;
    Tensor kept;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = entries_.find(key);
      if (found != entries_.end() && found->second->of.is_that_of(weight) && is_unwritten(found->second->cast)) {
        Entry& entry = *found->second;
        note_hit(entry);
        kept = entry.cast;
        if (stream && !entry.is_shared_with(*stream)) {
          made_on = entry.streams.front();
        }
      }
    }
    if (kept.defined()) {
      if (made_on) {
        share_between(kept, *made_on, *stream);
        note_shared(key, kept, *stream);
      }
      if (verify_) {
        verify(weight, kept);
      }
      return kept;
    }
    InFlight::storages().forget_ended();  // a collective that has ended holds the memory of its weights until then
    const uint64_t writes = Writes::log().count();
    Content content(weight);
    kept = make_cast(weight, dtype);
    made = true;
    insert(source, key, std::make_shared<Entry>(std::move(content), kept), writes);
    return kept;
  }

  // Return what is kept of what a weight or a view of one was packed into, or nothing.
  std::optional<std::vector<Tensor>> find_packing(const Source& source, int kind) {
    const Tensor& weight = source.tensor;
    const std::optional<c10::Stream> stream = current_stream(weight);
    std::optional<c10::Stream> made_on;
    std::shared_ptr<Entry> entry;
    const Key key = source.key(ScalarType::Undefined, kind);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = entries_.find(key);
      if (found == entries_.end() || !found->second->of.is_that_of(weight) || !found->second->packing_is_unwritten()) {
        return std::nullopt;
      }
      entry = found->second;
      note_hit(*entry);
      if (stream && !entry->is_shared_with(*stream)) {
        made_on = entry->streams.front();
      }
    }
    if (made_on && !entry->packed.empty()) {
      for (const Tensor& part : entry->packed) {
        share_between(part, *made_on, *stream);
      }
      note_shared(key, entry->packed.front(), *stream);
    }
    if (verify_ && !are_equal(weight.detach(), entry->cast)) {
      raise_stale();
    }
    return entry->packed;
  }

  // Keep what a weight was packed into, where it may be. The content and the count of writes are those before it was made.
  void keep_packing(const Source& source, int kind, Content content, std::vector<Tensor> packed, uint64_t writes) {
    auto entry = std::make_shared<Entry>(std::move(content), std::move(packed));
    if (verify_) {
      const at::NoGradGuard no_grad;
      entry->cast = source.tensor.detach().clone();
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      most_packings_ = std::max(most_packings_, kind);
    }
    insert(source, source.key(ScalarType::Undefined, kind), std::move(entry), writes);
  }

  // Return whether what a view is packed into might be kept; see views_fit().
  bool views_fit_with_packing(const Source& source, int kind) {
    if (source.view == 0) {
      return true;
    }
    Dying dying;
    std::lock_guard<std::mutex> lock(mutex_);
    return views_fit(source.weight, size_of_packing(source.key(ScalarType::Undefined, kind), source.tensor.numel()), dying);
  }

  // Return whether there is room for what a weight would be packed into, which is more work than it saves where it is not kept.
  bool has_room_for_packing(const Source& source, int kind) {
    if (!max_bytes_) {
      return true;
    }
    const Key key = source.key(ScalarType::Undefined, kind);
    const auto elements = static_cast<size_t>(source.tensor.numel());
    Dying dying;
    std::lock_guard<std::mutex> lock(mutex_);
    erase(key, dying);  // it does not hold any more
    return has_room(key, elements, size_of_packing(key, elements));
  }

  // Called without the GIL. The weights are not watched any more either, so that nothing refers to them.
  void clear() {
    Writes::log().add_all();  // what another thread is making is not to be kept after this
    {
      Entries dying;  // before the lock, so that it is destroyed after it is let go
      Watchers watchers;
      std::lock_guard<std::mutex> lock(mutex_);
      dying.swap(entries_);
      watchers.swap(watchers_);
      leave_behind(watchers);
      ages_.clear();
      on_storage_.clear();
      views_.clear();
      bytes_ = 0;
    }
    Writes::log().add_all();  // what threads made of the casts, for their graphs, is not to be used any more either
    const Gil gil;
    LeftBehind::things().free();
  }

  Statistics statistics() {
    std::lock_guard<std::mutex> lock(mutex_);
    Statistics now{0, 0, hits_, misses_, evictions_, 0, 0};
    for (const auto& [key, entry] : entries_) {
      const bool packed = key.packing != 0;
      ++(packed ? now.packings : now.casts);
      (packed ? now.packed_bytes : now.cast_bytes) += entry->bytes;
    }
    return now;
  }

  // Drop the casts of weights in storages that were written.
  void drop(const Storages& written, std::vector<std::shared_ptr<void>>& dying) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const StorageImpl* const storage : written) {
      if (const auto found = on_storage_.find(storage); found != on_storage_.end()) {
        for (const Key& key : Keys(found->second)) {
          erase(key, dying);
        }
      }
    }
  }

  // Drop what is made of a weight, and the reference to it. Called with the GIL held.
  void forget(TensorImpl* weight) {
    Dying dying;
    PyObject* reference = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int dtype = 0; dtype < static_cast<int>(ScalarType::NumOptions); ++dtype) {
        erase(Key{weight, static_cast<ScalarType>(dtype)}, dying);
      }
      for (int kind = 1; kind <= most_packings_; ++kind) {
        erase(Key{weight, ScalarType::Undefined, kind}, dying);
      }
      if (const auto views = views_.find(weight); views != views_.end()) {
        for (const Key& key : Keys(views->second.keys)) {
          erase(key, dying);
        }
      }
      auto found = watchers_.find(weight);
      if (found != watchers_.end()) {
        reference = found->second;
        watchers_.erase(found);
      }
    }
    Py_XDECREF(reference);
  }

  std::mutex& mutex() { return mutex_; }

 private:
  using Dying = std::vector<std::shared_ptr<void>>;

  struct Entry {
    Content of;
    Tensor cast;  // of a packing that is verified, a copy of what was packed
    std::vector<Tensor> packed;
    std::vector<uint32_t> versions;  // of these, as they were made
    size_t bytes = 0;
    int uses = 1;
    uint64_t last_use = 0;  // by the clock, where there is a bound
    std::list<Key>::iterator age = {};
    std::vector<c10::Stream> streams = {};  // that may use it; the first is the one that it was made on

    Entry(Content content, Tensor of_weight) : of(std::move(content)), cast(std::move(of_weight)), bytes(cast.nbytes()) {}

    Entry(Content content, std::vector<Tensor> parts) : of(std::move(content)), packed(std::move(parts)) {
      for (const Tensor& part : packed) {
        versions.push_back(part.unsafeGetTensorImpl()->version_counter().current_version());
        bytes += part.nbytes();
      }
    }

    bool packing_is_unwritten() const {
      return std::equal(packed.begin(), packed.end(), versions.begin(), [](const Tensor& part, uint32_t version) {
        return part.unsafeGetTensorImpl()->version_counter().current_version() == version;
      });
    }

    bool is_shared_with(const c10::Stream& stream) const {
      return std::find(streams.begin(), streams.end(), stream) != streams.end();
    }
  };
  using Entries = ska::flat_hash_map<Key, std::shared_ptr<Entry>, KeyHash>;
  using Keys = std::vector<Key>;
  using Watchers = std::unordered_map<TensorImpl*, PyObject*>;

  // What is kept of the views of a weight.
  struct Views {
    size_t bytes = 0;
    Keys keys;
  };

  // A weight that is known here, for the callback of its weakref.
  struct Watched {
    std::weak_ptr<Store> store;
    TensorImpl* weight;

    static Object forgetting(Watched watched) {
      static PyMethodDef function{"forget", &forget, METH_O, "Have the casts of a weight erased, which has died."};
      const Object capsule = Object::made(PyCapsule_New(new Watched(std::move(watched)), nullptr, [](PyObject* gone) {
        delete static_cast<Watched*>(PyCapsule_GetPointer(gone, nullptr));
      }));
      return Object::made(PyCFunction_NewEx(&function, capsule.get(), nullptr));
    }

    static PyObject* forget(PyObject* capsule, PyObject*) {
      const auto* const watched = static_cast<Watched*>(PyCapsule_GetPointer(capsule, nullptr));
      if (const auto alive = watched->store.lock()) {
        alive->forget(watched->weight);
      }
      return Py_NewRef(Py_None);
    }
  };

  // What was not given room, a hint by address.
  struct Refused {
    size_t elements = 0, bytes = 0;  // of the weight, and of what was made of it; 0: nothing was
    int count = 0;                   // how often, since `since` by the clock
    uint64_t since = 0;
  };

  static constexpr int kMostUses = 3;
  static constexpr int kUsesToRepack = 16;  // a packing takes as long as so many uses of it save
  static constexpr size_t kMostRefused = 10'000;

  // Called with the mutex held.
  void note_hit(Entry& entry) {
    ++hits_;
    if (max_bytes_) {
      entry.uses = std::min(entry.uses + 1, kMostUses);
      entry.last_use = ++clock_;
      ages_.splice(ages_.end(), ages_, entry.age);
    }
  }

  // Called with the mutex held; what dies is moved out, for the caller to destroy after unlocking.
  void erase(const Key& key, Dying& dying) {
    auto found = entries_.find(key);
    if (found != entries_.end()) {
      bytes_ -= found->second->bytes;
      ages_.erase(found->second->age);
      const auto same = on_storage_.find(found->second->of.storage());
      same->second.erase(std::find(same->second.begin(), same->second.end(), key));
      if (same->second.empty()) {
        on_storage_.erase(same);
      }
      if (key.view != 0) {
        Views& views = views_[key.weight];
        views.bytes -= found->second->bytes;
        std::erase(views.keys, key);
        if (views.keys.empty()) {
          views_.erase(key.weight);
        }
      }
      dying.push_back(std::move(found->second));
      entries_.erase(found);
    }
  }

  // Called with the mutex held. Return whether a new entry may have so many bytes, in place of those that were not used for longest.
  //
  // Those give way if they were not used while the new one was wanted, and refused, as often as they had been, or often enough to be
  // worth a packing. So a model that is too large for the store has hits on the part of it that is in there: each entry is used before
  // a layer outside is wanted again, and no layer drives out the one that is needed next. And a model that is used no more gives way.
  bool has_room(const Key& key, size_t elements, size_t bytes) {
    if (bytes > *max_bytes_) {
      return false;
    }
    size_t left = bytes_;
    for (auto age = ages_.begin(); left + bytes > *max_bytes_; ++age) {
      const Entry& oldest = *entries_.find(*age)->second;
      Refused& refused = refused_of(key, elements);
      if (oldest.last_use > refused.since) {
        refused.count = 0;
        refused.since = ++clock_;
      }
      if (refused.count < (key.packing != 0 || age->packing != 0 ? kUsesToRepack : oldest.uses)) {
        ++refused.count;
        return false;
      }
      left -= oldest.bytes;
    }
    return true;
  }

  // Called with the mutex held.
  Refused& refused_of(const Key& key, size_t elements) {
    if (refused_.size() > kMostRefused) {
      refused_.clear();
    }
    Refused& refused = refused_[key];
    if (refused.elements != elements) {  // another weight, where one has died
      refused = {elements};
    }
    return refused;
  }

  // Called with the mutex held. Return how many bytes a packing would take: one that was refused has left its size; one that was never
  // made takes a byte for each element, at least.
  size_t size_of_packing(const Key& key, size_t elements) const {
    const auto found = refused_.find(key);
    const bool is_known = found != refused_.end() && found->second.elements == elements;
    return is_known ? std::max(found->second.bytes, elements) : elements;
  }

  // Called with the mutex held. Return whether the views of a weight may take so much memory more: together no more than the weight does.
  // The parts of a weight fit, in any dtype. Where each call takes another slice, what was kept would be of no use to the next.
  bool views_fit(const Tensor& weight, size_t bytes, Dying& dying) {
    const auto found = views_.find(weight.unsafeGetTensorImpl());
    const size_t most = weight.nbytes();
    if (found == views_.end() || found->second.bytes + bytes <= most) {
      return bytes <= most;
    }
    const Keys keys = found->second.keys;
    size_t kept = found->second.bytes;
    for (const Key& key : keys) {
      const Entry& entry = *entries_.find(key)->second;
      if (!entry.of.is_of_now(weight)) {
        kept -= entry.bytes;
        erase(key, dying);
      }
    }
    return kept + bytes <= most;
  }

  // The key is one of the source's.
  void insert(const Source& source, const Key& key, std::shared_ptr<Entry> entry, uint64_t writes) {
    Dying dying;
    const Tensor& weight = source.weight;
    const bool may_keep = may_be_stored(weight, entry->of);
    const auto elements = static_cast<size_t>(source.tensor.numel());
    bool watched = true;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++misses_;
      erase(key, dying);
      const size_t bytes = entry->bytes;
      const bool has_room = (!max_bytes_ || this->has_room(key, elements, bytes)) && (key.view == 0 || views_fit(weight, bytes, dying));
      if (!has_room && key.packing != 0) {
        refused_of(key, elements).bytes = bytes;
      }
      // A write that was announced since may be of this weight: the next use looks again.
      if (may_keep && has_room && writes == Writes::log().count()) {
        while (max_bytes_ && bytes_ + bytes > *max_bytes_) {
          erase(Key(ages_.front()), dying);
          ++evictions_;
        }
        refused_.erase(key);
        entry->last_use = ++clock_;
        if (const auto stream = current_stream(weight)) {
          entry->streams.push_back(*stream);
        }
        entry->age = ages_.insert(ages_.end(), key);
        on_storage_[entry->of.storage()].push_back(key);
        entries_.emplace(key, std::move(entry));
        bytes_ += bytes;
        if (key.view != 0) {
          Views& views = views_[key.weight];
          views.bytes += bytes;
          views.keys.push_back(key);
        }
        watched = watchers_.count(key.weight) != 0;
      }
    }
    if (!watched) {
      watch(weight);
    }
  }

  // A stream that was not to use a cast may now, or what was packed.
  void note_shared(const Key& key, const Tensor& shared, const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(key);
    if (found != entries_.end() && (key.packing == 0 ? found->second->cast : found->second->packed.front()).is_same(shared)) {
      found->second->streams.push_back(stream);
    }
  }

  static void leave_behind(const Watchers& watchers) {
    for (const auto& watched : watchers) {
      LeftBehind::things().leave({static_cast<void*>(watched.second), [](void* reference) {
                                    Py_DECREF(static_cast<PyObject*>(reference));
                                  }});
    }
  }

  // Have the entries of a weight erased when it dies. What is allocated here may run the garbage collector, and so anything.
  void watch(const Tensor& weight) {
    const Gil gil;
    LeftBehind::things().free();
    const Object object = python_tensor(weight);
    TensorImpl* const impl = weight.unsafeGetTensorImpl();
    Object reference = Object::made(PyWeakref_NewRef(object.get(), Watched::forgetting({weak_from_this(), impl}).get()));
    std::lock_guard<std::mutex> lock(mutex_);
    if (watchers_.emplace(impl, reference.get()).second) {
      reference.release();
    }
  }

  static bool are_equal(const Tensor& one, const Tensor& other) {
    const at::NoGradGuard no_grad;
    return one.nan_to_num().equal(other.nan_to_num()) && one.isnan().equal(other.isnan());
  }

  static void verify(const Tensor& weight, const Tensor& kept) {
    const at::NoGradGuard no_grad;
    if (!are_equal(weight.detach().to(kept.scalar_type()), kept)) {
      raise_stale();
    }
  }

  [[noreturn]] static void raise_stale() {
    const Gil gil;
    PyErr_SetString(stale_weight_error, stale_weight_message.c_str());
    raise();
  }

  const std::optional<size_t> max_bytes_;
  const bool verify_;
  std::mutex mutex_;
  Entries entries_;
  std::unordered_map<const StorageImpl*, Keys> on_storage_;  // the keys of entries, by the memory of their weights
  std::list<Key> ages_;  // least recently used first
  ska::flat_hash_map<Key, Refused, KeyHash> refused_;
  Watchers watchers_;
  std::unordered_map<TensorImpl*, Views> views_;  // by weight
  uint64_t hits_ = 0, misses_ = 0, evictions_ = 0;
  size_t bytes_ = 0;
  uint64_t clock_ = 0;  // counts what is done, where there is a bound
  int most_packings_ = 0;  // the highest kind of packing that was kept
};

// Return the stores that there are, held.
std::vector<std::shared_ptr<Store>> all_stores() {
  std::vector<std::shared_ptr<Store>> found;
  std::lock_guard<std::mutex> lock(AllStores::list().mutex);
  for (Store* const store : AllStores::list().stores) {
    if (auto alive = store->weak_from_this().lock()) {
      found.push_back(std::move(alive));
    }
  }
  return found;
}

void tell_stores(const Storages& written) {
  std::vector<std::shared_ptr<void>> dying;  // before the lock, so that it is destroyed after it is let go
  std::lock_guard<std::mutex> lock(AllStores::list().mutex);
  for (Store* const store : AllStores::list().stores) {
    store->drop(written, dying);
  }
}

}  // namespace
