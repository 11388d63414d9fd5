// Loops on torch's own threads, for the engine and for the C++ ops of backends.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

// The OpenMP library that torch is linked with. A second one, which -fopenmp would add, has threads of its own, which compete
// with torch's and ignore torch.set_num_threads.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
int omp_get_num_threads() __attribute__((weak));
}

namespace polycast {

// Return whether torch's threads can be reached.
inline bool has_threads() {
  return GOMP_parallel != nullptr && omp_get_thread_num != nullptr && omp_get_num_threads != nullptr;
}

// Call body(begin, end) for consecutive parts of [0, count) on torch's threads, each with at least about `grain` items. Throw what the
// body throws, of several exceptions the first.
//
// The team has the size that at::parallel_for uses; threads without a part return at once. For a smaller team libgomp would end
// the other threads, and create them again for torch's next loop, in some 0.1 ms.
template <typename Body>
void for_each_part(int64_t count, int64_t grain, const Body& body) {
  const int64_t wanted = (count + grain - 1) / grain;
  const int64_t threads = wanted <= 1 ? 1 : at::get_num_threads();
  if (threads <= 1 || !has_threads() || at::in_parallel_region()) {
    body(int64_t{0}, count);
    return;
  }
  struct Shared {
    const Body& body;
    int64_t count, wanted;
    std::atomic<bool> has_failed = false;
    std::exception_ptr error = nullptr;
  } shared{body, count, wanted};
  GOMP_parallel(
      [](void* data) {
        Shared& shared = *static_cast<Shared*>(data);
        // OMP_THREAD_LIMIT and OMP_DYNAMIC may make the team smaller.
        const int64_t parts = std::min<int64_t>(shared.wanted, omp_get_num_threads());
        const int64_t number = omp_get_thread_num();
        if (number >= parts) {
          return;
        }
        try {
          shared.body(shared.count * number / parts, shared.count * (number + 1) / parts);
        } catch (...) {  // it must not leave the team
          if (!shared.has_failed.exchange(true)) {
            shared.error = std::current_exception();
          }
        }
      },
      &shared, static_cast<unsigned>(threads), 0);
  if (shared.error != nullptr) {
    std::rethrow_exception(shared.error);
  }
}

}  // namespace polycast
