// The callbacks that torch calls around each op and node while something observes.
//
// Owns nothing. Locks: Recorders::mutex.

#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "nodes.h"
#include "op_begins.h"
#include "op_ends.h"
#include "watch.h"

namespace {

// torch calls the callback of the thread, that of all or both, as they were when the event began.
std::unique_ptr<at::ObserverContext> start_event(const at::RecordFunction& event) {
  Watch* const watch = refreshed_watch(true);
  if (watch == nullptr || watch->event == &event) {
    return nullptr;
  }
  watch->event = &event;
  constexpr const char* kNode = "autograd::engine::evaluate_function";
  if (event.name()[0] == 'a' && event.name()[2] == 't' && std::strncmp(event.name(), kNode, std::strlen(kNode)) == 0) {
    return enter_node(*watch);
  }
  return watch->tables.empty() ? nullptr : start_op(*watch, event);
}

// An observation may have been ended on another thread than its own.
void remove_callback_if_nobody_observes() {
  Watch* const watch = watch_of_thread;
  if (watch != nullptr && watch->callback &&
      std::all_of(watch->recorders.begin(), watch->recorders.end(), [](const auto& other) { return other->all_threads; })) {
    at::removeCallback(*watch->callback);
    watch->callback.reset();
  }
}

std::unique_ptr<at::ObserverContext> start_event_of_thread(const at::RecordFunction& event) {
  if (const Watch* const watch = refreshed_watch(true); watch != nullptr && watch->recorders.empty()) {
    remove_callback_if_nobody_observes();
  }
  return start_event(event);
}

void end_event(const at::RecordFunction& event, at::ObserverContext* context) {
  if (Watch* const watch = watch_of_thread; watch != nullptr && watch->event == &event) {
    watch->event = nullptr;
  }
  if (context == nullptr) {
    return;
  }
  switch (auto* const observed = static_cast<Observed*>(context); observed->kind) {
    case ObservedKind::kNode:
      return leave_node(*static_cast<ObservedNode*>(observed));
    case ObservedKind::kOp:
      return end_op(*static_cast<ObservedOp*>(observed), event);
    case ObservedKind::kPart:
      return end_part(*static_cast<ObservedPart*>(observed), event);
  }
}

at::RecordFunctionCallback callback(at::RecordFunctionCallback::StartCallback start) {
  return at::RecordFunctionCallback(start, &end_event)
      .needsInputs(true)
      .needsOutputs(true)
      .scopes({at::RecordScope::FUNCTION});
}

at::CallbackHandle callback_of_all = 0;  // guarded by the mutex of Recorders

// Called with the GIL held.
void start_recorder(const std::shared_ptr<Recorder>& recorder) {
  {
    std::lock_guard<std::mutex> lock(Recorders::running().mutex);
    Recorders::running().recorders.push_back(recorder);
    ++Recorders::count;
    ++Recorders::generation;
    if (recorder->all_threads && recorders_of_all++ == 0) {
      callback_of_all = at::addGlobalCallback(callback(&start_event));
    }
  }
  Watch* const watch = refreshed_watch(true);
  if (!recorder->all_threads && watch != nullptr && !watch->callback) {
    watch->callback = at::addThreadLocalCallback(callback(&start_event_of_thread));
  }
}

// Called with the GIL held, on any thread.
void stop_recorder(const std::shared_ptr<Recorder>& recorder) {
  {
    std::lock_guard<std::mutex> lock(Recorders::running().mutex);
    auto& running = Recorders::running().recorders;
    const auto found = std::find(running.begin(), running.end(), recorder);
    if (found == running.end()) {
      return;
    }
    running.erase(found);
    --Recorders::count;
    ++Recorders::generation;
    if (recorder->all_threads && --recorders_of_all == 0) {
      at::removeCallback(callback_of_all);
    }
  }
  refreshed_watch(false);
  remove_callback_if_nobody_observes();
  engine.free_left_behind();
}

}  // namespace
