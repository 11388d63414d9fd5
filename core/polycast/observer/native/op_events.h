// Adds the times of an op or a cast to the recorders that keep them.
//
// Locks: none; those of Events.

#pragma once

#include "watch.h"

namespace {

C10_NOINLINE void add_event(const Watch& watch, Event event) {
  event.thread = system_thread();
  for (const auto& table : watch.tables) {
    if (Events& events = table->recorder->events; events.are_kept()) {
      event.module = table->module();
      events.add(event);
    }
  }
}

}  // namespace
