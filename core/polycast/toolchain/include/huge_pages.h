// Memory in huge pages, for weights that each call reads from end to end. In a virtual machine, looking up small pages takes as long
// as reading them. malloc reuses memory in small pages, so this comes from the system.

#pragma once

#include <ATen/TensorUtils.h>
#include <ATen/ops/from_blob.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace polycast {

// Return a dense tensor of zeros on the CPU; an undefined one if it is smaller than a huge page, or the system has none. `strides`:
// contiguous by default.
inline at::Tensor zeros_in_huge_pages([[maybe_unused]] at::IntArrayRef sizes, [[maybe_unused]] at::ScalarType dtype,
                                      [[maybe_unused]] std::optional<at::IntArrayRef> strides = std::nullopt) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr size_t huge_page = size_t{1} << 21;
  const size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  if (bytes < huge_page) {
    return {};
  }
  const size_t reserved = bytes + huge_page;
  void* const memory = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return {};
  }
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + huge_page - 1) / huge_page * huge_page;
  void* const data = reinterpret_cast<void*>(begin);
  madvise(data, bytes / huge_page * huge_page, MADV_HUGEPAGE);  // the rest would fill a part of one
  return at::from_blob(data, sizes, strides ? at::DimVector(*strides) : at::DimVector(at::detail::defaultStrides(sizes)),
                       [memory, reserved](void*) { munmap(memory, reserved); }, at::TensorOptions(dtype));
#else
  return {};
#endif
}

}  // namespace polycast
