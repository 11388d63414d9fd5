// Which tensors are cast, which of them are weights, and whether the cast of a weight is kept.
//
// Owns nothing. Locks: none. The GIL is taken to ask Python about a weight that shares its storage, and whether a device captures
// a graph: with no lock of a store held.

#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "observe.h"
#include "regions.h"
#include "store.h"

namespace {  // all is one unit, binding.cpp


// Set by bind(); they live as long as the process.
PyObject* storages_are_rewritten = nullptr;
PyObject* kept_cast_of_traced = nullptr;

bool is_eligible(const Tensor& tensor, DeviceType device) {
  return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble &&
      tensor.device().type() == device;
}

// A weight is a float32 leaf that requires grad, or a Parameter that does not. Subclasses other than Parameter are not.
// One with a tangent of forward-mode differentiation is left alone: a kept cast would be without it.
bool is_weight(const Tensor& tensor) {
  const TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (tensor.scalar_type() != at::kFloat || tensor.layout() != at::kStrided || !impl->has_storage() || tensor.is_inference() || tensor.is_nested() ||
      impl->key_set().has_any(c10::DispatchKeySet({DispatchKey::Python, DispatchKey::Negative}))) {
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

// See storages_are_rewritten in engine/weights.py. Few weights share their storage, so the GIL is rarely taken.
bool is_rewritten(const Tensor& weight) {
  if (weight.storage().use_count() == 1) {
    return false;
  }
  const py::gil_scoped_acquire gil;
  return py::handle(storages_are_rewritten)().cast<bool>();
}

// Not while something records, transforms or watches the ops.
bool caching_is_safe() {
  static constexpr c10::DispatchKeySet kWatchers{
      DispatchKey::Python, DispatchKey::Tracer, DispatchKey::FuncTorchDynamicLayerFrontMode};
  return !c10::impl::tls_local_dispatch_key_set().included_.has_any(kWatchers);
}

// What became of a cast.
struct Outcome {
  bool looked_for = false;  // where casts are kept
  bool made = true;
  bool in_torchs_region = false;
};

// Whether a cast of a tensor may be kept now. Python may run, and the region end.
bool may_be_kept(const Tensor& tensor, ScalarType dtype, const py::object& is_capturing) {
  return dtype != at::kFloat && is_weight(tensor) && at::autocast::is_autocast_cache_enabled() && caching_is_safe() &&
      !is_rewritten(tensor) && !captures(tensor, is_capturing);
}

// Return the cast of what stands for a weight in code that is being compiled, or an undefined tensor.
Tensor cast_of_traced(const Tensor& tensor, ScalarType dtype, DeviceType device) {
  if (tensor.scalar_type() != at::kFloat || !tensor.key_set().has(DispatchKey::Python)) {
    return Tensor();
  }
  const py::gil_scoped_acquire gil;
  const auto traced = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  auto* const as = reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype));
  const py::object cast = py::handle(kept_cast_of_traced)(traced, py::handle(as), c10::DeviceTypeName(device, /*lower_case=*/true));
  return cast.is_none() ? Tensor() : cast.cast<Tensor>();
}

Tensor find_or_cast(const Tensor& tensor, ScalarType dtype, DeviceType device, const py::object& is_capturing, Outcome& outcome) {
  const DeviceRegion& region = region_of(device);
  if (region.innermost == nullptr) {
    outcome.in_torchs_region = true;
    return at::autocast::cached_cast(dtype, tensor, device);  // a region of torch's has torch's cache
  }
  if (dtype != at::kFloat && is_weight(tensor) && at::autocast::is_autocast_cache_enabled() && caching_is_safe()) {
    // From here on Python may run, and the region end.
    const std::shared_ptr<Store> store = region.store == nullptr ? nullptr : region.store->shared_from_this();
    const std::shared_ptr<ThreadRegions> regions = this_thread.regions;
    if (!is_rewritten(tensor) && !captures(tensor, is_capturing)) {
      outcome = {true, false};
      if (store == nullptr) {
        return regions->casts.cast(tensor, dtype, outcome.made);
      }
      const uint64_t writes = Writes::log().count();
      Tensor kept = store->cast(tensor, dtype, outcome.made);
      return wants_history(tensor) ? regions->casts.with_link(tensor, dtype, kept, writes) : kept;
    }
  }
  if (C10_UNLIKELY(dtype != at::kFloat && !caching_is_safe())) {
    if (Tensor traced = cast_of_traced(tensor, dtype, device); traced.defined()) {
      return traced;
    }
  }
  return tensor.to(dtype);
}

// Cast for an op that somebody observes.
Tensor observed_cast(
    ObservedOp& op, const Tensor& tensor, ScalarType dtype, DeviceType device, const py::object& is_capturing) {
  using Clock = std::chrono::steady_clock;
  using Last = Watch::Last;
  CastCounts counts{tensor.scalar_type(), dtype, has_known_sizes(tensor) && is_weight(tensor)};
  const auto begin = op.watch->timing ? Clock::now() : Clock::time_point();
  Outcome outcome;
  Tensor cast = find_or_cast(tensor, dtype, device, is_capturing, outcome);
  if (op.watch->timing) {
    counts.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  const bool can_be_kept = counts.of_weight && dtype != at::kFloat;
  const Last last = can_be_kept && (outcome.made || outcome.in_torchs_region) ? op.watch->note_cast(tensor, cast) : Last::kNone;
  if (outcome.in_torchs_region && last == Last::kSameCast) {
    outcome = {true, false};
  }
  if (outcome.made) {
    counts.count = 1;
    counts.bytes = bytes_of(cast);
    counts.misses = outcome.looked_for;
    if (last != Last::kNone) {
      counts.recasts = 1;
      counts.recast_bytes = counts.bytes;
    }
  } else {
    counts.hits = 1;
  }
  op.casts.add(counts);
  if (!op.backward && !counts.of_weight) {
    note_chain(op, tensor, dtype, bytes_of(cast));
  }
  return cast;
}

// Cast an eligible tensor of another dtype.
Tensor cast(const Tensor& tensor, ScalarType dtype, DeviceType device, const py::object& is_capturing) {
  if (C10_UNLIKELY(observed_op != nullptr)) {
    return observed_cast(*observed_op, tensor, dtype, device, is_capturing);
  }
  Outcome outcome;
  return find_or_cast(tensor, dtype, device, is_capturing, outcome);
}

}  // namespace
