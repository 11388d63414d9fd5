// Kernels of polycast::cached_cast, the cast of a weight in compiled code, for one device. See casts/cached_cast.py.

#pragma once

#include "casting.h"
#include "regions.h"
#include "user_store.h"

namespace {

constexpr const char* kCachedCast = "polycast::cached_cast";

// Set by bind().
PyObject* store_by_identity = nullptr;

std::shared_ptr<UserStore> named_store(int64_t identity) {
  const Gil gil;
  const Object store = call(store_by_identity, "(L)", static_cast<long long>(identity));
  return store.is_none() ? nullptr : Holder<UserStore>::unwrap(store.get());
}

// At the device's own key: returns a cast without history, on the memory of the cached one.
class CachedCastKernel final : public c10::OperatorKernel {
 public:
  CachedCastKernel(DeviceType device, IsCapturing is_capturing) : device_(device), is_capturing_(std::move(is_capturing)) {}

  Tensor operator()(const Tensor& weight, ScalarType dtype, int64_t cache) {
    const at::NoGradGuard no_history;
    if (!is_eligible(weight, device_) || cacheable_weight(weight, dtype, is_capturing_) != &weight) {
      return weight.to(dtype);
    }
    const DeviceRegion& region = region_of(device_);  // asking whether the device captures may have ended one
    SeenCast unseen;
    if (cache < 0 && region.innermost != nullptr) {
      return alias_of(cast_of_weight(weight, {dtype, device_, /*has_only_autograd=*/true, region, is_capturing_}, unseen));
    }
    const std::shared_ptr<UserStore> store =
        cache > 0 ? named_store(cache) : region.store == nullptr ? nullptr : region.store->shared_from_this();
    return store == nullptr ? weight.to(dtype) : alias_of(store->cast(weight, dtype, unseen.is_new));
  }

 private:
  const DeviceType device_;
  const IsCapturing is_capturing_;
};

// At the Autograd key: adds the history of weight.to(dtype).
class CachedCastAutograd final : public c10::OperatorKernel {
 public:
  Tensor operator()(c10::DispatchKeySet keys, const Tensor& weight, ScalarType dtype, int64_t cache) {
    static const auto op = find_op({kCachedCast, ""}).typed<Tensor(const Tensor&, ScalarType, int64_t)>();
    Tensor cast;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      cast = op.redispatch(keys & c10::after_ADInplaceOrView_keyset, weight, dtype, cache);
    }
    if (needs_history(weight)) {
      set_history(cast, weight);
    }
    return cast;
  }
};

}  // namespace
