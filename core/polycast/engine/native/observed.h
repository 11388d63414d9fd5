// The engine's reference to its observer; see common/observing.h.

#pragma once

#include "observing.h"

namespace {

// Null until the first observation.
std::atomic<const Observer*> observer{nullptr};

// The thread's observed op, or null.
constinit thread_local ObservedCall* observed_op = nullptr;

}  // namespace
