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
PyObject* kept_cast_of_traced = nullptr;

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

// Whether a cast of a tensor may be kept now. Python may run, and the region end.
bool may_be_kept(const Tensor& tensor, ScalarType dtype, const Object& is_capturing) {
  return dtype != at::kFloat && is_weight(tensor) && at::autocast::is_autocast_cache_enabled() && caching_is_safe() &&
      !captures(tensor, is_capturing);
}

// Return the cast of what stands for a weight in code that is being compiled, or an undefined tensor.
Tensor cast_of_traced(const Tensor& tensor, ScalarType dtype, DeviceType device) {
  if (tensor.scalar_type() != at::kFloat || !tensor.key_set().has(DispatchKey::Python)) {
    return Tensor();
  }
  const Gil gil;
  const std::string on = c10::DeviceTypeName(device, /*lower_case=*/true);
  const Object cast =
      call(kept_cast_of_traced, "(NOs)", python_tensor(tensor).release(), python_dtype(dtype), on.c_str());
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

Tensor find_or_cast(
    const Tensor& tensor, const CastTo& to, const DeviceRegion& region, const Object& is_capturing, SeenCast& seen) {
  if (region.innermost == nullptr) {
    seen.in_torchs_region = true;
    return at::autocast::cached_cast(to.dtype, tensor, to.device);  // a region of torch's has torch's cache
  }
  if (may_be_kept(tensor, to.dtype, is_capturing) && region.innermost != nullptr) {
    seen.looked_for = true;
    seen.made = false;
    if (region.store == nullptr) {
      if (const Tensor* const found = region.casts->find(tensor, to.dtype)) {
        return *found;
      }
    }
    // From here on Python may run, and the region end.
    const std::shared_ptr<Store> store = region.store == nullptr ? nullptr : region.store->shared_from_this();
    const std::shared_ptr<ThreadRegions> regions = this_thread.regions;
    if (store == nullptr) {
      return regions->casts.cast(tensor, to.dtype, seen.made);
    }
    return wants_history(tensor) ? regions->casts.with_link(tensor, to.dtype, *store, seen.made)
                                 : store->cast(tensor, to.dtype, seen.made);
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
  SeenCast seen{has_known_sizes(tensor) && is_weight(tensor)};
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
