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

#include "python.h"
#include "weights.h"
#include "writes.h"

namespace {

// Set by bind(); they live as long as the process.
PyObject* stale_weight_error = nullptr;
std::string stale_weight_message;

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

struct Statistics {
  size_t entries, bytes;
  uint64_t hits, misses, evictions;
};

class Store;

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

  // Return a weight in another dtype, without history: the kept cast, or a new one, which is kept where it may be.
  Tensor cast(const Tensor& weight, ScalarType dtype, bool& made) {
    const Key key{weight.unsafeGetTensorImpl(), dtype};
    const std::optional<c10::Stream> stream = current_stream(weight);
    std::optional<c10::Stream> made_on;
    Tensor kept;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = entries_.find(key);
      if (found != entries_.end() && found->second->of.is_that_of(weight) && is_unwritten(found->second->cast)) {
        Entry& entry = *found->second;
        ++hits_;
        if (max_bytes_) {
          entry.uses = std::min(entry.uses + 1, kMostUses);
          ages_.splice(ages_.end(), ages_, entry.age);
        }
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
    const uint64_t writes = Writes::log().count();
    Content content(weight);
    kept = make_cast(weight, dtype);
    made = true;
    insert(key, weight, std::move(content), kept, writes);
    return kept;
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
      bytes_ = 0;
    }
    Writes::log().add_all();  // what threads made of the casts, for their graphs, is not to be used any more either
    const Gil gil;
    LeftBehind::things().free();
  }

  Statistics statistics() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {entries_.size(), bytes_, hits_, misses_, evictions_};
  }

  // Drop the casts of weights in storages that were written.
  void drop(const Storages& written, std::vector<std::shared_ptr<void>>& dying) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Key> keys;
    for (const auto& [key, entry] : entries_) {
      if (written.count(entry->of.storage()) != 0) {
        keys.push_back(key);
      }
    }
    for (const Key& key : keys) {
      erase(key, dying);
    }
  }

  std::mutex& mutex() { return mutex_; }

 private:
  struct Entry {
    Content of;
    Tensor cast;
    int uses;
    std::list<Key>::iterator age;
    std::vector<c10::Stream> streams;  // that may use it; the first is the one that it was made on

    bool is_shared_with(const c10::Stream& stream) const {
      return std::find(streams.begin(), streams.end(), stream) != streams.end();
    }
  };
  using Entries = ska::flat_hash_map<Key, std::shared_ptr<Entry>, KeyHash>;
  using Watchers = std::unordered_map<TensorImpl*, PyObject*>;

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
  using Dying = std::vector<std::shared_ptr<void>>;

  static constexpr int kMostUses = 3;
  static constexpr size_t kMostRefused = 10'000;

  // Called with the mutex held; what dies is moved out, for the caller to destroy after unlocking.
  void erase(const Key& key, Dying& dying) {
    auto found = entries_.find(key);
    if (found != entries_.end()) {
      bytes_ -= found->second->cast.nbytes();
      ages_.erase(found->second->age);
      dying.push_back(std::move(found->second));
      entries_.erase(found);
    }
  }

  // Called with the mutex held. Make room for a cast, or say that those which are there are worth more.
  //
  // The one that was not used for longest has to give way if the new one was wanted as often. So a model that is too large for
  // the store has hits on the part of it that is in there, and not none, as it would if each layer drove out the one that is
  // needed next; and a model that is used no more gives way to the next.
  bool make_room(const Key& key, size_t bytes, Dying& dying) {
    while (bytes_ + bytes > *max_bytes_) {
      if (refused_.size() > kMostRefused) {
        refused_.clear();
      }
      int& refused = refused_[key];
      if (refused < entries_.find(ages_.front())->second->uses) {
        ++refused;
        return false;
      }
      erase(Key(ages_.front()), dying);
      ++evictions_;
    }
    refused_.erase(key);
    return true;
  }

  void insert(const Key& key, const Tensor& weight, Content content, const Tensor& cast, uint64_t writes) {
    Dying dying;
    const bool may_keep = !is_shared(weight) && !InFlight::storages().has(storage_of(weight));
    bool watched = true;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++misses_;
      erase(key, dying);
      const size_t bytes = cast.nbytes();
      // A write that was announced since may be of this weight: the next use looks again.
      if (may_keep && writes == Writes::log().count() && (!max_bytes_ || (bytes <= *max_bytes_ && make_room(key, bytes, dying)))) {
        std::vector<c10::Stream> streams;
        if (const auto stream = current_stream(cast)) {
          streams.push_back(*stream);
        }
        entries_.emplace(
            key,
            std::make_shared<Entry>(
                Entry{std::move(content), cast, 1, ages_.insert(ages_.end(), key), std::move(streams)}));
        bytes_ += bytes;
        watched = watchers_.count(key.weight) != 0;
      }
    }
    if (!watched) {
      watch(weight);
    }
  }

  // A stream that was not to use a cast may now.
  void note_shared(const Key& key, const Tensor& cast, const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(key);
    if (found != entries_.end() && found->second->cast.is_same(cast)) {
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

  // Called with the GIL held, when the weight has died.
  void forget(TensorImpl* weight) {
    Dying dying;
    PyObject* reference = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int dtype = 0; dtype < static_cast<int>(ScalarType::NumOptions); ++dtype) {
        erase(Key{weight, static_cast<ScalarType>(dtype)}, dying);
      }
      auto found = watchers_.find(weight);
      if (found != watchers_.end()) {
        reference = found->second;
        watchers_.erase(found);
      }
    }
    Py_XDECREF(reference);
  }

  static void verify(const Tensor& weight, const Tensor& kept) {
    at::NoGradGuard no_grad;
    const Tensor fresh = weight.detach().to(kept.scalar_type());
    if (fresh.nan_to_num().equal(kept.nan_to_num()) && fresh.isnan().equal(kept.isnan())) {
      return;
    }
    const Gil gil;
    PyErr_SetString(stale_weight_error, stale_weight_message.c_str());
    raise();
  }

  const std::optional<size_t> max_bytes_;
  const bool verify_;
  std::mutex mutex_;
  Entries entries_;
  std::list<Key> ages_;  // least recently used first
  ska::flat_hash_map<Key, int, KeyHash> refused_;  // how often; hints, by address
  Watchers watchers_;
  uint64_t hits_ = 0, misses_ = 0, evictions_ = 0;
  size_t bytes_ = 0;
};

void tell_stores(const Storages& written) {
  std::vector<std::shared_ptr<void>> dying;  // before the lock, so that it is destroyed after it is let go
  std::lock_guard<std::mutex> lock(AllStores::list().mutex);
  for (Store* const store : AllStores::list().stores) {
    store->drop(written, dying);
  }
}

}  // namespace
