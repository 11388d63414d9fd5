// Select the tensors to cast, recognize weights among them, and look casts up in a cache.

#pragma once

#include "autocast.h"
#include "observed.h"
#include "regions.h"
#include "streams.h"

namespace torch::autograd {
int get_current_graph_task_id();  // its header takes long to parse
}

namespace {

// Set by bind().
PyObject* cached_cast_of_traced = nullptr;

C10_ALWAYS_INLINE bool is_eligible(const Tensor& tensor, DeviceType device) {
  return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble &&
      tensor.device().type() == device;
}

// Return whether a dtype is float32, bfloat16 or float16: FLOATS of recipes/in_dtype.py.
C10_ALWAYS_INLINE bool is_fast_or_float32(ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Return whether a tensor is a weight: a float32 leaf that requires grad, or a Parameter that does not; for prepacking, also in
// bfloat16 or float16. Not other subclasses, nor tensors with a forward-mode tangent, which a cached cast would lose, nor, as in
// torch, those that it marks because their values change between uses.
bool is_weight(const Tensor& tensor, bool for_prepacking = false) {
  const TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const ScalarType dtype = tensor.scalar_type();
  const bool may_have_dtype = for_prepacking ? is_fast_or_float32(dtype) : dtype == at::kFloat;
  if (!may_have_dtype || tensor.layout() != at::kStrided || !impl->has_storage() || tensor.is_inference() ||
      tensor.is_nested() || impl->key_set().has_any(c10::DispatchKeySet({DispatchKey::Python, DispatchKey::Negative})) ||
      at::caching::is_cached_tensor(tensor)) {
    return false;
  }
  // The tensor is held, so its Python object is alive, and its type can be read without the GIL.
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
C10_ALWAYS_INLINE const Tensor* weight_of(const Tensor& tensor, bool for_prepacking = false) {
  return is_weight(tensor, for_prepacking) ? &tensor : viewed_weight(tensor, for_prepacking);
}

// The interception of ops: none; by dispatch modes that only see them, as far as known; or by a tracer or functorch transform.
enum class Interception : uint8_t { kNone, kSeen, kTransformed };

Interception interception() {
  static constexpr c10::DispatchKeySet kInterceptors{
      DispatchKey::Python, DispatchKey::Tracer, DispatchKey::FuncTorchDynamicLayerFrontMode};
  const c10::DispatchKeySet active = c10::impl::tls_local_dispatch_key_set().included_ & kInterceptors;
  if (C10_LIKELY(active.empty())) {
    return Interception::kNone;
  }
  return active == c10::DispatchKeySet(DispatchKey::Python) && !is_traced() ? Interception::kSeen : Interception::kTransformed;
}

bool caching_is_safe() { return interception() == Interception::kNone; }

// Whether autograd has to see an argument: it requires grad, in grad mode, or has a forward-mode tangent.
struct Differentiation {
  const bool grad = at::GradMode::is_enabled();

  bool has(const Tensor& tensor) const {
    if (!tensor.defined()) {  // such as the missing bias of torch's recurrent cells
      return false;
    }
    const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
    return meta != nullptr && ((grad && tensor.requires_grad()) || has_tangent(meta));
  }
};

// Return the weight that a tensor is or is a view of, if its cast may be cached now, or null. May run Python.
C10_ALWAYS_INLINE const Tensor* cacheable_weight(const Tensor& tensor, ScalarType dtype, const IsCapturing& is_capturing) {
  const Tensor* const weight = dtype == at::kFloat ? nullptr : weight_of(tensor);
  const bool is_cacheable = weight != nullptr && at::autocast::is_autocast_cache_enabled() && caching_is_safe() &&
      !captures(tensor, is_capturing.function());
  return is_cacheable ? weight : nullptr;
}

// Return the cast of a traced weight in code that is being compiled, or an undefined tensor.
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

// The dtype and the device that the inputs of a call are cast for.
struct CastSpec {
  ScalarType dtype;  // Undefined: none is cast
  DeviceType device;
  bool has_only_autograd;  // only autograd is between the Autocast key and the device's kernel; see Kernel::has_only_autograd()
  const DeviceRegion& region;
  const IsCapturing& is_capturing;

  C10_ALWAYS_INLINE bool applies_to(const Tensor& tensor) const {
    return dtype != ScalarType::Undefined && tensor.scalar_type() != dtype && is_eligible(tensor, device);
  }

  // Return the specification for an item of an argument: the same for all.
  C10_ALWAYS_INLINE const CastSpec& of(size_t, size_t) const { return *this; }
};

// Return whether torch would cache the cast of a tensor where dispatch modes see it: of a weight that requires grad. They may write
// weights unseen, so no other cast is cached there, and none in a user store.
bool is_cached_where_modes_see_casts(const Tensor& tensor, const CastSpec& spec) {
  return interception() == Interception::kSeen && is_weight(tensor) && tensor.requires_grad() &&
      at::autocast::is_autocast_cache_enabled() && !captures(tensor, spec.is_capturing.function()) &&
      spec.region.innermost != nullptr;  // asking whether the device captures may have ended the region
}

Tensor plain_cast(const Tensor& tensor, const CastSpec& spec) {
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
  if (spec.has_only_autograd && !Differentiation().has(tensor)) {
    below_autograd.emplace();
  }
  return tensor.to(spec.dtype);
}

// Return the cast of a weight in this thread's region, with autograd history if grad mode and the weight need one. Set seen.is_new if it
// was cast now.
Tensor cast_of_weight(const Tensor& weight, const CastSpec& spec, SeenCast& seen) {
  const Use use = Use::of_weight(weight);
  if (spec.region.store == nullptr) {
    if (const Tensor* const found = spec.region.casts->find(weight, spec.dtype, use)) {
      return *found;
    }
  }
  // From here on Python may run, and the region end.
  const std::shared_ptr<UserStore> store = spec.region.store == nullptr ? nullptr : spec.region.store->shared_from_this();
  const std::shared_ptr<ThreadRegions> regions = this_thread.regions;
  if (store == nullptr) {
    return regions->casts.cast(weight, spec.dtype, use, seen.is_new);
  }
  return use.history ? regions->casts.cast_with_history(weight, spec.dtype, *store, seen.is_new)
                     : store->cast(weight, spec.dtype, seen.is_new);
}

// Return the cast of a view in this thread's region: of the whole weight through the weight's cast, of a part from a user store.
C10_NOINLINE Tensor cast_of_view(const Tensor& view, const Tensor& viewed, const CastSpec& spec, SeenCast& seen) {
  const bool is_whole = covers(view, viewed);
  const Use use = Use::of_view(view);
  Tensor cast;
  if (const Tensor* found;
      spec.region.store == nullptr && (found = spec.region.casts->find(viewed, spec.dtype, use)) != nullptr) {
    cast = *found;
  } else {
    // From here on Python may run, and the region end.
    const Tensor weight = viewed;
    if (spec.region.store != nullptr) {
      const std::shared_ptr<UserStore> store = spec.region.store->shared_from_this();
      cast = store->cast(is_whole ? Source(weight) : Source(view, weight), spec.dtype, seen.is_new);
    } else {
      const std::shared_ptr<ThreadRegions> regions = this_thread.regions;
      cast = regions->casts.cast(weight, spec.dtype, use, seen.is_new);
    }
  }
  if (is_whole) {
    cast = with_layout_of_view(cast, view);
  } else if (use.held_by_graph) {
    cast = alias_of(cast);
  }
  if (use.held_by_graph) {
    set_history(cast, view);
  }
  return cast;
}

Tensor find_or_cast(const Tensor& tensor, const CastSpec& spec, SeenCast& seen) {
  if (spec.region.innermost == nullptr && !spec.is_capturing.always()) {  // a region of torch's, with torch's cache
    seen.in_torchs_region = true;
    return at::autocast::cached_cast(spec.dtype, tensor, spec.device);
  }
  const Tensor* const weight = cacheable_weight(tensor, spec.dtype, spec.is_capturing);
  if (spec.region.innermost != nullptr &&  // asking whether the device captures may have ended the region
      weight != nullptr && (weight == &tensor || spec.region.store != nullptr || covers(tensor, *weight))) {
    seen.looked_for = true;
    seen.is_new = false;
    return weight == &tensor ? cast_of_weight(tensor, spec, seen) : cast_of_view(tensor, *weight, spec, seen);
  }
  if (C10_UNLIKELY(spec.dtype != at::kFloat && !caching_is_safe())) {
    if (Tensor traced = cast_of_traced(tensor, spec.dtype, spec.device); traced.defined()) {
      return traced;
    }
    if (is_cached_where_modes_see_casts(tensor, spec)) {
      seen.looked_for = true;
      seen.is_new = false;
      const std::shared_ptr<ThreadRegions> regions = this_thread.regions;
      return regions->casts.cast(tensor, spec.dtype, Use::of_weight(tensor), seen.is_new);
    }
  }
  return plain_cast(tensor, spec);
}

// Cast for an op that is being observed, by a function that fills in what is noted of the cast.
template <class Cast>
Tensor observed_cast(ObservedCall& op, const Tensor& tensor, const Cast& make) {
  using Clock = std::chrono::steady_clock;
  SeenCast seen{has_known_sizes(tensor) && weight_of(tensor) != nullptr};
  const auto begin = op.is_timed ? Clock::now() : Clock::time_point();
  Tensor cast = make(seen);
  if (op.is_timed) {
    seen.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  observer.load(std::memory_order_relaxed)->note_cast(op, tensor, cast, seen);
  return cast;
}

// Cast an eligible tensor of another dtype.
C10_NOINLINE Tensor cast(const Tensor& tensor, const CastSpec& spec) {
  if (C10_UNLIKELY(observed_op != nullptr)) {
    return observed_cast(*observed_op, tensor, [&](SeenCast& seen) { return find_or_cast(tensor, spec, seen); });
  }
  SeenCast unseen;
  return find_or_cast(tensor, spec, unseen);
}

}  // namespace
