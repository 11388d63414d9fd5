// The callbacks that torch calls before and after each op and autograd node while a recorder runs.
//
// Locks: Recorders::mutex.

#pragma once

#include "nodes.h"
#include "op_begins.h"
#include "op_ends.h"
#include "watch.h"

namespace {

// torch calls the thread's callback, the global one, or both, as registered when the event began. The second call is ignored.
std::unique_ptr<at::ObserverContext> begin_event(const at::RecordFunction& event) {
  Watch* const watch = refreshed_watch(true);
  if (watch == nullptr || watch->event == &event) {
    return nullptr;
  }
  watch->event = &event;
  constexpr const char* kNode = "autograd::engine::evaluate_function";
  if (event.name()[0] == 'a' && event.name()[2] == 't' && std::strncmp(event.name(), kNode, std::strlen(kNode)) == 0) {
    return begin_node(*watch);
  }
  return watch->tables.empty() ? nullptr : begin_op(*watch, event);
}

// Remove this thread's callback if no recorder of this thread alone is left. Recorders may be stopped on other threads.
void remove_unused_callback() {
  Watch* const watch = watch_of_thread;
  if (watch != nullptr && watch->callback &&
      std::all_of(watch->recorders.begin(), watch->recorders.end(), [](const auto& each) { return each->all_threads; })) {
    at::removeCallback(*watch->callback);
    watch->callback.reset();
  }
}

std::unique_ptr<at::ObserverContext> begin_event_of_thread(const at::RecordFunction& event) {
  if (const Watch* const watch = refreshed_watch(true); watch != nullptr && watch->recorders.empty()) {
    remove_unused_callback();
  }
  return begin_event(event);
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
      return end_node(*static_cast<ObservedNode*>(observed));
    case ObservedKind::kOp:
      return end_op(*static_cast<ObservedOp*>(observed), event);
    case ObservedKind::kPart:
      return end_part(*static_cast<ObservedPart*>(observed), event);
  }
}

at::RecordFunctionCallback callback(at::RecordFunctionCallback::StartCallback begin) {
  return at::RecordFunctionCallback(begin, &end_event)
      .needsInputs(true)
      .needsOutputs(true)
      .scopes({at::RecordScope::FUNCTION});
}

at::CallbackHandle global_callback = 0;  // guarded by Recorders::mutex

// Called with the GIL held.
void start_recorder(const std::shared_ptr<Recorder>& recorder) {
  {
    std::lock_guard<std::mutex> lock(Recorders::running().mutex);
    Recorders::running().recorders.push_back(recorder);
    ++Recorders::count;
    ++Recorders::generation;
    if (recorder->all_threads && Recorders::of_all_threads++ == 0) {
      global_callback = at::addGlobalCallback(callback(&begin_event));
    }
  }
  Watch* const watch = refreshed_watch(true);
  if (!recorder->all_threads && watch != nullptr && !watch->callback) {
    watch->callback = at::addThreadLocalCallback(callback(&begin_event_of_thread));
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
    if (recorder->all_threads && --Recorders::of_all_threads == 0) {
      at::removeCallback(global_callback);
    }
  }
  refreshed_watch(false);
  remove_unused_callback();
  engine.destroy_deferred();
}

}  // namespace
