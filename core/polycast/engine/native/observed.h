// Where the engine tells its observer what it does; see common/observing.h.
//
// Owns nothing. Locks: none. Until something observes for the first time there is no observer.

#pragma once

#include <atomic>

#include "observing.h"

namespace {

std::atomic<const Observer*> observer{nullptr};

// The thread's op that is observed, or null.
constinit thread_local ObservedCall* observed_op = nullptr;

}  // namespace
