// A weight and a cast of it: what tells that a weight is still what it was, and how a cast is made.
//
// Owns nothing but weak references: to a weight, so that its address, which is the key, is not given to another tensor, and
// to its storage, for freed memory may be given to another storage. Locks: none.

#pragma once

#include <ATen/MapAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "python.h"

namespace torch::autograd::generated {
#include "excerpt_ToCopyBackward0.h"
}

namespace {  // all is one unit, binding.cpp

using c10::StorageImpl;
using c10::TensorImpl;

// Of a cast of a weight; of what it was packed into, which has no dtype, the kind of packing.
struct Key {
  TensorImpl* weight;
  ScalarType dtype;
  int packing = 0;
  bool operator==(const Key& other) const {
    return weight == other.weight && dtype == other.dtype && packing == other.packing;
  }
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<void*>()(key.weight) * 31 + static_cast<size_t>(key.dtype) + static_cast<size_t>(key.packing) * 1021;
  }
};

const StorageImpl* storage_of(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// What a weight was when a cast of it was made.
//
// What can make a kept cast wrong, and what sees it:
//   an in-place op, an optimizer's step, load_state_dict    the version
//   weight.data = ..., set_, resize_                        the storage, the address, sizes and strides
//   another tensor at the address of a dead one             the weak references
//   ops that write and count no version                     writes.h
//   memory that another process writes                      is_shared(): no cast of it is kept
//   a write through .data, NumPy, DLPack, a raw pointer     nothing; WeightCache(verify=True) finds it
//
// And of the cast itself:
//   who was given it writes it                              its version: is_unwritten()
//   a stream that has not seen it made, or uses it longer   the streams that may use it; share_between()
class Content {
 public:
  explicit Content(const Tensor& weight)
      : weight_(weight.getIntrusivePtr()),
        storage_(weight.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl()),
        data_(weight.const_data_ptr()),
        version_(weight._version()),
        sizes_(weight.sizes()),
        strides_(weight.strides()) {}

  // Whether a weight, whose key this is found by, is what it was.
  bool is_that_of(const Tensor& weight) const {
    const TensorImpl* const impl = weight.unsafeGetTensorImpl();
    return version_ == impl->version_counter().current_version() && data_ == impl->data() &&
        storage_._unsafe_get_target() == storage_of(weight) && weight.sizes() == c10::IntArrayRef(sizes_) &&
        weight.strides() == c10::IntArrayRef(strides_);
  }

  const StorageImpl* storage() const { return storage_._unsafe_get_target(); }
  bool weight_is_alive() const { return weight_.use_count() > 0; }

 private:
  c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl> weight_;
  c10::weak_intrusive_ptr<StorageImpl> storage_;
  const void* data_;
  uint32_t version_;
  c10::DimVector sizes_, strides_;
};

// Whether another process may write a weight's memory. torch's own memory is told by its deleter; few weights have another.
bool is_shared(const Tensor& weight) {
  const c10::DataPtr& data = weight.unsafeGetTensorImpl()->unsafe_storage().data_ptr();
  if (!weight.device().is_cpu() || data.get_deleter() == c10::GetAllocator(c10::DeviceType::CPU)->raw_deleter()) {
    return false;
  }
  if (const auto* const mapped = at::MapAllocator::fromDataPtr(data)) {
    return (mapped->flags() & (at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM)) != 0;
  }
  const Gil gil;
  return is_true(Object::made(PyObject_CallMethod(python_tensor(weight).get(), "is_shared", nullptr)));
}

// The stream that work on a tensor is given to now; none on the CPU.
std::optional<c10::Stream> current_stream(const Tensor& tensor) {
  const auto device = tensor.device();
  if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Have a stream wait for what another was given so far, a cast among it, and the memory of the cast for the stream.
void share_between(const Tensor& cast, const c10::Stream& made_on, const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl device(stream.device_type());
  c10::Event made(stream.device_type());
  made.record(made_on);
  made.block(stream);
  device.recordDataPtrOnStream(cast.storage().data_ptr(), stream);
}

// Whether the device records a graph now. `is_capturing` is the backend's own answer, empty where it has none: then the
// device's stream is asked, where this torch's streams can tell.
template <class Stream = c10::Stream>
bool captures(const Tensor& tensor, const Object& is_capturing) {
  if (is_capturing) {
    const Gil gil;
    return is_true(call(is_capturing.get()));
  }
  if constexpr (requires(const Stream& stream) { stream.is_capturing(); }) {
    const std::optional<Stream> stream = current_stream(tensor);
    try {
      return stream && stream->is_capturing();
    } catch (const c10::Error& error) {  // what torch 2.12 has where newer ones say no: for a device without graphs
      if (error.msg().find("stream capture query") == std::string::npos) {
        throw;
      }
    }
  }
  return false;
}

// Return a weight in another dtype, without history. `reusable` is a former cast that nothing else holds, or undefined: its
// memory is written again where a new cast would lie the same way in it. Not on devices with streams: what reads it may still
// be to run there, and torch's allocator, which knows on which of them, gives the same memory as fast.
Tensor make_cast(const Tensor& weight, ScalarType dtype, Tensor reusable = {}) {
  std::optional<c10::InferenceMode> normal_tensors;  // one made in inference mode could not be saved for a backward
  if (c10::InferenceMode::is_enabled()) {
    normal_tensors.emplace(false);
  }
  // A weight is a plain leaf: autograd has nothing to do for a cast without history.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (reusable.defined() && reusable.use_count() == 1 && reusable.storage().use_count() == 1 &&
      reusable.scalar_type() == dtype && reusable.device().is_cpu() && weight.device().is_cpu() && reusable.sizes() == weight.sizes() &&
      weight.is_non_overlapping_and_dense() && reusable.strides() == weight.strides()) {
    reusable.copy_(weight);
    return reusable;
  }
  reusable.reset();  // before the new memory is asked for: it is the next to be given out
  return weight.to(dtype);
}

// Whether nobody has written a cast. What an op that declares no writes does to its inputs it does to this.
bool is_unwritten(const Tensor& cast) { return cast.unsafeGetTensorImpl()->version_counter().current_version() == 0; }

// Return another tensor on the memory of a cast, without history; a write of one is seen of both.
Tensor alias_of(const Tensor& cast) {
  const TensorImpl* const impl = cast.unsafeGetTensorImpl();
  auto alias = impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false);
  alias->set_autograd_meta(nullptr);
  return Tensor(std::move(alias));
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

// Give a cast that autograd has not seen the history that weight.to(dtype) would have.
void set_history_of(const Tensor& cast, const Tensor& weight) {
  const auto node = new_node<decltype(torch::autograd::Edge::function)>();
  node->set_next_edges(torch::autograd::collect_next_edges(weight));
  node->self_options = weight.options();
  torch::autograd::set_history(cast, node);
}

// Return a tensor on the memory of `cast` with that history.
Tensor with_history(const Tensor& cast, const Tensor& weight) {
  Tensor linked = alias_of(cast);
  set_history_of(linked, weight);
  return linked;
}

bool wants_history(const Tensor& weight) { return weight.requires_grad() && at::GradMode::is_enabled(); }

}  // namespace
