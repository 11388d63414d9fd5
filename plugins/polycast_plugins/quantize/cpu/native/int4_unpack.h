// A chunk of a weight in 4 bits as a weight in 8 bits, for products with many rows.
#pragma once

#include <algorithm>
#include <cstring>

#include "int4_dots_avx2.h"
#include "int4_dots_neon.h"
#include "int4_layout.h"
#include "isa.h"
#include "simd.h"

namespace polycast_cpu {

// The most terms of a chunk that is unpacked.
constexpr int64_t kMaxUnpacked = 256;

// 64 columns in the layout of a Weight.
struct UnpackedChunk {
  alignas(64) int8_t values[kMaxUnpacked * kBlock];
  alignas(64) int32_t offsets[kBlock];
  alignas(64) float scales[kBlock];  // by unpack_vnni() only
};

inline void unpack_plain(const uint8_t* chunk, int64_t count, int64_t group_size, UnpackedChunk& out) {
  std::fill_n(out.offsets, kBlock, 0);
  const uint8_t* group = chunk + Int4Weight::kScaleBytes;
  for (int64_t first = 0; first < count; first += group_size) {
    const int64_t eights = Groups::eights(std::min(group_size, count - first));
    for (int64_t four = 0; four < 2 * eights; ++four) {
      for (int64_t lane = 0; lane < kBlock; ++lane) {
        for (int64_t k = 0; k < 4; ++k) {
          const uint8_t byte = group[Int4Weight::kMultiplierBytes + four / 2 * Int4Weight::kStepBytes + lane * 4 + k];
          const int level = (four % 2 == 0 ? byte & 15 : byte >> 4) - Int4Weight::kZero;
          const auto value = static_cast<int8_t>(level * static_cast<int8_t>(group[lane]));
          out.values[((first / 4 + four) * kBlock + lane) * 4 + k] = value;
          out.offsets[lane] += value * kZeroPoint;
        }
      }
    }
    group += Int4Weight::kMultiplierBytes + eights * Int4Weight::kStepBytes;
  }
}

#if defined(__x86_64__)

// A group's multipliers of 16 columns, made positive: two products of 8 bits are then one of 16 bits, since neither exceeds 255.
// A level l stands for l - 8, and (l - 8) * m is ((15 - l) - 7) * -m.
struct Multipliers {
  __m512i flips;       // of the bits of levels
  __m512i magnitudes;  // of 16 bits
  __m512i zeros;       // of 8 bits
};

[[gnu::target("avx512f,avx512bw,avx512vl,avx512vnni")]] inline Multipliers multipliers_at(const uint8_t* from) {
  const __m512i lowest_byte = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0x00000000);
  const __m512i numbers = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m512i flips = _mm512_srai_epi32(numbers, 31), magnitudes = _mm512_abs_epi32(numbers);
  const __m512i zeros = _mm512_sub_epi32(_mm512_slli_epi32(magnitudes, 3), _mm512_and_si512(magnitudes, flips));
  return {flips, _mm512_or_si512(magnitudes, _mm512_slli_epi32(magnitudes, 16)), _mm512_shuffle_epi8(zeros, lowest_byte)};
}

[[gnu::target("avx512f,avx512bw,avx512vl,avx512vnni")]] inline __m512i times(__m512i levels, const Multipliers& by) {
  return _mm512_sub_epi8(_mm512_mullo_epi16(levels, by.magnitudes), by.zeros);
}

[[gnu::target("avx512f,avx512bw,avx512vl,avx512vnni")]] inline void unpack_vnni(const uint8_t* chunk, int64_t count, int64_t group_size,
                                                                                UnpackedChunk& out) {
  const __m512i low_half = _mm512_set1_epi8(15), zero_point = _mm512_set1_epi8(static_cast<char>(kZeroPoint));
  __m512i offsets[4] = {};
#pragma GCC unroll 4
  for (int part = 0; part < 4; ++part) {
    _mm512_store_ps(out.scales + 16 * part, load16(reinterpret_cast<const at::BFloat16*>(chunk) + 16 * part, 0xffff));
  }
  const uint8_t* at = chunk + Int4Weight::kScaleBytes;
  int8_t* to = out.values;
  for (int64_t first = 0; first < count; first += group_size) {
    Multipliers multipliers[4];
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      multipliers[part] = multipliers_at(at + 16 * part);
    }
    at += Int4Weight::kMultiplierBytes;
    for (int64_t step = Groups::eights(std::min(group_size, count - first)); step > 0; --step) {
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const __m512i both = _mm512_xor_si512(_mm512_loadu_si512(at + 64 * part), multipliers[part].flips);
        const __m512i low = times(_mm512_and_si512(both, low_half), multipliers[part]);
        const __m512i high = times(_mm512_and_si512(_mm512_srli_epi16(both, 4), low_half), multipliers[part]);
        _mm512_store_si512(to + 64 * part, low);
        _mm512_store_si512(to + 64 * part + 4 * kBlock, high);
        offsets[part] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(offsets[part], zero_point, low), zero_point, high);
      }
      at += Int4Weight::kStepBytes;
      to += 8 * kBlock;
    }
  }
#pragma GCC unroll 4
  for (int part = 0; part < 4; ++part) {
    _mm512_store_si512(out.offsets + 16 * part, offsets[part]);
  }
}

[[gnu::target("avx2")]] inline __m256i times(__m256i levels, __m256i multipliers, __m256i zeros) {
  const __m256i low_byte = _mm256_set1_epi16(255);
  const __m256i even = _mm256_mullo_epi16(_mm256_and_si256(levels, low_byte), multipliers);
  const __m256i odd = _mm256_mullo_epi16(_mm256_andnot_si256(low_byte, levels), multipliers);
  return _mm256_sub_epi8(_mm256_or_si256(_mm256_and_si256(even, low_byte), odd), zeros);
}

[[gnu::target("avx2")]] inline __m256i sum_of_fours(__m256i signed_bytes) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), signed_bytes), _mm256_set1_epi16(1));
}

[[gnu::target("avx2")]] inline void unpack_avx2(const uint8_t* chunk, int64_t count, int64_t group_size,
                                                UnpackedChunk& out) {
  const __m256i low_half = _mm256_set1_epi8(15);
  for (int part = 0; part < 8; ++part) {
    __m256i sum = _mm256_setzero_si256();
    const uint8_t* group = chunk + Int4Weight::kScaleBytes;
    int8_t* to = out.values + 32 * part;
    for (int64_t first = 0; first < count; first += group_size) {
      const __m256i numbers =
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(group + 8 * part)));
      const __m256i multipliers =
          _mm256_mullo_epi32(_mm256_and_si256(numbers, _mm256_set1_epi32(0xffff)), _mm256_set1_epi32(0x10001));
      const __m256i eightfold = _mm256_and_si256(_mm256_slli_epi32(numbers, 3), _mm256_set1_epi32(255));
      const __m256i zeros = _mm256_mullo_epi32(eightfold, _mm256_set1_epi32(0x1010101));
      group += Int4Weight::kMultiplierBytes;
      for (int64_t step = Groups::eights(std::min(group_size, count - first)); step > 0; --step) {
        const __m256i both = load32(group + 32 * part);
        const __m256i low = times(_mm256_and_si256(both, low_half), multipliers, zeros);
        const __m256i high = times(_mm256_and_si256(_mm256_srli_epi16(both, 4), low_half), multipliers, zeros);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to), low);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + 4 * kBlock), high);
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(sum_of_fours(low), sum_of_fours(high)));
        group += Int4Weight::kStepBytes;
        to += 8 * kBlock;
      }
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>(out.offsets + 8 * part),
                       _mm256_mullo_epi32(sum, _mm256_set1_epi32(kZeroPoint)));
  }
}

#elif defined(__aarch64__)

[[gnu::target("arch=armv8.2-a+dotprod")]] inline void unpack_neon(const uint8_t* chunk, int64_t count,
                                                                  int64_t group_size, UnpackedChunk& out) {
  const uint8x16_t low_half = vdupq_n_u8(15), by_column = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  const int8x16_t zero = vdupq_n_s8(Int4Weight::kZero), ones = vdupq_n_s8(1);
  for (int part = 0; part < 16; ++part) {
    int32x4_t sum = vdupq_n_s32(0);
    const uint8_t* group = chunk + Int4Weight::kScaleBytes;
    int8_t* to = out.values + 16 * part;
    for (int64_t first = 0; first < count; first += group_size) {
      int32_t four;
      std::memcpy(&four, group + 4 * part, sizeof four);
      const int8x16_t multipliers = vqtbl1q_s8(vreinterpretq_s8_s32(vdupq_n_s32(four)), by_column);
      group += Int4Weight::kMultiplierBytes;
      for (int64_t step = Groups::eights(std::min(group_size, count - first)); step > 0; --step) {
        const uint8x16_t both = vld1q_u8(group + 16 * part);
        const int8x16_t of_low = vreinterpretq_s8_u8(vandq_u8(both, low_half));
        const int8x16_t of_high = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        const int8x16_t low = vmulq_s8(vsubq_s8(of_low, zero), multipliers);
        const int8x16_t high = vmulq_s8(vsubq_s8(of_high, zero), multipliers);
        vst1q_s8(to, low);
        vst1q_s8(to + 4 * kBlock, high);
        sum = vdotq_s32(vdotq_s32(sum, low, ones), high, ones);
        group += Int4Weight::kStepBytes;
        to += 8 * kBlock;
      }
    }
    vst1q_s32(out.offsets + 4 * part, vmulq_n_s32(sum, kZeroPoint));
  }
}

#endif

// Unpack `count` terms, and zeros up to a multiple of 64 terms.
inline void unpack(Isa isa, const uint8_t* chunk, int64_t count, int64_t group_size, UnpackedChunk& out) {
  std::fill(out.values + Groups::padded(count) * kBlock, out.values + blocks(count) * kBlock * kBlock, 0);
#if defined(__x86_64__)
  if (has_avx512(isa)) {
    return unpack_vnni(chunk, count, group_size, out);
  }
  if (has_avx2(isa)) {
    return unpack_avx2(chunk, count, group_size, out);
  }
#elif defined(__aarch64__)
  if (has_dotprod(isa)) {
    return unpack_neon(chunk, count, group_size, out);
  }
#endif
  unpack_plain(chunk, count, group_size, out);
}

}  // namespace polycast_cpu
