// The eviction policy of a user store with max_bytes.
//
// Owns how often and when each entry was used, least recently used first. Locks: none; the store calls it with its mutex held.

#pragma once

#include <list>

#include "version_stamp.h"

namespace {

class ByteBudget {
 public:
  struct Usage {
    Key key;
    size_t bytes;
    int uses = 1;
    uint64_t last_use;  // by the clock
  };
  using Handle = std::list<Usage>::iterator;

  explicit ByteBudget(std::optional<size_t> max_bytes) : max_bytes_(max_bytes) {}

  Handle add(const Key& key, size_t bytes) {
    refused_.erase(key);
    bytes_ += bytes;
    return usages_.insert(usages_.end(), {key, bytes, 1, ++clock_});
  }

  void remove(Handle entry) {
    bytes_ -= entry->bytes;
    usages_.erase(entry);
  }

  void clear() {
    usages_.clear();
    bytes_ = 0;
  }

  void note_hit(Handle entry) {
    if (max_bytes_) {
      entry->uses = std::min(entry->uses + 1, kMaxUses);
      entry->last_use = ++clock_;
      usages_.splice(usages_.end(), usages_, entry);
    }
  }

  // Return the key to evict before so many bytes are added, or nothing.
  std::optional<Key> next_to_evict(size_t bytes) const {
    return max_bytes_ && bytes_ + bytes > *max_bytes_ ? std::optional(usages_.front().key) : std::nullopt;
  }

  // Return whether a new entry may be added, in place of the least recently used ones.
  //
  // An entry gives way if it was not used while the new one was refused as often as the entry had been used (16 times where
  // either is a prepacked weight, which takes as long to make as 16 uses save). So a model that is larger than the store has
  // hits on the part that fits: each entry is used again before a layer outside is needed again, and no layer evicts the one
  // that is needed next. A model that is no longer used gives way.
  bool has_room(const Key& key, size_t elements, size_t bytes) {
    if (!max_bytes_) {
      return true;
    }
    if (bytes > *max_bytes_) {
      return false;
    }
    size_t left = bytes_;
    for (auto oldest = usages_.begin(); left + bytes > *max_bytes_; ++oldest) {
      Refused& refused = refused_of(key, elements);
      if (oldest->last_use > refused.since) {
        refused.count = 0;
        refused.since = ++clock_;
      }
      if (refused.count < (key.prepack_id != 0 || oldest->key.prepack_id != 0 ? kUsesToRepack : oldest->uses)) {
        ++refused.count;
        return false;
      }
      left -= oldest->bytes;
    }
    return true;
  }

  // Remember the size of a prepacked weight that had no room.
  void note_refused_size(const Key& key, size_t elements, size_t bytes) { refused_of(key, elements).bytes = bytes; }

  // Return the size that a prepacked weight would have: the known one if it was refused, else the least possible.
  size_t prepacked_size(const Key& key, size_t elements) const {
    const auto found = refused_.find(key);
    const bool is_known = found != refused_.end() && found->second.elements == elements;
    return is_known ? std::max(found->second.bytes, elements) : elements;
  }

 private:
  static constexpr int kMaxUses = 3, kUsesToRepack = 16;
  static constexpr size_t kMaxRefused = 10'000;

  // A hint by address: the weight may have died.
  struct Refused {
    size_t elements = 0, bytes = 0;  // of the weight, and of what was made of it (0 if nothing was)
    int count = 0;                   // refusals since `since`, by the clock
    uint64_t since = 0;
  };

  Refused& refused_of(const Key& key, size_t elements) {
    if (refused_.size() > kMaxRefused) {
      refused_.clear();
    }
    Refused& refused = refused_[key];
    if (refused.elements != elements) {  // of a former weight at the address
      refused = {elements};
    }
    return refused;
  }

  const std::optional<size_t> max_bytes_;
  size_t bytes_ = 0;
  uint64_t clock_ = 0;
  std::list<Usage> usages_;
  ska::flat_hash_map<Key, Refused, KeyHash> refused_;
};

}  // namespace
