// A weight and a cast of it: whether it can be kept, and how it is made.
//
// Owns nothing. Locks: none.

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

#include "content.h"
#include "host_cast.h"
#include "python.h"
#include "streams.h"

namespace torch::autograd::generated {
#include "excerpt_ToCopyBackward0.h"
}

namespace {  // all is one unit, binding.cpp

// Set by bind(): what frees a part of a storage, as files are read and mapped.
c10::DeleterFnPtr frees_part_of_storage = nullptr;

// Who else may write a weight's memory without a tensor: nobody; this process, such as the NumPy array whose memory it is; other
// processes. torch's own memory is told by its deleter; few weights have another.
enum class Memory : uint8_t { kTorchs, kForeign, kShared };

Memory memory_of(const Tensor& weight) {
  const c10::Storage& storage = weight.unsafeGetTensorImpl()->unsafe_storage();
  const c10::DataPtr& data = storage.data_ptr();
  if (!weight.device().is_cpu() || data.get_deleter() == c10::GetAllocator(c10::DeviceType::CPU)->raw_deleter()) {
    return Memory::kTorchs;
  }
  if (const auto* const mapped = at::MapAllocator::fromDataPtr(data)) {
    const bool is_shared = (mapped->flags() & (at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM)) != 0;
    return is_shared ? Memory::kShared : Memory::kTorchs;
  }
  const Gil gil;
  const Object object = Object::made(torch::createPyObject(storage));
  if (is_true(Object::made(PyObject_CallMethod(object.get(), "is_shared", nullptr)))) {
    return Memory::kShared;
  }
  return data.get_deleter() == frees_part_of_storage ? Memory::kTorchs : Memory::kForeign;
}

// Have a stream wait for what another was given so far, a cast among it, and the memory of the cast for the stream.
void share_between(const Tensor& cast, const c10::Stream& made_on, const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl device(stream.device_type());
  c10::Event made(stream.device_type());
  made.record(made_on);
  made.block(stream);
  device.recordDataPtrOnStream(cast.storage().data_ptr(), stream);
}

// Return a weight in another dtype, without history. `reusable` is a former cast that nothing else holds, or undefined: its
// memory is written again where a new cast would lie the same way in it. Not on devices with streams: what reads it may still
// be to run there, and torch's allocator, which knows on which of them, gives the same memory as fast.
Tensor make_cast(const Tensor& weight, ScalarType dtype, Tensor reusable = {}) {
  const bool is_again_as_before = reusable.defined() && reusable.use_count() == 1 && reusable.storage().use_count() == 1 &&
      reusable.scalar_type() == dtype && reusable.device().is_cpu() && weight.device().is_cpu() &&
      reusable.sizes() == weight.sizes() && weight.is_non_overlapping_and_dense() && reusable.strides() == weight.strides();
  if (!is_again_as_before) {
    reusable.reset();  // before the new memory is asked for: it is the next to be given out. This may run Python.
  }
  std::optional<c10::InferenceMode> normal_tensors;  // one made in inference mode could not be saved for a backward
  if (c10::InferenceMode::is_enabled()) {
    normal_tensors.emplace(false);
  }
  // A weight is a plain leaf: autograd has nothing to do for a cast without history.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (casts_in_host_memory(weight, dtype)) {
    if (!is_again_as_before) {
      reusable = weight.new_empty_strided(weight.sizes(), weight.strides(), weight.options().dtype(dtype));
    }
    cast_in_host_memory(weight, reusable);
    return reusable;
  }
  return is_again_as_before ? reusable.copy_(weight) : weight.to(dtype);
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
