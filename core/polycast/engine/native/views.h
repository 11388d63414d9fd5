// Views of weights: `w.T`, `w[:512]`, an expert `w[i]`. autograd knows the weight that a view was made of.
//
// A view of all of a weight is served from the cast that is kept of the weight. A part has a cast of its own, in a user's store
// only: a region's stores nothing that torch would not. What a view is packed into is kept for the view, whole or not.
//
// A view and its weight have one version, so what tells that a weight was written tells it of its views. The history of a view
// is that of one use, as torch's is: to share one would add up the gradients of several uses in the fast dtype.
//
// Owns nothing. Locks: none.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>

#include "content.h"
#include "python.h"
#include "weights.h"

namespace {  // all is one unit, binding.cpp

bool is_weight(const Tensor& tensor, bool to_pack);

// Return the weight that a tensor is a plain view of, or null. Most tensors that are no weights are no views either, and most
// views are not of weights: the checks are in that order.
C10_NOINLINE const Tensor* viewed_weight(const Tensor& view, bool to_pack) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(view);
  if (meta == nullptr || !meta->is_view_) {
    return nullptr;
  }
  const auto* const views = static_cast<const torch::autograd::DifferentiableViewMeta*>(meta);
  if (!views->has_bw_view()) {
    return nullptr;
  }
  const Tensor& base = views->get_backward_view().base_;
  const TensorImpl* const impl = view.unsafeGetTensorImpl();
  const TensorImpl* const weight = base.unsafeGetTensorImpl();
  if (!is_weight(base, to_pack) || impl->dtype() != weight->dtype() || view.layout() != at::kStrided || view.is_inference() ||
      impl->key_set().has_any(c10::DispatchKeySet({DispatchKey::Python, DispatchKey::Negative}))) {
    return nullptr;
  }
  const PyObject* const object = impl->pyobj_slot()->load_pyobj();
  if (object != nullptr && reinterpret_cast<const PyObject*>(Py_TYPE(object)) != THPVariableClass) {
    return nullptr;
  }
  // A tangent may be the view's own, or that of another tensor that forward-mode differentiation takes it for a view of.
  if (meta->fw_grad_ != nullptr || (views->has_fw_view() && !views->shared_view_info())) {
    return nullptr;
  }
  // Either may have been given other memory since. Elements that lie in one place several times are not worth a cast of each.
  return storage_of(view) == storage_of(base) && view.numel() <= base.numel() &&
          impl->version_counter().current_version() == weight->version_counter().current_version()
      ? &base
      : nullptr;
}

// Whether a view has each element of a weight once, and so is the weight in other sizes and strides.
bool is_all_of(const Tensor& view, const Tensor& weight) {
  return view.numel() == weight.numel() && view.storage_offset() == weight.storage_offset() &&
      view.is_non_overlapping_and_dense() && weight.is_non_overlapping_and_dense();
}

// What is cast or packed, and what that is kept for: a weight, for itself, or a view, for its weight.
struct Source {
  const Tensor& tensor;
  const Tensor& weight;
  uint64_t view = 0;  // which one, by a hash of where it lies; 0: the weight itself

  Source(const Tensor& weight) : tensor(weight), weight(weight) {}  // NOLINT: implicit

  Source(const Tensor& view, const Tensor& weight) : tensor(view), weight(weight), view(place_of(view, weight)) {}

  Key key(ScalarType dtype, int packing = 0) const { return {weight.unsafeGetTensorImpl(), dtype, packing, view}; }

 private:
  static uint64_t place_of(const Tensor& view, const Tensor& weight) {
    const auto sizes = view.sizes(), strides = view.strides();
    if (view.storage_offset() == weight.storage_offset() && sizes == weight.sizes() && strides == weight.strides()) {
      return 0;
    }
    uint64_t hash = sizes.size();
    const auto add = [&hash](int64_t number) { hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29; };
    add(view.storage_offset());
    for (size_t i = 0; i < sizes.size(); ++i) {
      add(sizes[i]);
      add(strides[i]);
    }
    return hash | 1;  // never 0
  }
};

// Return the cast of a view of all of a weight, without history, on the memory of the weight's cast.
Tensor seen_as(const Tensor& cast, const Tensor& view) {
  const TensorImpl* const impl = cast.unsafeGetTensorImpl();
  auto alias = impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true);
  alias->set_sizes_and_strides(view.sizes(), view.strides());
  alias->set_allow_tensor_metadata_change(false);
  alias->set_autograd_meta(nullptr);
  return Tensor(std::move(alias));
}

}  // namespace
