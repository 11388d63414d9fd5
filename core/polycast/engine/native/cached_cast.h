// polycast::cached_cast, the cast of a weight where compiled code runs: the kernels of one device. See engine/cached_cast.py.
//
// Owns nothing. Locks: none; the GIL is taken to find the cache that code names.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

#include "casting.h"
#include "regions.h"
#include "store.h"

namespace {  // all is one unit, binding.cpp

constexpr const char* kCachedCast = "polycast::cached_cast";

// Set by bind(); it lives as long as the process.
PyObject* store_by_identity = nullptr;

std::shared_ptr<Store> named_store(int64_t identity) {
  const Gil gil;
  const Object store = call(store_by_identity, "(L)", static_cast<long long>(identity));
  return store.is_none() ? nullptr : Holder<Store>::of(store.get());
}

// The device's own: a cast without history, on the memory of what is kept.
class CachedCastKernel final : public c10::OperatorKernel {
 public:
  CachedCastKernel(DeviceType device, Object is_capturing) : device_(device), is_capturing_(std::move(is_capturing)) {}

  ~CachedCastKernel() override {
    if (is_capturing_) {
      const Gil gil;
      is_capturing_ = Object();
    }
  }

  Tensor operator()(const Tensor& weight, ScalarType dtype, int64_t cache) {
    const at::NoGradGuard no_history;
    std::shared_ptr<Store> store;
    if (cache != 0) {
      store = named_store(cache);
    } else if (Store* const of_region = region_of(device_).store; of_region != nullptr) {
      store = of_region->shared_from_this();
    }
    if (store == nullptr || !is_eligible(weight, device_) || weight_to_keep(weight, dtype, is_capturing_) != &weight) {
      return weight.to(dtype);
    }
    bool made = false;
    return alias_of(store->cast(weight, dtype, made));
  }

 private:
  const DeviceType device_;
  Object is_capturing_;  // empty where the backend never captures
};

// Autograd's: the history that weight.to(dtype) would have.
class CachedCastAutograd final : public c10::OperatorKernel {
 public:
  Tensor operator()(c10::DispatchKeySet keys, const Tensor& weight, ScalarType dtype, int64_t cache) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(kCachedCast, "").typed<Tensor(const Tensor&, ScalarType, int64_t)>();
    Tensor cast;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      cast = op.redispatch(keys & c10::after_ADInplaceOrView_keyset, weight, dtype, cache);
    }
    if (wants_history(weight)) {
      set_history_of(cast, weight);
    }
    return cast;
  }
};

}  // namespace
