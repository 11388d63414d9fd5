// The stores of casts: those of a thread's own regions, and those of users (WeightCache).
//
// Owns the casts, and a Python weakref on each weight that tells of its death. Weights are held weakly.
//
// Locks. A Store has a mutex, which is never held while the GIL is taken, a tensor is cast or a tensor is destroyed: each of
// these may wait for the GIL, and a weakref's callback comes with the GIL and waits for the mutex. A second mutex guards the
// weakrefs that dead stores left for the next holder of the GIL; nothing is called with it held.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {  // all is one unit, binding.cpp

namespace py = pybind11;

using at::ScalarType;
using at::Tensor;
using c10::TensorImpl;

// Set by bind(); they live as long as the process.
PyObject* stale_weight_error = nullptr;
std::string stale_weight_message;

struct Key {
  TensorImpl* weight;
  ScalarType dtype;
  bool operator==(const Key& other) const { return weight == other.weight && dtype == other.dtype; }
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<void*>()(key.weight) * 31 + static_cast<size_t>(key.dtype);
  }
};

struct Entry {
  c10::weak_intrusive_ptr<TensorImpl> weight;  // so that the address, which is the key, is not given to another tensor
  uint32_t version;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // likewise: freed memory may be given to another storage
  const void* data;
  c10::DimVector strides;
  uint64_t region;             // the region of a thread's own store that made the cast; 0 in a user's
  std::optional<c10::Stream> stream;  // the memory may be written again on the stream that it was made on
  Tensor cast;                 // without history
  Tensor linked;               // the same memory with history, in a thread's own store until the region ends
  c10::weak_intrusive_ptr<TensorImpl> linked_weak;  // and in a user's, where holding it would keep the weight alive
  std::list<Key>::iterator age;
};

using Entries = ska::flat_hash_map<Key, std::unique_ptr<Entry>, KeyHash>;

struct Statistics {
  size_t entries, bytes;
  uint64_t hits, misses, evictions;
};

std::optional<c10::Stream> current_stream(const Tensor& tensor) {
  const auto device = tensor.device();
  if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Return a node for the backward of a cast. What holds a node is not the same type in all versions of torch.
template <class NodePtr, class Node = torch::autograd::generated::ToCopyBackward0>
auto new_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<Node>(new Node(), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Node>();
  }
}

// A store of casts. A thread's own keeps what a region made until the region ends, and after it the memory, to write the
// next region's casts into. A user's (WeightCache) keeps casts until the weight changes or dies, or room is needed.
class Store : public std::enable_shared_from_this<Store> {
 public:
  Store(bool own, std::optional<size_t> max_bytes, bool verify) : own_(own), max_bytes_(max_bytes), verify_(verify) {}

  // A thread's own store dies as the thread does, where the GIL must not be waited for: what the GIL is needed for is
  // left to the next that has it.
  ~Store() { leave_orphans(watchers_); }

  Tensor cast(const Tensor& weight, ScalarType dtype) {
    const Key key{weight.unsafeGetTensorImpl(), dtype};
    const bool link = weight.requires_grad() && at::GradMode::is_enabled();
    const uint32_t version = weight._version();
    const void* const data = weight.const_data_ptr();
    Tensor kept, reusable;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = entries_.find(key);
      if (found != entries_.end()) {
        Entry& entry = *found->second;
        if (entry.version == version && entry.data == data && (!own_ || entry.region == region_) &&
            entry.storage._unsafe_get_target() == weight.storage().unsafeGetStorageImpl() &&
            entry.cast.sizes() == weight.sizes() && weight.strides() == c10::IntArrayRef(entry.strides)) {
          ++hits_;
          if (max_bytes_) {
            ages_.splice(ages_.end(), ages_, entry.age);
          }
          if (link) {
            if (entry.linked.defined()) {
              return entry.linked;
            }
            if (auto alive = entry.linked_weak.lock(); alive.defined() && !verify_) {
              return Tensor(std::move(alive));
            }
          }
          kept = entry.cast;
        } else if (own_ && entry.stream == current_stream(entry.cast)) {
          reusable = entry.cast;
        }
      }
    }
    if (kept.defined()) {
      if (verify_) {
        verify(weight, kept);
      }
      return link ? remember_link(key, with_history(kept, weight)) : kept;
    }
    kept = make(weight, dtype, reusable, link);
    Tensor linked = link ? with_history(kept, weight) : Tensor();
    insert(key, weight, version, data, kept, linked);
    return link ? linked : kept;
  }

  // Called without the GIL. The weights are not watched any more either, so that nothing refers to them.
  void clear() {
    {
      Entries dying;  // before the lock, so that it is destroyed after it is let go
      std::unordered_map<TensorImpl*, PyObject*> watchers;
      std::lock_guard<std::mutex> lock(mutex_);
      dying.swap(entries_);
      watchers.swap(watchers_);
      leave_orphans(watchers);
      ages_.clear();
      graph_entries_.clear();
      bytes_ = 0;
    }
    py::gil_scoped_acquire gil;
    bury_orphans();
  }

  // The region ends: its casts are not to be used again. Those with history go, for the graph has what it needs of them;
  // of the others the memory is kept.
  void end_region() {
    std::vector<std::unique_ptr<Entry>> dying;  // before the lock, so that it is destroyed after it is let go
    std::lock_guard<std::mutex> lock(mutex_);
    ++region_;
    for (const Key& key : graph_entries_) {
      erase(key, dying);
    }
    graph_entries_.clear();
  }

  Statistics statistics() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {entries_.size(), bytes_, hits_, misses_, evictions_};
  }

 private:
  // Called with the mutex held; what dies is moved out, for the caller to destroy after unlocking.
  void erase(const Key& key, std::vector<std::unique_ptr<Entry>>& dying) {
    auto found = entries_.find(key);
    if (found != entries_.end()) {
      bytes_ -= found->second->cast.nbytes();
      ages_.erase(found->second->age);
      dying.push_back(std::move(found->second));
      entries_.erase(found);
    }
  }

  static Tensor make(const Tensor& weight, ScalarType dtype, Tensor& reusable, bool link) {
    std::optional<c10::InferenceMode> normal_tensors;  // one made in inference mode could not be saved for a backward
    if (c10::InferenceMode::is_enabled()) {
      normal_tensors.emplace(false);
    }
    at::NoGradGuard no_grad;
    const Tensor source = weight.detach();
    // The entry and `reusable` are two; whoever else holds the tensor or its memory still counts on what is in it.
    if (!link && reusable.defined() && reusable.use_count() == 2 && reusable.storage().use_count() == 1 &&
        reusable.sizes() == source.sizes() && reusable.device() == source.device()) {
      reusable.copy_(source);
      return reusable;
    }
    reusable.reset();
    return source.to(dtype);
  }

  // Return a tensor on the memory of `cast` with the history that weight.to(dtype) would have.
  static Tensor with_history(const Tensor& cast, const Tensor& weight) {
    Tensor linked(cast.variable_data());
    const auto node = new_node<decltype(torch::autograd::Edge::function)>();
    node->set_next_edges(torch::autograd::collect_next_edges(weight));
    node->self_options = weight.options();
    torch::autograd::set_history(linked, node);
    return linked;
  }

  Tensor remember_link(const Key& key, Tensor linked) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = entries_.find(key);
    if (found != entries_.end() && !found->second->linked.defined()) {
      set_link(key, *found->second, linked);
    }
    return linked;
  }

  void set_link(const Key& key, Entry& entry, const Tensor& linked) {
    if (own_) {
      entry.linked = linked;
      graph_entries_.push_back(key);
    } else {
      entry.linked_weak = c10::weak_intrusive_ptr<TensorImpl>(linked.getIntrusivePtr());
    }
  }

  void insert(const Key& key, const Tensor& weight, uint32_t version, const void* data, Tensor cast, Tensor linked) {
    std::vector<std::unique_ptr<Entry>> dying;
    bool watched = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++misses_;
      erase(key, dying);
      const size_t bytes = cast.nbytes();
      if (!max_bytes_ || bytes <= *max_bytes_) {
        auto stream = current_stream(cast);
        auto entry = std::make_unique<Entry>(Entry{
            c10::weak_intrusive_ptr<TensorImpl>(weight.getIntrusivePtr()),
            version,
            c10::weak_intrusive_ptr<c10::StorageImpl>(weight.storage().getWeakStorageImpl()),
            data,
            c10::DimVector(weight.strides()),
            region_,
            stream,
            std::move(cast),
            Tensor(),
            c10::weak_intrusive_ptr<TensorImpl>(c10::intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl>()),
            ages_.insert(ages_.end(), key)});
        if (linked.defined()) {
          set_link(key, *entry, linked);
        }
        entries_.emplace(key, std::move(entry));
        bytes_ += bytes;
        while (max_bytes_ && bytes_ > *max_bytes_) {
          erase(Key(ages_.front()), dying);
          ++evictions_;
        }
      }
      watched = watchers_.count(key.weight) != 0;
    }
    if (!watched) {
      watch(weight);
    }
  }

  // References that stores left when they died. Both live as long as the process.
  static std::vector<PyObject*>& orphans() {
    static auto* const references = new std::vector<PyObject*>();
    return *references;
  }

  static std::mutex& orphans_mutex() {
    static auto* const mutex = new std::mutex();
    return *mutex;
  }

  static void leave_orphans(const std::unordered_map<TensorImpl*, PyObject*>& watchers) {
    std::lock_guard<std::mutex> lock(orphans_mutex());
    for (const auto& watched : watchers) {
      orphans().push_back(watched.second);
    }
  }

  static void bury_orphans() {
    std::vector<PyObject*> found;
    {
      std::lock_guard<std::mutex> lock(orphans_mutex());
      found.swap(orphans());
    }
    for (PyObject* reference : found) {
      Py_DECREF(reference);
    }
  }

  // Have the entries of a weight erased when it dies.
  void watch(const Tensor& weight) {
    py::gil_scoped_acquire gil;
    bury_orphans();
    py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(weight));
    TensorImpl* const impl = weight.unsafeGetTensorImpl();
    py::cpp_function forget([store = weak_from_this(), impl](const py::handle&) {
      if (auto alive = store.lock()) {
        alive->forget(impl);
      }
    });
    PyObject* const reference = PyWeakref_NewRef(object.ptr(), forget.ptr());
    if (reference == nullptr) {
      throw py::error_already_set();
    }
    bool added = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      added = watchers_.emplace(impl, reference).second;
    }
    if (!added) {
      Py_DECREF(reference);
    }
  }

  // Called with the GIL held, when the weight has died.
  void forget(TensorImpl* weight) {
    std::vector<std::unique_ptr<Entry>> dying;
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
    if (at::equal(fresh.nan_to_num(), kept.nan_to_num()) && at::equal(fresh.isnan(), kept.isnan())) {
      return;
    }
    py::gil_scoped_acquire gil;
    PyErr_SetString(stale_weight_error, stale_weight_message.c_str());
    python_error error;
    error.persist();
    throw python_error(std::move(error));
  }

  const bool own_;
  const std::optional<size_t> max_bytes_;
  const bool verify_;
  std::mutex mutex_;
  Entries entries_;
  std::list<Key> ages_;  // least recently used first
  std::vector<Key> graph_entries_;
  std::unordered_map<TensorImpl*, PyObject*> watchers_;
  uint64_t region_ = 0, hits_ = 0, misses_ = 0, evictions_ = 0;
  size_t bytes_ = 0;
};

}  // namespace
