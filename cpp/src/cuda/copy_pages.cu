// A kernel, not cudaMemcpy: a slot of a pool that may shrink can lie across two registrations of
// host memory, which a copy refuses, and hundreds of pages are one launch. A block takes a part of
// a page at a time; the slots travel as kernel parameters.
#include <algorithm>
#include <numeric>

#include "cuda/error.hpp"
#include "cuda/kernels.hpp"
#include "cuda/launch.hpp"

namespace sparse_kvcm {
namespace {

constexpr int kThreads = 256;
constexpr std::size_t kPagesAtOnce = 2048;
constexpr std::int64_t kWordsPerPart = std::int64_t{4} * kThreads;

struct PageLaunch {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::int64_t from_stride = 0;
  std::int64_t to_stride = 0;
  std::int64_t words = 0;  // of a page
  std::int64_t parts = 0;  // of a page
  std::int64_t num_items = 0;
  std::int32_t from_slots[kPagesAtOnce];
  std::int32_t to_slots[kPagesAtOnce];
};
static_assert(sizeof(PageLaunch) <= 32'764, "kernel parameters, CUDA 12.1 and later");

template <class Word>
__global__ void __launch_bounds__(kThreads)
    copy_pages_kernel(const __grid_constant__ PageLaunch p) {
  for (std::int64_t item = blockIdx.x; item < p.num_items; item += gridDim.x) {
    const std::int64_t page = item / p.parts;
    const std::int64_t first = item % p.parts * kWordsPerPart;
    const auto* from = reinterpret_cast<const Word*>(p.from + p.from_slots[page] * p.from_stride);
    auto* to = reinterpret_cast<Word*>(p.to + p.to_slots[page] * p.to_stride);
    const std::int64_t end = first + kWordsPerPart < p.words ? first + kWordsPerPart : p.words;
    for (std::int64_t w = first + threadIdx.x; w < end; w += kThreads) to[w] = from[w];
  }
}

template <class Word>
void launch_words(PageLaunch& p, std::int64_t bytes, std::int64_t num_pages, cudaStream_t stream) {
  p.words = bytes / static_cast<std::int64_t>(sizeof(Word));
  p.parts = (p.words + kWordsPerPart - 1) / kWordsPerPart;
  p.num_items = p.parts * num_pages;
  const unsigned blocks = num_blocks(p.num_items);
  copy_pages_kernel<Word><<<blocks, kThreads, 0, stream>>>(p);
  SPARSE_KVCM_CUDA_CHECK(cudaGetLastError());
}

// The widest word that divides all addresses and sizes: page bytes are the caller's.
std::int64_t word_bytes(const PageCopy& copy) {
  std::int64_t common = std::gcd(std::int64_t{16}, copy.bytes);
  common = std::gcd(common, std::gcd(copy.device_stride, copy.host_stride));
  for (const std::byte* base : {copy.device, copy.host}) {
    common = std::gcd(common, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(base)));
  }
  return common;
}

}  // namespace

void launch_copy_pages(const PageCopy& copy, cudaStream_t stream) {
  const bool to_host = copy.direction == PageDirection::kToHost;
  PageLaunch p;
  p.from = to_host ? copy.device : copy.host;
  p.to = to_host ? copy.host : copy.device;
  p.from_stride = to_host ? copy.device_stride : copy.host_stride;
  p.to_stride = to_host ? copy.host_stride : copy.device_stride;
  const std::int64_t word = word_bytes(copy);
  for (std::size_t first = 0; first < copy.pages.size(); first += kPagesAtOnce) {
    const auto pages = copy.pages.subspan(first, std::min(kPagesAtOnce, copy.pages.size() - first));
    for (std::size_t i = 0; i < pages.size(); ++i) {
      p.from_slots[i] = to_host ? pages[i].device_slot : pages[i].host_slot;
      p.to_slots[i] = to_host ? pages[i].host_slot : pages[i].device_slot;
    }
    const auto num_pages = static_cast<std::int64_t>(pages.size());
    if (word == 16) launch_words<uint4>(p, copy.bytes, num_pages, stream);
    if (word == 8) launch_words<std::uint64_t>(p, copy.bytes, num_pages, stream);
    if (word == 4) launch_words<std::uint32_t>(p, copy.bytes, num_pages, stream);
    if (word == 2) launch_words<std::uint16_t>(p, copy.bytes, num_pages, stream);
    if (word == 1) launch_words<std::uint8_t>(p, copy.bytes, num_pages, stream);
  }
}

}  // namespace sparse_kvcm
