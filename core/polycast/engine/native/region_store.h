// The casts that one thread's regions cache, from entering the outermost region to leaving it.
//
// A new cast without history is on probation (probation.h). A cast with autograd history is cached at once, as in torch: the
// graph holds its memory, and the gradients of several uses accumulate in one node.
//
// Locks: only that of the index of shared casts. Making or destroying a tensor may run Python, and so end this region or enter
// others: no pointer into the tables is held across it.
//
// There are two stores because their lifetimes differ. This one is used by one thread and emptied when its outermost region ends:
// it needs no mutex, no weakref to a weight in Python and no limit, and has probation. A UserStore (user_store.h) is shared by
// threads and outlives regions: it needs all three, and no probation. They also admit different casts (admission.h).

#pragma once

#include "probation.h"
#include "shared_casts.h"
#include "weights.h"

namespace {

// The use of a cast.
struct Use {
  bool history;         // it needs autograd history
  bool held_by_graph;   // a graph holds its memory, so that dropping it from the cache frees nothing
  bool is_view = false;  // of a view of the weight, which gets a history of its own

  static Use of_weight(const Tensor& weight) {
    const bool history = needs_history(weight);
    return {history, history};
  }

  static Use of_view(const Tensor& view) { return {false, needs_history(view), true}; }
};

class RegionStore {
 public:
  RegionStore() { threads_with_regions.fetch_add(1, std::memory_order_relaxed); }
  RegionStore(const RegionStore&) = delete;
  ~RegionStore() { clear(); }

  // Return the cached cast of a weight, or null if cast() has to be called. Runs no Python and makes no tensor, so that the
  // caller need not keep the store alive.
  const Tensor* find(const Tensor& weight, ScalarType dtype, const Use& use) {
    if (only<InvalidationLog>().length() != position_) {
      return nullptr;
    }
    const Key key{weight.unsafeGetTensorImpl(), dtype};
    const auto found = cached_.find(key);
    if (found == cached_.end() || !found->second->matches(weight) || !found->second->admission.allows(weight, use.is_view)) {
      return nullptr;
    }
    const Tensor& cast = use.history ? found->second->with_history : found->second->cast;
    if (!cast.defined()) {
      return nullptr;
    }
    if (!use.history) {
      uses_.note_hit(key);
    }
    return &cast;
  }

  // Return a weight in another dtype; set `is_new` if it was cast now.
  Tensor cast(const Tensor& weight, ScalarType dtype, const Use& use, bool& is_new) {
    const Key key{weight.unsafeGetTensorImpl(), dtype};
    drop_written();
    if (const auto found = cached_.find(key); found != cached_.end() && found->second->matches(weight) &&
        (use.is_view || found->second->admission.allows(weight, false))) {
      CachedCast& entry = *found->second;
      if (use.is_view && !entry.admission.allows(weight, true)) {
        is_new = true;
        return make_cast(weight, dtype);  // the entry stays, for uses of the weight itself
      }
      if (use.history) {
        return entry.with_history.defined() ? entry.with_history : add_history(key, weight, entry.cast);
      }
      uses_.note_hit(key);
      return entry.cast.defined() ? entry.cast : alias_of(entry.with_history);
    }
    if (auto entry = probation_.take(key, [&](const CachedCast& entry) {
          return entry.matches(weight) && entry.admission.allows(weight, use.is_view);
        })) {
      uses_.note_hit(key);
      const Tensor cast = entry->cast;
      insert(key, std::move(entry));
      return use.history ? add_history(key, weight, cast) : cast;
    }
    return make(key, weight, dtype, use, is_new);
  }

  // Return the cast that a user store caches, with the history that all its uses in this thread's regions share.
  template <class Store>
  Tensor cast_with_history(const Tensor& weight, ScalarType dtype, Store& store, bool& is_new) {
    const Key key{weight.unsafeGetTensorImpl(), dtype};
    drop_written();
    Tensor result;
    std::unique_ptr<CachedCast> entry;
    const uint64_t position = position_;
    if (const auto found = cached_.find(key); found != cached_.end() && found->second->with_history.defined() &&
        found->second->matches(weight) && found->second->stamp.holders() != Holders::kUnversioned) {
      result = found->second->with_history;
    } else {
      entry = std::make_unique<CachedCast>(weight, false);  // the stamp is taken before the store casts
    }
    const Tensor cast = store.cast(weight, dtype, is_new);
    if (result.defined()) {
      return result;
    }
    result = with_history(cast, weight);
    if (entry != nullptr && user_store_allows(weight, entry->stamp) && position == only<InvalidationLog>().length()) {
      entry->with_history = result;
      insert(key, std::move(entry));
    }
    return result;
  }

  // Note that a weight was used without casting it; return whether it has been used so often that a cast of it would be kept.
  bool note_uncast(const Tensor& weight) { return uses_.note_miss({weight.unsafeGetTensorImpl(), ScalarType::Undefined}); }

  // Called as the outermost region ends.
  void end_region() {
    uses_.end_region();
    clear();
  }

  void clear() { const Dying all = take_all(); }

  // Empty the store; return the casts, for the caller to free.
  std::shared_ptr<void> release() { return std::make_shared<Dying>(take_all()); }

 private:
  using Cached = ska::flat_hash_map<Key, std::unique_ptr<CachedCast>, KeyHash>;

  struct Dying {
    c10::SmallVector<std::unique_ptr<CachedCast>, 16> casts;
    std::vector<Key> shared;

    Dying() = default;
    Dying(Dying&&) = default;
    ~Dying() {
      casts.clear();
      if (!shared.empty()) {
        only<SharedCasts>().drop_dead(shared);
      }
    }
  };

  static constexpr size_t kSweepAt = 256, kLargeTable = 256;

  // Move the casts for which `condition` holds out of the tables.
  template <class Condition>
  Dying take(const Condition& condition) {
    Dying taken;
    for (auto it = cached_.begin(); it != cached_.end();) {
      if (condition(*it->second)) {
        taken.casts.push_back(std::move(it->second));
        if (shares_) {
          taken.shared.push_back(it->first);
        }
        it = cached_.erase(it);
      } else {
        ++it;
      }
    }
    probation_.take_all(condition, taken.casts);
    return taken;
  }

  Dying take_all() {
    Dying all = take([](const CachedCast&) { return true; });
    shares_ = false;
    if (cached_.bucket_count() > kLargeTable) {  // otherwise the next region uses the table
      Cached().swap(cached_);
    }
    sweep_at_ = kSweepAt;
    return all;
  }

  void drop_written() {
    if (only<InvalidationLog>().length() == position_) {
      return;
    }
    auto [written, length] = only<InvalidationLog>().since(position_);
    position_ = length;
    if (!written) {
      clear();
      return;
    }
    const Dying dying = take([&](const CachedCast& entry) { return written->count(entry.stamp.storage()) != 0; });
  }

  Tensor make(const Key& key, const Tensor& weight, ScalarType dtype, const Use& use, bool& is_new) {
    const bool caches = uses_.note_miss(key) || use.held_by_graph;
    only<PendingCollectives>().drop_finished();  // a finished one holds the memory of its weights until then
    const uint64_t position = position_;
    auto entry = std::make_unique<CachedCast>(weight, use.is_view);
    bool is_admitted = entry->admission.allows(weight, use.is_view) && !is_written_elsewhere(weight, entry->stamp);
    bool shares = caches && is_admitted && entry->admission.sees_all_writes &&
        threads_with_regions.load(std::memory_order_relaxed) > 1;
    ProbationQueue::Reservation reservation;
    Tensor cast, reusable;
    erase(key);
    if (shares) {
      cast = only<SharedCasts>().find(key, weight);
    }
    if (!cast.defined()) {
      if (!caches && is_admitted) {
        reservation = probation_.make_room(weight.numel() * c10::elementSize(dtype), reusable);
      }
      cast = make_cast(weight, dtype, std::move(reusable));
      is_new = true;
      if (cast.key_set().has(DispatchKey::Python) || cast.scalar_type() != dtype) {  // a dispatch mode has replaced it
        is_admitted = shares = false;
      }
    }
    Tensor recorded;
    if (use.history && shares) {
      recorded = with_history(cast, weight);
    } else if (use.history) {
      set_history(cast, weight);
      recorded = std::move(cast);
    }
    const Tensor result = use.history ? recorded : cast;
    if (is_admitted && position == position_ && (caches || reservation.bytes() != 0)) {
      entry->cast = std::move(cast);
      entry->with_history = std::move(recorded);
      if (shares) {
        shares_ = true;
        only<SharedCasts>().add(key, *entry, position);
      }
      if (caches) {
        insert(key, std::move(entry));
      } else {
        probation_.push(key, std::move(entry), std::move(reservation));
      }
    }
    return result;
  }

  void erase(const Key& key) {
    std::unique_ptr<CachedCast> dying;
    if (const auto found = cached_.find(key); found != cached_.end()) {
      dying = std::move(found->second);
      cached_.erase(found);
    }
  }

  Tensor add_history(const Key& key, const Tensor& weight, Tensor cast) {
    Tensor result = with_history(cast, weight);
    if (const auto found = cached_.find(key); found != cached_.end() && found->second->cast.is_same(cast)) {
      found->second->with_history = result;
    }
    return result;
  }

  void insert(const Key& key, std::unique_ptr<CachedCast> entry) {
    std::optional<Dying> dying;
    if (cached_.size() >= sweep_at_) {  // a region may outlive many weights
      dying.emplace(take([](const CachedCast& entry) { return !entry.stamp.storage_is_alive(); }));
      sweep_at_ = std::max(kSweepAt, 2 * cached_.size());
    }
    auto& slot = cached_[key];
    std::swap(slot, entry);  // the former entry dies on return
  }

  Cached cached_;
  ProbationQueue probation_;
  UseHistory uses_;
  uint64_t position_ = only<InvalidationLog>().length();  // up to which the log was read
  size_t sweep_at_ = kSweepAt;
  bool shares_ = false;  // some of the cached casts
};

}  // namespace
