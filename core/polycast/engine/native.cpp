// The native engine: the semantics of reference.py at the speed of torch's own kernels.
//
// One boxed kernel for each op at a device's Autocast key; the state machine of state.py, where a kernel finds the overlay
// and the store of casts of the region that the thread is in; and the stores. The truth for enabled and dtype stays in
// torch's own thread-local state.
//
// Locks. A Store has a mutex, which is never held while the GIL is taken, a tensor is cast or a tensor is destroyed:
// each of these may wait for the GIL, and a weakref's callback comes with the GIL and waits for the mutex.

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_strings.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using at::ScalarType;
using at::Tensor;
using c10::DeviceType;
using c10::DispatchKey;
using c10::TensorImpl;

// The order is that of polycast.CastPolicy, which bind() checks.
// kNone is that of an op that is in an overlay and not in the table, outside regions with that overlay.
enum class Policy : int8_t { kNone = -1, kLowerPrecisionFp, kFp32, kFp32SetOptDtype, kFp32AppendDtype, kPromote, kBanned, kPassthrough };

constexpr std::array<const char*, 7> kPolicyNames = {
    "LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "FP32_APPEND_DTYPE", "PROMOTE", "BANNED", "PASSTHROUGH"};

// Set by bind(); they live as long as the process.
PyObject* stale_weight_error = nullptr;
PyObject* form_of = nullptr;   // this engine's Overlay for one of state.py
PyObject* store_of = nullptr;  // this engine's Store for a WeightCache
std::string stale_weight_message;

// ---------------------------------------------------------------------------------------------------------------------
// The casts of weights that are kept.

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

// ---------------------------------------------------------------------------------------------------------------------
// What the kernels know of the regions that a thread is in.

// The policies that a region lays over the table, by the number that an op has in this process.
struct Overlay {
  std::unordered_map<int64_t, Policy> policies;
};

// A region that the thread is in; see Frame in state.py.
struct Frame {
  py::object owner, settings, overlay, cache;
  std::shared_ptr<const Overlay> laid;
  std::shared_ptr<Store> store;
  DeviceType device;
  bool enabled_before, cache_enabled_before;
  ScalarType dtype_before;
  int below;  // the position of the frame of the same device under this one, or -1
  int depth;
};

// How many regions for each device all threads are in.
std::array<std::atomic<int>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> open_count{};

std::atomic<int>& open_count_of(DeviceType device) { return open_count[static_cast<size_t>(device)]; }

struct DeviceRegion {
  int innermost = -1;
  const Overlay* overlay = nullptr;  // both are held by the innermost frame
  Store* store = nullptr;
};

// What a thread is in. Frames are Python's as much as ours, and are touched with the GIL only; the rest without it too.
struct ThreadRegions {
  std::vector<Frame> frames;
  std::array<DeviceRegion, c10::COMPILE_TIME_MAX_DEVICE_TYPES> devices;
  std::shared_ptr<Store> own;
  bool ends_with_thread = false;

  // A thread that ends inside a region is in it no more. Python says so in time, with the GIL held: when it drops what it
  // keeps for the thread, and before it tells who waits for the thread that it has ended.
  void end_with_thread() {
    if (ends_with_thread) {
      return;
    }
    const py::capsule end(this, [](void* regions) { static_cast<ThreadRegions*>(regions)->end(); });
    if (PyDict_SetItemString(PyThreadState_GetDict(), "polycast_regions", end.ptr()) != 0) {
      throw py::error_already_set();
    }
    ends_with_thread = true;
  }

  void end() {
    ends_with_thread = false;
    devices = {};
    for (const Frame& frame : std::exchange(frames, {})) {
      --open_count_of(frame.device);
    }
  }

  DeviceRegion& of(DeviceType device) { return devices[static_cast<size_t>(device)]; }

  void set_innermost(DeviceType device, int position) {
    const Frame* frame = position < 0 ? nullptr : &frames[position];
    of(device) = {position, frame ? frame->laid.get() : nullptr, frame ? frame->store.get() : nullptr};
  }

  std::shared_ptr<Store> own_store() {
    if (own == nullptr) {
      own = std::make_shared<Store>(true, std::nullopt, false);
    }
    return own;
  }
};

thread_local ThreadRegions regions;

// The device type that a string names. Called with the GIL held.
DeviceType device_of(PyObject* name) {
  static auto* const known = new std::unordered_map<std::string, DeviceType>();
  static PyObject* last = nullptr;  // the string asked for last, held; most ask for one and the same again
  static DeviceType type;
  if (name == last) {
    return type;
  }
  std::string text = THPUtils_unpackString(name);
  auto found = known->find(text);
  if (found == known->end()) {
    const auto parsed = c10::Device(text).type();
    found = known->emplace(std::move(text), parsed).first;
  }
  type = found->second;
  Py_XSETREF(last, Py_NewRef(name));
  return type;
}

// enter(owner, settings) -> bool; see StateMachine in state.py.
PyObject* enter(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_INTERNAL_ASSERT(count == 2 && PyTuple_Check(args[1]) && PyTuple_GET_SIZE(args[1]) == 7);
  PyObject* const* const settings = &PyTuple_GET_ITEM(args[1], 0);
  const auto device = device_of(settings[0]);
  const auto dtype = reinterpret_cast<THPDtype*>(settings[2])->scalar_type;
  regions.end_with_thread();
  Frame frame;
  frame.owner = py::reinterpret_borrow<py::object>(args[0]);
  frame.settings = py::reinterpret_borrow<py::object>(args[1]);
  frame.overlay = py::reinterpret_borrow<py::object>(settings[4]);
  frame.cache = py::reinterpret_borrow<py::object>(settings[5]);
  const bool inherits = settings[6] == Py_False && regions.of(device).innermost >= 0;
  if (!frame.overlay.is_none()) {
    if (inherits) {
      frame.overlay = frame.overlay.attr("over")(regions.frames[regions.of(device).innermost].overlay);
    }
    frame.laid = py::cast<std::shared_ptr<Overlay>>(py::handle(form_of)(frame.overlay));
  }
  if (!frame.cache.is_none()) {
    frame.store = py::cast<std::shared_ptr<Store>>(py::handle(store_of)(frame.cache));
  }
  frame.device = device;
  frame.below = regions.of(device).innermost;
  frame.depth = 1;
  if (frame.below >= 0) {
    const Frame& below = regions.frames[frame.below];
    frame.depth += below.depth;
    if (inherits && frame.laid == nullptr) {
      frame.laid = below.laid;
      frame.overlay = below.overlay;
    }
    if (inherits && frame.store == nullptr) {
      frame.store = below.store;
      frame.cache = below.cache;
    }
  }
  if (frame.store == nullptr) {
    frame.store = regions.own_store();
  }
  frame.enabled_before = at::autocast::is_autocast_enabled(device);
  frame.dtype_before = at::autocast::get_autocast_dtype(device);
  frame.cache_enabled_before = at::autocast::is_autocast_cache_enabled();
  regions.frames.push_back(std::move(frame));
  regions.set_innermost(device, static_cast<int>(regions.frames.size()) - 1);
  ++open_count_of(device);
  at::autocast::set_autocast_enabled(device, settings[1] == Py_True);
  at::autocast::set_autocast_dtype(device, dtype);
  if (settings[3] != Py_None) {
    at::autocast::set_autocast_cache_enabled(settings[3] == Py_True);
  }
  at::autocast::increment_nesting();
  return PyBool_FromLong(at::impl::torch_function_mode_enabled());
  END_HANDLE_TH_ERRORS
}

// Take a frame out that others are above: what it would have restored passes to the next above it.
void pass_on(int position) {
  auto& frames = regions.frames;
  const Frame frame = std::move(frames[position]);
  frames.erase(frames.begin() + position);
  frames[position].cache_enabled_before = frame.cache_enabled_before;
  bool passed = false;
  for (size_t i = position; i < frames.size(); ++i) {
    Frame& other = frames[i];
    if (other.device == frame.device) {
      --other.depth;
      if (!passed) {
        passed = true;
        other.enabled_before = frame.enabled_before;
        other.dtype_before = frame.dtype_before;
        other.below = frame.below;
        continue;
      }
    }
    if (other.below > position) {
      --other.below;
    }
  }
  for (size_t i = 0; i < regions.devices.size(); ++i) {
    const int innermost = regions.devices[i].innermost;
    if (innermost > position) {
      regions.devices[i].innermost = innermost - 1;
    }
  }
  if (!passed) {
    at::autocast::set_autocast_enabled(frame.device, frame.enabled_before);
    at::autocast::set_autocast_dtype(frame.device, frame.dtype_before);
    regions.set_innermost(frame.device, frame.below);
  }
}

// leave(owner) -> bool | None; see StateMachine in state.py.
PyObject* leave(PyObject*, PyObject* owner) {
  HANDLE_TH_ERRORS
  auto& frames = regions.frames;
  int position = static_cast<int>(frames.size()) - 1;
  while (position >= 0 && frames[position].owner.ptr() != owner) {
    --position;
  }
  if (position < 0) {
    Py_RETURN_NONE;
  }
  const auto device = frames[position].device;
  if (position == static_cast<int>(frames.size()) - 1) {
    const Frame frame = std::move(frames.back());
    frames.pop_back();
    at::autocast::set_autocast_enabled(frame.device, frame.enabled_before);
    at::autocast::set_autocast_dtype(frame.device, frame.dtype_before);
    at::autocast::set_autocast_cache_enabled(frame.cache_enabled_before);
    regions.set_innermost(frame.device, frame.below);
  } else {
    pass_on(position);
  }
  --open_count_of(device);
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  if (frames.empty() && regions.own != nullptr) {
    regions.own->end_region();
  }
  return PyBool_FromLong(at::impl::torch_function_mode_enabled());
  END_HANDLE_TH_ERRORS
}

// dtype(device_type) -> torch.dtype: that of autocast on this thread.
PyObject* dtype(PyObject*, PyObject* device_type) {
  HANDLE_TH_ERRORS
  auto* const found = reinterpret_cast<PyObject*>(torch::getTHPDtype(at::autocast::get_autocast_dtype(device_of(device_type))));
  Py_INCREF(found);
  return found;
  END_HANDLE_TH_ERRORS
}

// (owner, settings) of the region that was entered last, or None.
py::object last() {
  if (regions.frames.empty()) {
    return py::none();
  }
  const Frame& frame = regions.frames.back();
  return py::make_tuple(frame.owner, frame.settings);
}

// (overlay, cache) of the innermost region for a device, or None.
py::object innermost(const py::object& device_type) {
  const int position = regions.of(device_of(device_type.ptr())).innermost;
  if (position < 0) {
    return py::none();
  }
  return py::make_tuple(regions.frames[position].overlay, regions.frames[position].cache);
}

int nesting(const py::object& device_type) {
  const int position = regions.of(device_of(device_type.ptr())).innermost;
  return position < 0 ? 0 : regions.frames[position].depth;
}

int open_regions(const py::object& device_type) { return open_count_of(device_of(device_type.ptr())); }

void clear_own_casts() {
  if (regions.own != nullptr) {
    regions.own->clear();
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Casting.

bool is_eligible(const Tensor& tensor, DeviceType device) {
  return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble &&
      tensor.device().type() == device;
}

// A weight is a float32 leaf that requires grad, or a Parameter that does not. Subclasses other than Parameter are not.
// One with a tangent of forward-mode differentiation is left alone: a kept cast would be without it.
bool is_weight(const Tensor& tensor) {
  const TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (tensor.scalar_type() != at::kFloat || tensor.layout() != at::kStrided || tensor.is_inference() || tensor.is_nested() ||
      impl->key_set().has(DispatchKey::Python)) {
    return false;
  }
  // The tensor is held, so its object is alive, and the type of an object can be read without the GIL.
  const PyObject* const object = impl->pyobj_slot()->load_pyobj();
  const auto* const type = object == nullptr ? THPVariableClass : reinterpret_cast<const PyObject*>(Py_TYPE(object));
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr) {
    return type == ParameterClass;
  }
  return (type == ParameterClass || (type == THPVariableClass && meta->requires_grad_)) && meta->grad_fn_ == nullptr &&
      !meta->is_view_ && meta->fw_grad_ == nullptr;
}

// See storages_are_rewritten in weights.py. Few weights share their storage, so the GIL is rarely taken.
bool is_rewritten(const Tensor& weight) {
  if (weight.storage().use_count() == 1) {
    return false;
  }
  const py::gil_scoped_acquire gil;
  return py::module_::import("polycast.weights").attr("storages_are_rewritten")().cast<bool>();
}

// Not while something records, transforms or watches the ops.
bool caching_is_safe() {
  static constexpr c10::DispatchKeySet kWatchers{
      DispatchKey::Python, DispatchKey::Tracer, DispatchKey::FuncTorchDynamicLayerFrontMode};
  return !c10::impl::tls_local_dispatch_key_set().included_.has_any(kWatchers);
}

// Cast an eligible tensor of another dtype.
Tensor cast(const Tensor& tensor, ScalarType dtype, DeviceType device, const py::object& is_capturing) {
  Store* const store = regions.of(device).store;
  if (store == nullptr) {
    return at::autocast::cached_cast(dtype, tensor, device);  // a region of torch's has torch's cache
  }
  if (dtype != at::kFloat && is_weight(tensor) && at::autocast::is_autocast_cache_enabled() && caching_is_safe() &&
      !is_rewritten(tensor)) {
    bool capturing = false;
    if (is_capturing) {
      py::gil_scoped_acquire gil;
      capturing = is_capturing().cast<bool>();
    }
    if (!capturing) {
      return store->cast(tensor, dtype);
    }
  }
  return tensor.to(dtype);
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernels.

// What is between the Autocast keys and a device's own, and does nothing for an op without side effects whose inputs are not
// differentiated.
constexpr c10::DispatchKeySet kNothingToDo{
    DispatchKey::BackendSelect,
    DispatchKey::ADInplaceOrView,
    DispatchKey::AutogradFunctionality,
    DispatchKey::AutogradOther};

struct Op {
  int64_t number;
  std::string name;
  Policy policy;
  std::string refusal;  // what a BANNED op says
};

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(Op op, const c10::OperatorHandle& handle, DeviceType device, DispatchKey key, py::object is_capturing)
      : op_(std::move(op)),
        device_(device),
        key_(key),
        device_keys_(c10::parseDispatchKey(std::string(c10::toString(key)).substr(std::strlen("Autocast")))),
        skipped_(c10::DispatchKeySet(key) | kNothingToDo),
        is_capturing_(std::move(is_capturing)) {
    const auto& arguments = handle.schema().arguments();
    arity_ = arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const std::string type = arguments[i].real_type()->str();
      if (type.find("Tensor") != std::string::npos) {
        tensors_.push_back(i);
      } else if (type == "ScalarType?") {
        optional_dtype_ = i;
      }
    }
  }

  ~Kernel() override {
    if (is_capturing_) {
      py::gil_scoped_acquire gil;
      is_capturing_ = py::object();
    }
  }

  // The kernel of an op of any signature.
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (policy() == Policy::kNone) {  // as if there were no kernel here: what the op is made of is autocast as ever
      handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key_), stack);
      return;
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
    switch (policy()) {
      case Policy::kLowerPrecisionFp:
        cast_all(stack, at::autocast::get_autocast_dtype(device_));
        break;
      case Policy::kFp32:
        cast_all(stack, at::kFloat);
        break;
      case Policy::kFp32SetOptDtype:
        if (first_is_eligible(stack)) {
          c10::IValue& dtype = argument(stack, *optional_dtype_);
          if (dtype.isNone()) {
            dtype = c10::IValue(static_cast<int64_t>(at::kFloat));
          }
        }
        break;
      case Policy::kFp32AppendDtype: {
        const auto dtype = first_is_eligible(stack) ? at::kFloat : argument(stack, 0).toTensor().scalar_type();
        stack->emplace_back(static_cast<int64_t>(dtype));
        with_dtype(handle).callBoxed(stack);
        return;
      }
      case Policy::kPromote:
        if (mixed(stack)) {
          cast_all(stack, at::kFloat);
        }
        break;
      case Policy::kBanned:
        TORCH_CHECK(false, op_.refusal);
      case Policy::kPassthrough:
      case Policy::kNone:
        break;
    }
    handle.callBoxed(stack);
  }

  // The kernel of an op whose arguments are tensors and scalars, without the way over a stack.
  template <class... Args>
  Tensor call(const c10::TypedOperatorHandle<Tensor(Args...)>& handle, c10::DispatchKeySet keys, Args... args) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
    ScalarType dtype = at::kFloat;
    switch (policy()) {
      case Policy::kLowerPrecisionFp:
        dtype = at::autocast::get_autocast_dtype(device_);
        break;
      case Policy::kFp32:
        break;
      case Policy::kPromote: {
        Promotion promotion{device_};
        (promotion.look(args), ...);
        if (!promotion.different) {
          return below(handle, keys, args...);
        }
        break;
      }
      case Policy::kBanned:
        TORCH_CHECK(false, op_.refusal);
      default:  // those that set a dtype need an argument that these ops do not have
        return below(handle, keys, args...);
    }
    return below(handle, keys, *converted(args, dtype)...);
  }

 private:
  // Call the op again. Where there is nothing for autograd to do, and nothing but autograd is between here and the
  // device's kernel, this goes there at once.
  template <class... Args>
  Tensor below(
      const c10::TypedOperatorHandle<Tensor(Args...)>& handle,
      c10::DispatchKeySet keys,
      std::type_identity_t<Args>... args) const {
    if (keys - skipped_ == device_keys_) {
      const bool grad = at::GradMode::is_enabled();
      if (!(is_differentiated(args, grad) || ...)) {
        return handle.redispatch(device_keys_, args...);
      }
    }
    return handle.call(args...);
  }

  // Whether autograd has to see a tensor: for a gradient, where these are recorded, or a tangent.
  static bool is_differentiated(const Tensor& tensor, bool grad) {
    const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
    return meta != nullptr && ((grad && tensor.requires_grad()) || meta->fw_grad_ != nullptr);
  }

  static bool is_differentiated(const std::optional<Tensor>& tensor, bool grad) {
    return tensor && is_differentiated(*tensor, grad);
  }

  static bool is_differentiated(const at::Scalar&, bool) { return false; }

  // Gathers whether the eligible inputs have different dtypes.
  struct Promotion {
    DeviceType device;
    std::optional<ScalarType> seen = std::nullopt;
    bool different = false;

    void look(const Tensor& tensor) {
      if (is_eligible(tensor, device)) {
        different = different || (seen && *seen != tensor.scalar_type());
        seen = tensor.scalar_type();
      }
    }

    void look(const std::optional<Tensor>& tensor) {
      if (tensor) {
        look(*tensor);
      }
    }

    void look(const at::Scalar&) {}
  };

  c10::MaybeOwned<Tensor> converted(const Tensor& tensor, ScalarType dtype) const {
    using Maybe = c10::MaybeOwned<Tensor>;
    return to_be_cast(tensor, dtype) ? Maybe::owned(cast(tensor, dtype, device_, is_capturing_))
                                     : Maybe::borrowed(tensor);
  }

  std::optional<std::optional<Tensor>> converted(const std::optional<Tensor>& tensor, ScalarType dtype) const {
    return tensor ? std::optional<Tensor>(*converted(*tensor, dtype)) : tensor;
  }

  const at::Scalar* converted(const at::Scalar& scalar, ScalarType) const { return &scalar; }

  static bool appends_dtype(const std::vector<c10::Argument>& arguments, const c10::OperatorHandle& candidate) {
    const auto& others = candidate.schema().arguments();
    if (others.size() != arguments.size() + 1 || others.back().real_type()->str() != "ScalarType" ||
        candidate.schema().is_mutable()) {
      return false;
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (others[i].name() != arguments[i].name()) {
        return false;
      }
    }
    return true;
  }

  // The overload that takes a dtype more, looked for when it is first called for: the search goes over all ops.
  const c10::OperatorHandle& with_dtype(const c10::OperatorHandle& handle) {
    std::call_once(searched_, [&] {
      for (const auto& other : c10::Dispatcher::singleton().getAllOpNames()) {
        if (other.name == handle.schema().name()) {
          auto candidate = c10::Dispatcher::singleton().findSchema(other);
          if (candidate && appends_dtype(handle.schema().arguments(), *candidate)) {
            with_dtype_ = candidate;
          }
        }
      }
    });
    return *with_dtype_;
  }

  Policy policy() const {
    const Overlay* const overlay = regions.of(device_).overlay;
    if (C10_UNLIKELY(overlay != nullptr)) {
      const auto found = overlay->policies.find(op_.number);
      if (found != overlay->policies.end()) {
        return found->second;
      }
    }
    return op_.policy;
  }

  c10::IValue& argument(torch::jit::Stack* stack, size_t position) const {
    return (*stack)[stack->size() - arity_ + position];
  }

  bool first_is_eligible(torch::jit::Stack* stack) const {
    const c10::IValue& first = argument(stack, 0);
    return first.isTensor() && is_eligible(first.toTensor(), device_);
  }

  bool to_be_cast(const Tensor& tensor, ScalarType dtype) const {
    return tensor.defined() && tensor.scalar_type() != dtype && is_eligible(tensor, device_);
  }

  void cast_all(torch::jit::Stack* stack, ScalarType dtype) const {
    for (const size_t position : tensors_) {
      c10::IValue& value = argument(stack, position);
      if (value.isTensor()) {
        const Tensor& tensor = value.toTensor();
        if (to_be_cast(tensor, dtype)) {
          value = cast(tensor, dtype, device_, is_capturing_);
        }
      } else if (value.isTensorList()) {
        c10::List<Tensor> casts;
        for (const Tensor& tensor : value.toTensorVector()) {
          casts.push_back(to_be_cast(tensor, dtype) ? cast(tensor, dtype, device_, is_capturing_) : tensor);
        }
        value = std::move(casts);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> casts;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
          const bool change = tensor && to_be_cast(*tensor, dtype);
          casts.push_back(change ? std::optional<Tensor>(cast(*tensor, dtype, device_, is_capturing_)) : tensor);
        }
        value = std::move(casts);
      }
    }
  }

  // Whether the eligible inputs have different dtypes.
  bool mixed(torch::jit::Stack* stack) const {
    Promotion promotion{device_};
    for (const size_t position : tensors_) {
      const c10::IValue& value = argument(stack, position);
      if (value.isTensor()) {
        promotion.look(value.toTensor());
      } else if (value.isTensorList()) {
        for (const Tensor& tensor : value.toTensorVector()) {
          promotion.look(tensor);
        }
      } else if (value.isOptionalTensorList()) {
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
          promotion.look(tensor);
        }
      }
    }
    return promotion.different;
  }

  const Op op_;
  const DeviceType device_;
  const DispatchKey key_;
  const c10::DispatchKeySet device_keys_, skipped_;
  py::object is_capturing_;  // empty where the backend never captures
  size_t arity_ = 0;
  std::vector<size_t> tensors_;
  std::optional<size_t> optional_dtype_;
  std::once_flag searched_;
  std::optional<c10::OperatorHandle> with_dtype_;
};

// torch warns, once in a process, that a kernel is overridden: that is what is meant here.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The kernels at one device's key; they are gone, and those before them back, when this is.
class Library {
 public:
  Library(std::string space, const std::string& device_type, const std::string& key)
      : device_(c10::Device(device_type).type()),
        key_(c10::parseDispatchKey(key)),
        library_(std::in_place, torch::Library::IMPL, std::move(space), std::optional(key_), __FILE__, __LINE__) {}

  void impl(const std::string& name, int64_t number, int policy, std::string refusal, py::object is_capturing) {
    if (is_capturing.is_none()) {
      is_capturing = py::object();
    }
    const auto dot = name.find('.');
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
        name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
    Op op{number, name, static_cast<Policy>(policy), std::move(refusal)};
    NoWarnings no_warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
    auto kernel = std::make_unique<Kernel>(std::move(op), handle, device_, key_, std::move(is_capturing));
    const bool in_table = static_cast<Policy>(policy) != Policy::kNone;
    library_->impl(
        name.c_str(),
        in_table ? function(handle, std::move(kernel)) : torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }

  void fallthrough() { library_->fallback(torch::CppFunction::makeFallthrough()); }

  void remove() { library_.reset(); }

 private:
  // The matrix products have few signatures; torch's own ops of these go without a stack. What another's kernels are
  // declared with is not known, and has to be the same to the letter.
  static torch::CppFunction function(const c10::OperatorHandle& handle, std::unique_ptr<Kernel> kernel) {
    std::string signature;
    for (const auto& argument : handle.schema().arguments()) {
      signature += argument.real_type()->str() + " ";
    }
    for (const auto& value : handle.schema().returns()) {
      signature += "-> " + value.real_type()->str();
    }
    if (handle.schema().getNamespace() == std::string_view("aten") && !handle.schema().is_mutable()) {
      if (signature == "Tensor Tensor -> Tensor") {
        return unboxed<const Tensor&, const Tensor&>(handle, std::move(kernel));
      }
      if (signature == "Tensor Tensor Tensor? -> Tensor") {
        return unboxed<const Tensor&, const Tensor&, const std::optional<Tensor>&>(handle, std::move(kernel));
      }
      if (signature == "Tensor Tensor Tensor Scalar Scalar -> Tensor") {
        using Scalar = const at::Scalar&;
        return unboxed<const Tensor&, const Tensor&, const Tensor&, Scalar, Scalar>(handle, std::move(kernel));
      }
    }
    return torch::CppFunction::makeFromBoxedFunctor(std::move(kernel));
  }

  template <class... Args>
  static torch::CppFunction unboxed(const c10::OperatorHandle& handle, std::unique_ptr<Kernel> kernel) {
    return torch::CppFunction(
        [op = handle.typed<Tensor(Args...)>(), kernel = std::shared_ptr<Kernel>(std::move(kernel))](
            c10::DispatchKeySet keys, Args... args) -> Tensor { return kernel->template call<Args...>(op, keys, args...); });
  }

  const DeviceType device_;
  const DispatchKey key_;
  std::optional<torch::Library> library_;
};

PyMethodDef functions[] = {
    {"enter",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&enter)),
     METH_FASTCALL,
     "Enter a region on this thread."},
    {"leave", &leave, METH_O, "Leave the innermost region that an owner entered on this thread."},
    {"dtype", &dtype, METH_O, "Return the fast dtype of a device on this thread."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Overlay, std::shared_ptr<Overlay>>(module, "Overlay", py::module_local())
      .def(py::init([](const std::unordered_map<int64_t, int>& policies) {
        auto overlay = std::make_shared<Overlay>();
        for (const auto& [number, policy] : policies) {
          overlay->policies.emplace(number, static_cast<Policy>(policy));
        }
        return overlay;
      }));
  py::class_<Store, std::shared_ptr<Store>>(module, "Store", py::module_local())
      .def(
          py::init([](std::optional<size_t> max_bytes, bool verify) {
            return std::make_shared<Store>(false, max_bytes, verify);
          }))
      .def("clear", &Store::clear, py::call_guard<py::gil_scoped_release>())
      .def("statistics", [](Store& store) {
        const Statistics now = store.statistics();
        return py::make_tuple(now.entries, now.bytes, now.hits, now.misses, now.evictions);
      });
  py::class_<Library>(module, "Library", py::module_local())
      .def(py::init<std::string, const std::string&, const std::string&>())
      .def("impl", &Library::impl)
      .def("fallthrough", &Library::fallthrough)
      .def("remove", &Library::remove);
  module.def("last", &last);
  module.def("innermost", &innermost);
  module.def("nesting", &nesting);
  module.def("open_regions", &open_regions);
  module.def("clear_own_casts", &clear_own_casts, py::call_guard<py::gil_scoped_release>());
  module.def(
      "bind",
      [](const std::vector<std::string>& policies, py::object form, py::object store, py::object error, std::string text) {
        TORCH_CHECK(std::equal(policies.begin(), policies.end(), kPolicyNames.begin(), kPolicyNames.end()));
        form_of = form.release().ptr();
        store_of = store.release().ptr();
        stale_weight_error = error.release().ptr();
        stale_weight_message = std::move(text);
      });
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) {
    throw py::error_already_set();
  }
}
