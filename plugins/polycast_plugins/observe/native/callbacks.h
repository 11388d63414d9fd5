// The callbacks that torch calls before and after each op and autograd node while a recorder runs.
//
// Locks: Recorders::mutex.

#pragma once

#include "nodes.h"
#include "op_begins.h"
#include "op_ends.h"
#include "thread_state.h"

namespace {

// torch calls the thread's callback, the global one, or both, as registered when the event began. The second call is ignored.
std::unique_ptr<at::ObserverContext> begin_event(const at::RecordFunction& event) {
  ThreadState* const state = refreshed_state(true);
  if (state == nullptr || state->event == &event) {
    return nullptr;
  }
  state->event = &event;
  constexpr const char* kNode = "autograd::engine::evaluate_function";
  if (event.name()[0] == 'a' && event.name()[2] == 't' && std::strncmp(event.name(), kNode, std::strlen(kNode)) == 0) {
    return begin_node(*state);
  }
  return state->records.empty() ? nullptr : begin_op(*state, event);
}

// Remove this thread's callback if no recorder of this thread alone is left. Recorders may be stopped on other threads.
void remove_unused_callback() {
  ThreadState* const state = state_of_thread;
  if (state != nullptr && state->callback &&
      std::all_of(state->recorders.begin(), state->recorders.end(), [](const auto& each) { return each->all_threads; })) {
    at::removeCallback(*state->callback);
    state->callback.reset();
  }
}

std::unique_ptr<at::ObserverContext> begin_event_of_thread(const at::RecordFunction& event) {
  if (const ThreadState* const state = refreshed_state(true); state != nullptr && state->recorders.empty()) {
    remove_unused_callback();
  }
  return begin_event(event);
}

void end_event(const at::RecordFunction& event, at::ObserverContext* context) {
  if (ThreadState* const state = state_of_thread; state != nullptr && state->event == &event) {
    state->event = nullptr;
  }
  if (context == nullptr) {
    return;
  }
  switch (auto* const observed = static_cast<Observed*>(context); observed->kind) {
    case ObservedKind::kNode:
      return end_node(*static_cast<ObservedNode*>(observed));
    case ObservedKind::kOp:
      return end_op(*static_cast<ObservedOp*>(observed), event);
    case ObservedKind::kInnerMatmul:
      return end_inner_matmul(*static_cast<InnerMatmul*>(observed), event);
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
  ThreadState* const state = refreshed_state(true);
  if (!recorder->all_threads && state != nullptr && !state->callback) {
    state->callback = at::addThreadLocalCallback(callback(&begin_event_of_thread));
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
  refreshed_state(false);
  remove_unused_callback();
  engine.destroy_deferred();
}

}  // namespace
