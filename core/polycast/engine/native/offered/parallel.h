// Loops over torch's own threads: for the engine, and for the ops of backends, which may include it.
//
// Owns nothing. Locks: none.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

// The OpenMP that torch's libraries were linked with, found through them. A second one, as the compiler's -fopenmp would
// bring, has threads of its own, which torch.set_num_threads does not reach and which compete with torch's.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
int omp_get_num_threads() __attribute__((weak));
}

namespace polycast {

// Whether there are threads to be had at all, beside the one that asks.
inline bool has_threads() {
  return GOMP_parallel != nullptr && omp_get_thread_num != nullptr && omp_get_num_threads != nullptr;
}

// Call body(begin, end) for parts of [0, count), on as many threads as have `grain` to do. The body must not throw.
template <typename Body>
void for_each_part(int64_t count, int64_t grain, const Body& body) {
  const int64_t wanted = (count + grain - 1) / grain;
  const auto threads = wanted <= 1 ? 1 : std::min<int64_t>(wanted, at::get_num_threads());
  if (threads <= 1 || !has_threads() || at::in_parallel_region()) {
    body(int64_t{0}, count);
    return;
  }
  struct Shared {
    const Body& body;
    int64_t count;
  } shared{body, count};
  GOMP_parallel(
      [](void* data) {
        const auto& all = *static_cast<const Shared*>(data);
        const int64_t number = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t begin = all.count * number / threads, end = all.count * (number + 1) / threads;
        if (begin < end) {
          all.body(begin, end);
        }
      },
      &shared, static_cast<unsigned>(threads), 0);
}

}  // namespace polycast
