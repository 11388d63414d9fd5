// Casts of weights: making one, and giving it an autograd history.

#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "conversions.h"
#include "huge_pages.h"
#include "observed.h"
#include "python.h"
#include "streams.h"
#include "version_stamp.h"

namespace torch::autograd::generated {
#include "excerpt_ToCopyBackward0.h"
}

namespace {

// Let `stream` use a cast that `made_on` makes: order it after the cast, and tell the allocator.
void synchronize_streams(const Tensor& cast, const c10::Stream& made_on, const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl device(stream.device_type());
  c10::Event made(stream.device_type());
  made.record(made_on);
  made.block(stream);
  device.recordDataPtrOnStream(cast.storage().data_ptr(), stream);
}

// Fill a cast of the same layout on the CPU. Profilers see it under the name of torch's kernel.
//
// This is a kernel of the CPU in the core. As an op of the CPU's backend it would be a second library that every user has to compile,
// and a dispatcher call for each cast.
void cast_on_cpu(const Tensor& weight, const Tensor& cast, polycast::CastFloats cast_floats) {
  RECORD_FUNCTION("aten::copy_", (std::array<c10::IValue, 2>{cast, weight}));
  const auto* const from = static_cast<const float*>(weight.const_data_ptr());
  auto* const to = static_cast<uint16_t*>(cast.mutable_data_ptr());
  ObservedCall* const op = observed_op;  // of this thread
  polycast::for_each_part(weight.numel(), polycast::kGrain, [&](int64_t begin, int64_t end) {
    if (op != nullptr && op->cast_floats != nullptr) {
      op->cast_floats(*op, cast_floats, from + begin, to + begin, end - begin, cast.scalar_type());
    } else {
      cast_floats(from + begin, to + begin, end - begin);
    }
  });
}

// Return a weight in another dtype, without history. `reusable` is undefined, or an old cast whose memory is written again if
// nothing else holds it and the new cast has the same layout. On the CPU only: a kernel on a stream may still read it. `lasts`: the
// cast will be read over and over.
Tensor make_cast(const Tensor& weight, ScalarType dtype, Tensor reusable = {}, bool lasts = false) {
  const bool reuses = reusable.defined() && reusable.use_count() == 1 && reusable.storage().use_count() == 1 &&
      reusable.scalar_type() == dtype && reusable.device().is_cpu() && weight.device().is_cpu() &&
      reusable.sizes() == weight.sizes() && weight.is_non_overlapping_and_dense() && reusable.strides() == weight.strides();
  if (!reuses) {
    reusable.reset();  // before allocating, so that the allocator may return the same memory; may run Python
  }
  std::optional<c10::InferenceMode> normal_tensors;  // an inference tensor could not be saved for backward
  if (c10::InferenceMode::is_enabled()) {
    normal_tensors.emplace(false);
  }
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    const at::NoGradGuard no_history;
    return weight.to(dtype);  // as they would see torch cast it
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const polycast::CastFloats cast_floats = weight.scalar_type() == at::kFloat ? polycast::cast_floats_to(dtype) : nullptr;
  if (cast_floats != nullptr && polycast::is_convertible(weight)) {
    if (!reuses && lasts) {
      reusable = polycast::zeros_in_huge_pages(weight.sizes(), dtype, weight.strides());
    }
    if (!reusable.defined()) {
      reusable = weight.new_empty_strided(weight.sizes(), weight.strides(), weight.options().dtype(dtype));
    }
    cast_on_cpu(weight, reusable, cast_floats);
    return reusable;
  }
  return reuses ? reusable.copy_(weight) : weight.to(dtype);
}

// Return whether nothing has written to a cast. An op may write to its inputs, or return one that the caller writes to.
bool is_unwritten(const Tensor& cast) { return version_of(cast) == 0; }

// Return another tensor on the memory of a cast, without history, with the same version counter.
Tensor alias_of(const Tensor& cast) {
  const TensorImpl* const impl = cast.unsafeGetTensorImpl();
  auto alias = impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false);
  alias->set_autograd_meta(nullptr);
  return Tensor(std::move(alias));
}

// Return a node for the backward of a cast. Versions of torch differ in the type that holds nodes.
template <class NodePtr, class Node = torch::autograd::generated::ToCopyBackward0>
auto new_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<Node>(new Node(), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Node>();
  }
}

bool needs_history(const Tensor& weight) { return weight.requires_grad() && at::GradMode::is_enabled(); }

// Give a cast the autograd history of weight.to(dtype).
void set_history(const Tensor& cast, const Tensor& weight) {
  const auto node = new_node<decltype(torch::autograd::Edge::function)>();
  node->set_next_edges(torch::autograd::collect_next_edges(weight));
  node->self_options = weight.options();
  torch::autograd::set_history(cast, node);
}

// Return a tensor on the memory of a cast, with autograd history.
Tensor with_history(const Tensor& cast, const Tensor& weight) {
  Tensor result = alias_of(cast);
  set_history(result, weight);
  return result;
}

}  // namespace
