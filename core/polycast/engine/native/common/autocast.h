// torch's autocast functions, declared here because ATen/autocast_mode.h takes longer to parse than everything else.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

#include <cstring>
#include <string>

namespace at::autocast {

bool is_autocast_enabled(at::DeviceType device_type);
void set_autocast_enabled(at::DeviceType device_type, bool enabled);
at::ScalarType get_autocast_dtype(at::DeviceType device_type);
void set_autocast_dtype(at::DeviceType device_type, at::ScalarType dtype);
bool is_autocast_cache_enabled();
void set_autocast_cache_enabled(bool enabled);
int increment_nesting();
int decrement_nesting();
void clear_cache();
Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);

}  // namespace at::autocast

namespace at::caching {

bool is_cached_tensor(const at::Tensor& t);

}  // namespace at::caching

namespace {

// Return a device's own dispatch key; the names differ by a prefix.
c10::DispatchKey key_below(c10::DispatchKey autocast) {
  return c10::parseDispatchKey(std::string(c10::toString(autocast)).substr(std::strlen("Autocast")));
}

}  // namespace
