// Writes that torch's record functions show where versions do not: of ops in the handler of a dispatch mode, which run below the key that
// counts versions, and of ops that a device's graph captures, which each replay repeats without Python.
//
// Record functions are called for each op of the dispatcher. So a thread has one only while it is in a dispatch mode, and the process
// while a graph is captured. Locks: none but those of what is called.

#pragma once

#include "write_hooks.h"

namespace {

struct OpWrites final : at::ObserverContext {
  Storages storages;
};

// Note what an op writes in captured graphs; return what it writes unversioned of weights that may have cached casts.
std::unique_ptr<at::ObserverContext> begin_recorded(const at::RecordFunction& event) {
  const bool is_versioned = !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::ADInplaceOrView);
  if (is_versioned && !CapturedWrites::are_noted()) {
    return nullptr;
  }
  const auto schema = event.operator_schema();
  if (!schema || !schema->is_mutable()) {
    return nullptr;
  }
  Touched written;
  for (size_t i = 0; i < std::min(schema->arguments().size(), event.inputs().size()); ++i) {
    if (const auto* const alias = schema->arguments()[i].alias_info(); alias != nullptr && alias->isWrite()) {
      collect_tensors(event.inputs()[i], written);
    }
  }
  auto writes = std::make_unique<OpWrites>();
  for (const Tensor& tensor : written) {
    CapturedWrites::note({storage_of(tensor)});
    if (!is_versioned && may_be_cached(storage_of(tensor))) {
      writes->storages.insert(storage_of(tensor));
    }
  }
  return writes->storages.empty() ? nullptr : std::move(writes);
}

void end_recorded(const at::RecordFunction&, at::ObserverContext* writes) {
  if (writes != nullptr) {
    invalidate(static_cast<OpWrites*>(writes)->storages);
  }
}

at::RecordFunctionCallback recording_writes() {
  return at::RecordFunctionCallback(&begin_recorded, &end_recorded).needsInputs(true).scopes({at::RecordScope::FUNCTION});
}

// The dispatch modes that a thread is in.
class ModesOfThread {
 public:
  static void enter() {
    if (depth_++ == 0) {
      callback_ = at::addThreadLocalCallback(recording_writes());
    }
  }

  // May be called for a mode that was entered before the hooks were installed.
  static void leave() {
    if (depth_ != 0 && --depth_ == 0) {
      at::removeCallback(callback_);
    }
  }

 private:
  static inline thread_local int depth_ = 0;
  static inline thread_local at::CallbackHandle callback_ = 0;
};

// The capture of a graph, from construction to end(), and the writes that its replays repeat.
class GraphCapture {
 public:
  GraphCapture() : callback_(at::addGlobalCallback(recording_writes())) { writes_.begin(); }
  ~GraphCapture() { end(); }

  void end() {
    if (const auto callback = std::exchange(callback_, at::INVALID_CALLBACK_HANDLE); callback != at::INVALID_CALLBACK_HANDLE) {
      at::removeCallback(callback);
      writes_.end();
    }
  }

  // Drop what is cached of the weights that a replay has written.
  void note_replay() { invalidate(writes_.cached_storages()); }

 private:
  CapturedWrites writes_;
  at::CallbackHandle callback_;
};

}  // namespace
