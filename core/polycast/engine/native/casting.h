// Which tensors are cast, which of them are weights, and whether the cast of a weight is kept.
//
// Owns nothing. Locks: none. The GIL is taken to ask Python whether a device captures a graph: with no lock of a store held.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "autocast.h"
#include "observed.h"
#include "regions.h"
#include "store.h"

namespace {  // all is one unit, binding.cpp

// Set by bind(); it lives as long as the process.
PyObject* cached_cast_of_traced = nullptr;

C10_ALWAYS_INLINE bool is_eligible(const Tensor& tensor, DeviceType device) {
  return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble &&
      tensor.device().type() == device;
}

// A weight is a float32 leaf that requires grad, or a Parameter that does not. Subclasses other than Parameter are not.
// One with a tangent of forward-mode differentiation is left alone: a kept cast would be without it.
// What is packed may be narrower.
bool is_weight(const Tensor& tensor, bool to_pack = false) {
  const TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const ScalarType dtype = tensor.scalar_type();
  const bool may_have_dtype = dtype == at::kFloat || (to_pack && (dtype == at::kBFloat16 || dtype == at::kHalf));
  if (!may_have_dtype || tensor.layout() != at::kStrided || !impl->has_storage() || tensor.is_inference() ||
      tensor.is_nested() || impl->key_set().has_any(c10::DispatchKeySet({DispatchKey::Python, DispatchKey::Negative}))) {
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

// Return the weight that a tensor is, or is a view of, or null.
C10_ALWAYS_INLINE const Tensor* weight_of(const Tensor& tensor, bool to_pack = false) {
  return is_weight(tensor, to_pack) ? &tensor : viewed_weight(tensor, to_pack);
}

// Not while something records, transforms or watches the ops.
bool caching_is_safe() {
  static constexpr c10::DispatchKeySet kWatchers{
      DispatchKey::Python, DispatchKey::Tracer, DispatchKey::FuncTorchDynamicLayerFrontMode};
  return !c10::impl::tls_local_dispatch_key_set().included_.has_any(kWatchers);
}

// Whether autograd has to see an argument: for a gradient, where these are recorded, or a tangent.
struct Differentiation {
  const bool grad = at::GradMode::is_enabled();

  bool has(const Tensor& tensor) const {
    if (!tensor.defined()) {  // a bias that is not there, which torch's cells of recurrent networks give
      return false;
    }
    const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
    return meta != nullptr && ((grad && tensor.requires_grad()) || meta->fw_grad_ != nullptr);
  }

  bool has(const std::optional<Tensor>& tensor) const { return tensor && has(*tensor); }

  bool has(at::TensorList tensors) const {
    return std::any_of(tensors.begin(), tensors.end(), [this](const Tensor& tensor) { return has(tensor); });
  }

  bool has(const at::ITensorListRef& tensors) const {
    return std::any_of(tensors.begin(), tensors.end(), [this](const Tensor& tensor) { return has(tensor); });
  }

  template <class Other>
  bool has(const Other&) const {
    return false;
  }
};

// Return the weight whose cast may be kept now, if a tensor is one or a view of one, or null. Python may run, and the region end.
C10_ALWAYS_INLINE const Tensor* weight_to_keep(const Tensor& tensor, ScalarType dtype, const Object& is_capturing) {
  const Tensor* const weight = dtype == at::kFloat ? nullptr : weight_of(tensor);
  const bool may_be_kept = weight != nullptr && at::autocast::is_autocast_cache_enabled() && caching_is_safe() &&
      !captures(tensor, is_capturing);
  return may_be_kept ? weight : nullptr;
}

// Return the cast of what stands for a weight in code that is being compiled, or an undefined tensor.
Tensor cast_of_traced(const Tensor& tensor, ScalarType dtype, DeviceType device) {
  if (tensor.scalar_type() != at::kFloat || !tensor.key_set().has(DispatchKey::Python)) {
    return Tensor();
  }
  const Gil gil;
  const std::string on = c10::DeviceTypeName(device, /*lower_case=*/true);
  const Object cast =
      call(cached_cast_of_traced, "(NOs)", python_tensor(tensor).release(), python_dtype(dtype), on.c_str());
  return cast.is_none() ? Tensor() : tensor_of(cast.get());
}

// What a tensor is cast to.
struct CastTo {
  ScalarType dtype;
  DeviceType device;
  bool has_plain_keys;  // nothing but autograd is between here and the device's kernels
};

Tensor plain_cast(const Tensor& tensor, const CastTo& to) {
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
  if (to.has_plain_keys && !Differentiation().has(tensor)) {
    below_autograd.emplace();
  }
  return tensor.to(to.dtype);
}

// Return the cast of a view of a weight: all of it by way of the weight's own cast, a part where a user's store keeps one; else an
// undefined tensor.
C10_NOINLINE Tensor
cast_of_view(const Tensor& view, const Tensor& viewed, ScalarType dtype, const DeviceRegion& region, SeenCast& seen) {
  const bool is_all = is_all_of(view, viewed);
  if (!is_all && region.store == nullptr) {
    return Tensor();
  }
  seen.looked_for = true;
  seen.made = false;
  const Wanted wanted = Wanted::by_view(view);
  Tensor cast;
  if (const Tensor* found; region.store == nullptr && (found = region.casts->find(viewed, dtype, wanted)) != nullptr) {
    cast = *found;
  } else {
    // From here on Python may run, and the region end.
    const Tensor weight = viewed;
    if (region.store != nullptr) {
      const std::shared_ptr<Store> store = region.store->shared_from_this();
      cast = store->cast(is_all ? Source(weight) : Source(view, weight), dtype, seen.made);
    } else {
      const std::shared_ptr<ThreadRegions> regions = this_thread.regions;
      cast = regions->casts.cast(weight, dtype, wanted, seen.made);
    }
  }
  if (is_all) {
    cast = seen_as(cast, view);
  } else if (wanted.held_by_graph) {
    cast = alias_of(cast);
  }
  if (wanted.held_by_graph) {
    set_history_of(cast, view);
  }
  return cast;
}

Tensor find_or_cast(
    const Tensor& tensor, const CastTo& to, const DeviceRegion& region, const Object& is_capturing, SeenCast& seen) {
  if (region.innermost == nullptr) {
    seen.in_torchs_region = true;
    return at::autocast::cached_cast(to.dtype, tensor, to.device);  // a region of torch's has torch's cache
  }
  const Tensor* const weight = weight_to_keep(tensor, to.dtype, is_capturing);
  if (weight == &tensor && region.innermost != nullptr) {
    seen.looked_for = true;
    seen.made = false;
    const Wanted wanted = Wanted::by_weight(tensor);
    if (region.store == nullptr) {
      if (const Tensor* const found = region.casts->find(tensor, to.dtype, wanted)) {
        return *found;
      }
    }
    // From here on Python may run, and the region end.
    const std::shared_ptr<Store> store = region.store == nullptr ? nullptr : region.store->shared_from_this();
    const std::shared_ptr<ThreadRegions> regions = this_thread.regions;
    if (store == nullptr) {
      return regions->casts.cast(tensor, to.dtype, wanted, seen.made);
    }
    return wanted.link ? regions->casts.with_link(tensor, to.dtype, *store, seen.made)
                       : store->cast(tensor, to.dtype, seen.made);
  }
  if (weight != nullptr && region.innermost != nullptr) {
    if (Tensor cast = cast_of_view(tensor, *weight, to.dtype, region, seen); cast.defined()) {
      return cast;
    }
  }
  if (C10_UNLIKELY(to.dtype != at::kFloat && !caching_is_safe())) {
    if (Tensor traced = cast_of_traced(tensor, to.dtype, to.device); traced.defined()) {
      return traced;
    }
  }
  return plain_cast(tensor, to);
}

// Cast for an op that somebody observes.
Tensor observed_cast(
    ObservedCall& op, const Tensor& tensor, const CastTo& to, const DeviceRegion& region, const Object& is_capturing) {
  using Clock = std::chrono::steady_clock;
  SeenCast seen{has_known_sizes(tensor) && weight_of(tensor) != nullptr};
  const auto begin = op.is_timed ? Clock::now() : Clock::time_point();
  Tensor cast = find_or_cast(tensor, to, region, is_capturing, seen);
  if (op.is_timed) {
    seen.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  observer.load(std::memory_order_relaxed)->note_cast(op, tensor, cast, seen);
  return cast;
}

// Cast an eligible tensor of another dtype.
C10_NOINLINE Tensor cast(const Tensor& tensor, const CastTo& to, const DeviceRegion& region, const Object& is_capturing) {
  if (C10_UNLIKELY(observed_op != nullptr)) {
    return observed_cast(*observed_op, tensor, to, region, is_capturing);
  }
  SeenCast unseen;
  return find_or_cast(tensor, to, region, is_capturing, unseen);
}

}  // namespace
