// The keys that missed, in shared memory: a bit per key, and once numbered, for each 32-bit word
// the number of misses below it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/ordinal_index.cuh"

namespace sparse_kvcm::device {

template <int kThreads>
class MissSet {
 public:
  // Shared memory for keys in [0, keys), in bytes: a multiple of 16.
  __host__ __device__ static std::uint32_t bytes(std::int32_t keys) {
    return padded_words(keys) * 6;
  }
  // `memory` is zeroed.
  __device__ MissSet(std::byte* memory, std::int32_t keys)
      : words_(reinterpret_cast<std::uint32_t*>(memory)),
        below_(reinterpret_cast<std::uint16_t*>(words_ + padded_words(keys))) {}

  __device__ void insert(Key key) { atomicOr(&words_[key / 32], 1u << (key % 32)); }

  // Misses among the thread's stretch of keys in [0, keys).
  [[nodiscard]] __device__ std::uint32_t count(Key keys) const {
    std::uint32_t misses = 0;
#pragma unroll 1
    for (std::uint32_t w = first_word(keys); w < end_word(keys); ++w) misses += __popc(words_[w]);
    return misses;
  }
  // `below` is what all threads below this one counted. Behind a barrier, `number` holds.
  __device__ void number_from(Key keys, std::uint32_t below) {
#pragma unroll 1
    for (std::uint32_t w = first_word(keys); w < end_word(keys); ++w) {
      below_[w] = static_cast<std::uint16_t>(below);
      below += __popc(words_[w]);
    }
  }
  // Misses with smaller keys than `key`.
  [[nodiscard]] __device__ std::uint32_t number(Key key) const {
    return below_[key / 32] + __popc(words_[key / 32] & ((1u << (key % 32)) - 1));
  }

 private:
  __host__ __device__ static std::uint32_t padded_words(std::int32_t keys) {
    return (static_cast<std::uint32_t>(keys) + 255) / 256 * 8;
  }
  __device__ static std::uint32_t words_per_thread(Key keys) {
    return (keys + 32 * kThreads - 1) / (32 * kThreads);
  }
  __device__ static std::uint32_t first_word(Key keys) {
    return threadIdx.x * words_per_thread(keys);
  }
  __device__ static std::uint32_t end_word(Key keys) {
    return min(first_word(keys) + words_per_thread(keys), (keys + 31) / 32);
  }

  std::uint32_t* words_;
  std::uint16_t* below_;
};

}  // namespace sparse_kvcm::device
