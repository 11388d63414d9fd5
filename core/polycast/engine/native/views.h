// Views of weights, such as `w.T`, `w[:512]` or an expert `w[i]`; autograd knows the weight that a view was made of.
//
// A view of the whole weight is served from the weight's cached cast. A view of a part has a cached cast of its own, in user
// stores only: a region caches nothing that torch would not. A prepacked view has an entry of its own, whole or not. A view
// shares its weight's version counter, so the weight's stamp covers it. Each use of a view gets its own autograd history, as in
// torch: a shared one would accumulate the gradients of several uses in the fast dtype.

#pragma once

#include <torch/csrc/autograd/variable.h>

#include "python.h"
#include "version_stamp.h"

namespace {

bool is_weight(const Tensor& tensor, bool for_prepacking);

// Return whether forward-mode AD may track a tensor, given its metadata. A view gets the tangent of its base when it is asked for.
C10_ALWAYS_INLINE bool has_tangent(const torch::autograd::AutogradMeta* meta) {
  if (meta == nullptr || meta->fw_grad_ != nullptr) {
    return meta != nullptr;
  }
  const auto* const views = meta->is_view_ ? static_cast<const torch::autograd::DifferentiableViewMeta*>(meta) : nullptr;
  if (views == nullptr || !views->has_fw_view()) {
    return false;
  }
  const auto* const base = torch::autograd::impl::get_autograd_meta(views->get_forward_view().base_);
  return base != nullptr && base->fw_grad_ != nullptr;
}

// Return the weight that a tensor is a plain view of, or null. The most selective checks come first.
C10_NOINLINE const Tensor* viewed_weight(const Tensor& view, bool for_prepacking) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(view);
  const auto* const views = static_cast<const torch::autograd::DifferentiableViewMeta*>(meta);
  if (meta == nullptr || !meta->is_view_ || !views->has_bw_view()) {
    return nullptr;
  }
  const Tensor& base = views->get_backward_view().base_;
  const TensorImpl* const impl = view.unsafeGetTensorImpl();
  if (!is_weight(base, for_prepacking) || view.scalar_type() != base.scalar_type() || view.layout() != at::kStrided || view.is_inference() ||
      impl->key_set().has_any(c10::DispatchKeySet({DispatchKey::Python, DispatchKey::Negative}))) {
    return nullptr;
  }
  const PyObject* const object = impl->pyobj_slot()->load_pyobj();
  if (object != nullptr && reinterpret_cast<const PyObject*>(Py_TYPE(object)) != THPVariableClass) {
    return nullptr;
  }
  // No tangent, whether the view's own or that of a tensor which forward-mode AD treats it as a view of.
  if (meta->fw_grad_ != nullptr || (views->has_fw_view() && !views->shared_view_info())) {
    return nullptr;
  }
  // Either may have been moved to other memory since. Overlapping elements are not worth a cast of each.
  return storage_of(view) == storage_of(base) && view.numel() <= base.numel() && version_of(view) == version_of(base)
      ? &base
      : nullptr;
}

// Return whether a view has each element of a weight exactly once.
bool covers(const Tensor& view, const Tensor& weight) {
  return view.numel() == weight.numel() && view.storage_offset() == weight.storage_offset() &&
      view.is_non_overlapping_and_dense() && weight.is_non_overlapping_and_dense();
}

// The tensor to cast or prepack, and the weight that its cache entry belongs to; they differ for a view.
struct Source {
  const Tensor& tensor;
  const Tensor& weight;
  uint64_t view = 0;  // hash of the layout; 0 for the weight itself

  Source(const Tensor& weight) : tensor(weight), weight(weight) {}  // NOLINT: implicit

  Source(const Tensor& view, const Tensor& weight) : tensor(view), weight(weight), view(layout_of(view, weight)) {}

  Key key(ScalarType dtype, int prepack_id = 0) const {
    return {weight.unsafeGetTensorImpl(), dtype, prepack_id, view};
  }

 private:
  static uint64_t layout_of(const Tensor& view, const Tensor& weight) {
    const auto sizes = view.sizes(), strides = view.strides();
    if (view.storage_offset() == weight.storage_offset() && sizes == weight.sizes() && strides == weight.strides()) {
      return 0;
    }
    uint64_t hash = sizes.size();
    hash = mixed(hash, view.storage_offset());
    for (size_t i = 0; i < sizes.size(); ++i) {
      hash = mixed(mixed(hash, sizes[i]), strides[i]);
    }
    return hash | 1;  // never 0
  }
};

// Return the cast of a view of a whole weight, without history, on the memory of the weight's cast.
Tensor with_layout_of_view(const Tensor& cast, const Tensor& view) {
  const TensorImpl* const impl = cast.unsafeGetTensorImpl();
  auto alias = impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true);
  alias->set_sizes_and_strides(view.sizes(), view.strides());
  alias->set_allow_tensor_metadata_change(false);
  alias->set_autograd_meta(nullptr);
  return Tensor(std::move(alias));
}

}  // namespace
