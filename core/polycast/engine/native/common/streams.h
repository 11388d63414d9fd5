// The current stream of a device, and whether it captures a graph. Asking a backend takes the GIL.

#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include "python.h"

namespace {

// A backend's is_capturing(), nothing if it never captures, or True if its casts are never cached. Kernels own one, and are destroyed
// without the GIL.
class IsCapturing {
 public:
  explicit IsCapturing(Object function) : function_(std::move(function)) {}
  IsCapturing(IsCapturing&&) = default;
  ~IsCapturing() {
    if (Py_IsInitialized() == 0) {  // torch's dispatcher destroys its kernels as the process exits
      function_.release();
    } else if (function_) {
      const Gil gil;
      function_ = Object();
    }
  }

  const Object& function() const { return function_; }

  bool always() const { return function_.get() == Py_True; }

 private:
  Object function_;
};

// Return the stream on which work on a tensor is queued; none on devices without streams.
std::optional<c10::Stream> current_stream(const Tensor& tensor) {
  const auto device = tensor.device();
  if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Return whether a tensor's device captures a graph: the backend's own answer, where it overrides is_capturing(), else the
// stream's, from torch 2.12 on.
template <class Stream = c10::Stream>
bool captures(const Tensor& tensor, const Object& is_capturing) {
  if (is_capturing.get() == Py_True) {
    return true;
  }
  if (is_capturing) {
    const Gil gil;
    return is_true(call(is_capturing.get()));
  }
  if constexpr (requires(const Stream& stream) { stream.is_capturing(); }) {
    const std::optional<Stream> stream = current_stream(tensor);
    try {
      return stream && stream->is_capturing();
    } catch (const c10::Error& error) {  // torch 2.12 raises this on devices without graphs
      if (error.msg().find("stream capture query") == std::string::npos) {
        throw;
      }
    }
  }
  return false;
}

}  // namespace
