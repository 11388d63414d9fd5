// torch's autocast state, by its functions: ATen/autocast_mode.h, which declares them, takes longer to parse than all else here.
//
// Owns nothing. Locks: none; the state is a thread's own.

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

namespace {

// A device's own key, whose name that of its Autocast key ends with.
c10::DispatchKey key_below(c10::DispatchKey autocast) {
  return c10::parseDispatchKey(std::string(c10::toString(autocast)).substr(std::strlen("Autocast")));
}

}  // namespace
