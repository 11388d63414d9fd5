// Memory for the length of a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace polycast_cpu {

// An aligned buffer. The thread keeps the memory of small ones for its next call, so a thread may have one at a time.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : data_(bytes <= kKept ? kept() : nullptr) {
    if (data_ == nullptr) {
      owned_ = allocate(bytes);
      data_ = owned_.get();
    }
  }

  template <typename T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  static constexpr size_t kKept = size_t{1} << 17;
  static constexpr std::align_val_t kAlignment{64};

  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };
  using Memory = std::unique_ptr<std::byte, Free>;

  static Memory allocate(size_t bytes) { return Memory(static_cast<std::byte*>(::operator new(bytes, kAlignment))); }

  static std::byte* kept() {
    thread_local const Memory memory = allocate(kKept);
    return memory.get();
  }

  std::byte* data_;
  Memory owned_;
};

// Round up to cache lines.
constexpr size_t aligned(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

}  // namespace polycast_cpu
