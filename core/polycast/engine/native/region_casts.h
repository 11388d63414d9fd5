// The casts that one thread's regions keep, from the outermost's entry to its exit.
//
// Most weights are used once in a region: a cast of one is of no use afterwards, and to keep it costs memory that the next
// cast would find in the processor's cache. So casts pass through a few recent ones. A weight that is used again after its
// cast has gone is remembered, also for the thread's next region, and what is made of it then is kept. A cast with a history
// is kept at once, as torch keeps it: the graph holds its memory, and gradients of several uses are to add up in one node.
//
// Owns casts, with and without history, for the one thread.
//
// Locks. None but that of what threads share. Making and destroying a tensor may run Python, and so end this region or enter
// others: nothing in the tables is pointed to across it.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "shared_casts.h"
#include "uses.h"
#include "weights.h"
#include "writes.h"

namespace {

// What a cast of a weight is wanted for.
struct Wanted {
  bool link;           // with history
  bool held_by_graph;  // the graph holds its memory, so there is nothing to be gained by not keeping it
  bool for_view;       // a view, which gets a history of its own

  static Wanted by_weight(const Tensor& weight) {
    const bool link = wants_history(weight);
    return {link, link, false};
  }

  static Wanted by_view(const Tensor& view) { return {false, wants_history(view), true}; }
};

class RegionCasts {
 public:
  RegionCasts() { threads_with_regions.fetch_add(1, std::memory_order_relaxed); }
  RegionCasts(const RegionCasts&) = delete;
  ~RegionCasts() { clear(); }

  // Return the cast that is kept of a weight, or null: what there is to do then is cast()'s. Runs no Python, so that the caller
  // need not hold this, and makes no tensor.
  const Tensor* find(const Tensor& weight, ScalarType dtype, const Wanted& wanted) {
    if (Writes::log().count() != seen_) {
      return nullptr;
    }
    const Key key{weight.unsafeGetTensorImpl(), dtype};
    const auto found = kept_.find(key);
    if (found == kept_.end() || !found->second->is_that_of(weight) || !found->second->may_serve(weight, wanted.for_view)) {
      return nullptr;
    }
    const Tensor& cast = wanted.link ? found->second->linked : found->second->cast;
    if (!cast.defined()) {
      return nullptr;
    }
    if (!wanted.link) {
      uses_.note_again(key);
    }
    return &cast;
  }

  // Return a weight in another dtype; `made` says whether it was cast now.
  Tensor cast(const Tensor& weight, ScalarType dtype, const Wanted& wanted, bool& made) {
    const Key key{weight.unsafeGetTensorImpl(), dtype};
    see_writes();
    if (const auto found = kept_.find(key); found != kept_.end() && found->second->is_that_of(weight) &&
        (wanted.for_view || found->second->may_serve(weight, false))) {
      CachedCast& entry = *found->second;
      if (wanted.for_view && !entry.may_serve(weight, true)) {
        made = true;
        return make_cast(weight, dtype);  // the entry serves who uses the weight itself
      }
      if (wanted.link) {
        return entry.linked.defined() ? entry.linked : link_kept(key, weight, entry.cast);
      }
      uses_.note_again(key);
      return entry.cast.defined() ? entry.cast : alias_of(entry.linked);
    }
    for (Recent& recent : recent_) {
      if (recent.cast && recent.key == key && recent.cast->is_that_of(weight) && recent.cast->may_serve(weight, wanted.for_view)) {
        uses_.note_again(key);
        auto entry = take_out(recent);
        const Tensor cast = entry->cast;
        keep(key, std::move(entry));
        return wanted.link ? link_kept(key, weight, cast) : cast;
      }
    }
    return make(key, weight, dtype, wanted, made);
  }

  // Return the cast that a user's store keeps, with the history that it has in this thread's regions.
  template <class Store>
  Tensor with_link(const Tensor& weight, ScalarType dtype, Store& store, bool& made) {
    const Key key{weight.unsafeGetTensorImpl(), dtype};
    see_writes();
    const uint64_t seen = seen_;
    Tensor linked;
    std::unique_ptr<CachedCast> entry;
    if (const auto found = kept_.find(key); found != kept_.end() && found->second->linked.defined() &&
        found->second->is_that_of(weight) && found->second->of.holders() != Holders::kUnversioned) {
      linked = found->second->linked;
    } else {
      entry = std::make_unique<CachedCast>(weight);  // what is written from here on need not be in the cast
    }
    const Tensor cast = store.cast(weight, dtype, made);
    if (linked.defined()) {
      return linked;
    }
    linked = with_history(cast, weight);
    if (entry != nullptr && may_be_stored(weight, entry->of) && seen == Writes::log().count()) {
      entry->linked = linked;
      keep(key, std::move(entry));
    }
    return linked;
  }

  // The outermost region ends: its casts are not to be used again.
  void end_region() {
    uses_.end_region();
    clear();
  }

  void clear() { const Dying all = forget_all(); }

  // Forget every cast; return what holds them, for the caller to free.
  std::shared_ptr<void> take_all() { return std::make_shared<Dying>(forget_all()); }

 private:
  using Kept = ska::flat_hash_map<Key, std::unique_ptr<CachedCast>, KeyHash>;

  struct Dying {
    c10::SmallVector<std::unique_ptr<CachedCast>, 16> casts;
    std::vector<Key> shared;

    Dying() = default;
    Dying(Dying&&) = default;
    ~Dying() {
      casts.clear();
      if (!shared.empty()) {
        SharedCasts::index().forget_dead(shared);
      }
    }
  };

  struct Recent {
    Key key;
    std::unique_ptr<CachedCast> cast;
    size_t bytes = 0;  // as it was made: who was given it may resize it
  };

  static constexpr size_t kSweepAt = 256, kLargeTable = 256, kRecent = 4;
  static constexpr size_t kSmall = 4096;  // as a bias: two larger ones would take more of the processor's cache than one

  Dying forget_all() {
    Dying all;
    for (auto& [key, entry] : kept_) {
      all.casts.push_back(std::move(entry));
      if (shares_) {
        all.shared.push_back(key);
      }
    }
    shares_ = false;
    // The table serves the next region, unless this one was far larger than most are.
    if (kept_.bucket_count() > kLargeTable) {
      Kept().swap(kept_);
    } else {
      kept_.clear();
    }
    for (Recent& recent : recent_) {
      if (recent.cast) {
        all.casts.push_back(take_out(recent));
      }
    }
    sweep_at_ = kSweepAt;
    return all;
  }

  void see_writes() {
    if (Writes::log().count() == seen_) {
      return;
    }
    auto [written, count] = Writes::log().since(seen_);
    seen_ = count;
    if (!written) {
      clear();
      return;
    }
    Dying dying;
    for (auto it = kept_.begin(); it != kept_.end();) {
      if (written->count(it->second->of.storage()) != 0) {
        dying.casts.push_back(std::move(it->second));
        if (shares_) {
          dying.shared.push_back(it->first);
        }
        it = kept_.erase(it);
      } else {
        ++it;
      }
    }
    for (Recent& recent : recent_) {
      if (recent.cast && written->count(recent.cast->of.storage()) != 0) {
        dying.casts.push_back(take_out(recent));
      }
    }
  }

  // The bytes of a recent cast, from before it is made.
  struct Reserved {
    size_t bytes = 0;
    ~Reserved() { RecentBytes::give_back(bytes); }
  };

  Tensor make(const Key& key, const Tensor& weight, ScalarType dtype, const Wanted& wanted, bool& made) {
    const bool link = wanted.link;
    const bool keeps = uses_.note(key) || wanted.held_by_graph;
    InFlight::storages().forget_ended();  // a collective that has ended holds the memory of its weights until then
    const uint64_t seen = seen_;
    auto entry = std::make_unique<CachedCast>(weight);
    entry->sees_all_writes = has_memory_alone(weight, entry->of, wanted.for_view);
    const bool may_keep = (entry->sees_all_writes || (weight.requires_grad() && !wanted.for_view)) &&
        !is_written_by_others(weight, entry->of);
    const bool shares = keeps && may_keep && entry->sees_all_writes &&
        threads_with_regions.load(std::memory_order_relaxed) > 1;
    Reserved reserved;
    Tensor cast, reusable;
    erase_kept(key);
    if (shares) {
      cast = SharedCasts::index().find(key, weight);
    }
    if (!cast.defined()) {
      if (!keeps && may_keep) {
        const size_t bytes = weight.numel() * c10::elementSize(dtype);
        reserved.bytes = make_room(bytes, reusable) ? bytes : 0;
      }
      cast = make_cast(weight, dtype, std::move(reusable));
      made = true;
    }
    Tensor linked;
    if (link && shares) {
      linked = with_history(cast, weight);
    } else if (link) {
      set_history_of(cast, weight);
      linked = std::move(cast);
    }
    const Tensor result = link ? linked : cast;
    if (may_keep && seen == seen_ && (keeps || reserved.bytes != 0)) {
      entry->cast = std::move(cast);
      entry->linked = std::move(linked);
      if (shares) {
        shares_ = true;
        SharedCasts::index().add(key, *entry, seen);
      }
      if (keeps) {
        keep(key, std::move(entry));
      } else {
        put_in_front({key, std::move(entry), std::exchange(reserved.bytes, 0)});
      }
    }
    return result;
  }

  void erase_kept(const Key& key) {
    std::unique_ptr<CachedCast> dying;
    if (const auto found = kept_.find(key); found != kept_.end()) {
      dying = std::move(found->second);
      kept_.erase(found);
    }
  }

  Tensor link_kept(const Key& key, const Tensor& weight, Tensor cast) {
    Tensor linked = with_history(cast, weight);
    if (const auto found = kept_.find(key); found != kept_.end() && found->second->cast.is_same(cast)) {
      found->second->linked = linked;
    }
    return linked;
  }

  void keep(const Key& key, std::unique_ptr<CachedCast> entry) {
    Kept dying;
    if (kept_.size() >= sweep_at_) {  // a region may outlive many weights
      for (auto it = kept_.begin(); it != kept_.end();) {
        if (!it->second->of.memory_is_alive()) {
          dying.emplace(it->first, std::move(it->second));
          it = kept_.erase(it);
        } else {
          ++it;
        }
      }
      sweep_at_ = std::max(kSweepAt, 2 * kept_.size());
    }
    auto& slot = kept_[key];
    std::swap(slot, entry);  // what was there dies as we return
  }

  // Make room for a recent cast, oldest first; what is left of the last one that went is its memory.
  bool make_room(size_t bytes, Tensor& reusable) {
    size_t others = 0, largest = std::max(bytes, kSmall);
    for (const Recent& recent : recent_) {
      if (recent.cast) {
        others += recent.bytes;
        largest = std::max(largest, recent.bytes);
      }
    }
    std::vector<std::unique_ptr<CachedCast>> dying;
    for (size_t i = recent_.size(); i-- > 0;) {  // the oldest is the last
      if (recent_[i].cast && (i == recent_.size() - 1 || others + bytes > largest + kSmall)) {
        others -= recent_[i].bytes;
        auto gone = take_out(recent_[i]);
        reusable = std::move(gone->cast);
        dying.push_back(std::move(gone));
      }
    }
    dying.clear();
    return RecentBytes::take(bytes);
  }

  void put_in_front(Recent recent) {
    std::unique_ptr<CachedCast> dying;
    if (recent_.back().cast) {  // something was put here since room was made
      dying = take_out(recent_.back());
    }
    std::rotate(recent_.begin(), recent_.end() - 1, recent_.end());
    recent_.front() = std::move(recent);
  }

  static std::unique_ptr<CachedCast> take_out(Recent& recent) {
    RecentBytes::give_back(recent.bytes);
    return std::move(recent.cast);
  }

  Kept kept_;
  std::array<Recent, kRecent> recent_;  // the newest first
  Uses uses_;
  uint64_t seen_ = Writes::log().count();
  size_t sweep_at_ = kSweepAt;
  bool shares_ = false;  // some of the kept casts
};

}  // namespace
