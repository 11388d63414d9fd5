// The streams of devices, and whether one is recorded.
//
// Owns nothing. Locks: none; the GIL is taken to ask a backend.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <string>

#include "python.h"

namespace {

// The stream that work on a tensor is given to now; none on the CPU.
std::optional<c10::Stream> current_stream(const Tensor& tensor) {
  const auto device = tensor.device();
  if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Whether the device records a graph now. `is_capturing` is the backend's own answer, empty where it has none: then the
// device's stream is asked, where this torch's streams can tell.
template <class Stream = c10::Stream>
bool captures(const Tensor& tensor, const Object& is_capturing) {
  if (is_capturing) {
    const Gil gil;
    return is_true(call(is_capturing.get()));
  }
  if constexpr (requires(const Stream& stream) { stream.is_capturing(); }) {
    const std::optional<Stream> stream = current_stream(tensor);
    try {
      return stream && stream->is_capturing();
    } catch (const c10::Error& error) {  // what torch 2.12 has where newer ones say no: for a device without graphs
      if (error.msg().find("stream capture query") == std::string::npos) {
        throw;
      }
    }
  }
  return false;
}

}  // namespace
