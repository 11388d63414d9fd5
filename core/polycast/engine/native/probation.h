// Probation: how a region finds the weights that are worth caching.
//
// Most weights are used once in a region. A cast of one is of no use afterwards, and caching it costs memory that the next cast
// would find in the processor's cache. So a new cast enters a short queue. It is cached if the weight is used again while it is
// in the queue, or if the weight was used again, after its cast had left the queue, earlier in this region or in the last one.
//
// Owned by one thread, except for the shared count of bytes. Locks: none.

#pragma once

#include "shared_casts.h"
#include "version_stamp.h"

namespace {

// Remember the weights that are used more than once in a region. Hints by address: a weight may have died.
class UseHistory {
 public:
  // Note a use that found no cast; return whether to cache the weight at once.
  bool note_miss(const Key& key) {
    if (slots_ == nullptr) {
      slots_ = std::make_unique<std::array<Slot, kSlots>>();
    }
    Slot& slot = slot_of(key);
    if (!(slot.key == key)) {
      slot = {key, region_, 0};
      return false;
    }
    const bool is_reused = slot.used == region_ || slot.reused == region_ - 1;
    if (slot.used == region_) {
      slot.reused = region_;
    }
    slot.used = region_;
    return is_reused;
  }

  void note_hit(const Key& key) {
    if (slots_ != nullptr && slot_of(key).key == key) {
      slot_of(key).reused = region_;
    }
  }

  void end_region() { ++region_; }

 private:
  static constexpr size_t kSlots = 2048;
  struct Slot {
    Key key{nullptr, ScalarType::Undefined};
    uint32_t used = 0, reused = 0;  // the last regions in which it was used, and used again
  };

  Slot& slot_of(const Key& key) {
    return (*slots_)[(reinterpret_cast<uintptr_t>(key.weight) / 64 * 0x9E3779B97F4A7C15ull >> 48) % kSlots];
  }

  std::unique_ptr<std::array<Slot, kSlots>> slots_;
  uint32_t region_ = 2;
};

// The bytes in the queues of all threads: at most twice the largest cast, and a little for small ones.
class ProbationBytes {
 public:
  static bool reserve(size_t bytes) {
    size_t largest = largest_.load(std::memory_order_relaxed);
    while (bytes > largest && !largest_.compare_exchange_weak(largest, bytes, std::memory_order_relaxed)) {
    }
    largest = std::max(largest, bytes);
    size_t reserved = reserved_.load(std::memory_order_relaxed);
    do {
      if (reserved + bytes > 2 * largest + kForSmallOnes) {
        return false;
      }
    } while (!reserved_.compare_exchange_weak(reserved, reserved + bytes, std::memory_order_relaxed));
    return true;
  }

  static void release(size_t bytes) { reserved_.fetch_sub(bytes, std::memory_order_relaxed); }

 private:
  static constexpr size_t kForSmallOnes = 1 << 20;
  static inline std::atomic<size_t> reserved_{0}, largest_{0};
};

// The last few casts of a thread, of which one may be large: two would take more of the processor's cache than one.
class ProbationQueue {
 public:
  // The bytes of an entry, from before its cast is made.
  class Reservation {
   public:
    Reservation() = default;
    explicit Reservation(size_t bytes) : bytes_(ProbationBytes::reserve(bytes) ? bytes : 0) {}
    Reservation(Reservation&& other) noexcept : bytes_(std::exchange(other.bytes_, 0)) {}
    Reservation& operator=(Reservation&& other) noexcept {
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Reservation() { ProbationBytes::release(bytes_); }

    size_t bytes() const { return bytes_; }  // those of the cast when it was made: a caller may resize it

   private:
    size_t bytes_ = 0;
  };

  // Take out the entry of a key for which `condition` holds, or return null.
  template <class Condition>
  std::unique_ptr<CachedCast> take(const Key& key, const Condition& condition) {
    for (Entry& entry : entries_) {
      if (entry.cast && entry.key == key && condition(*entry.cast)) {
        return extract(entry);
      }
    }
    return nullptr;
  }

  // Take out all entries for which `condition` holds.
  template <class Condition, class Casts>
  void take_all(const Condition& condition, Casts& taken) {
    for (Entry& entry : entries_) {
      if (entry.cast && condition(*entry.cast)) {
        taken.push_back(extract(entry));
      }
    }
  }

  // Make room for a cast, oldest entries first. The last cast that is dropped is returned in `reusable`, for its memory.
  Reservation make_room(size_t bytes, Tensor& reusable) {
    size_t others = 0, largest = std::max(bytes, kSmall);
    for (const Entry& entry : entries_) {
      others += entry.reservation.bytes();
      largest = std::max(largest, entry.reservation.bytes());
    }
    std::vector<std::unique_ptr<CachedCast>> dying;
    for (size_t i = entries_.size(); i-- > 0;) {  // the oldest is the last
      if (entries_[i].cast && (i == entries_.size() - 1 || others + bytes > largest + kSmall)) {
        others -= entries_[i].reservation.bytes();
        auto dropped = extract(entries_[i]);
        reusable = std::move(dropped->cast);
        dying.push_back(std::move(dropped));
      }
    }
    dying.clear();
    return Reservation(bytes);
  }

  void push(const Key& key, std::unique_ptr<CachedCast> cast, Reservation reservation) {
    std::unique_ptr<CachedCast> dying;
    if (entries_.back().cast) {  // an entry was added since make_room()
      dying = extract(entries_.back());
    }
    std::rotate(entries_.begin(), entries_.end() - 1, entries_.end());
    entries_.front() = {key, std::move(cast), std::move(reservation)};
  }

 private:
  static constexpr size_t kEntries = 4, kSmall = 4096;

  struct Entry {
    Key key{nullptr, ScalarType::Undefined};
    std::unique_ptr<CachedCast> cast;
    Reservation reservation;
  };

  static std::unique_ptr<CachedCast> extract(Entry& entry) {
    entry.reservation = Reservation();
    return std::move(entry.cast);
  }

  std::array<Entry, kEntries> entries_;  // the newest first
};

}  // namespace
