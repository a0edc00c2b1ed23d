#include "core/chunked_registration.hpp"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <system_error>
#include <utility>

#include "core/host_mapping.hpp"

namespace sparse_kvcm {
namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;
constexpr std::size_t kSystemPage = 4096;

}  // namespace

ChunkedRegistration::ChunkedRegistration(std::byte* data, std::size_t bytes,
                                         std::size_t chunk_bytes, Registrar registrar)
    : data_(data), bytes_(bytes), chunk_bytes_(chunk_bytes), registrar_(std::move(registrar)) {}

ChunkedRegistration::~ChunkedRegistration() {
  while (registered_ > 0) {
    registered_ = (registered_ - 1) / chunk_bytes_ * chunk_bytes_;
    registrar_.remove(data_ + registered_);
  }
}

void ChunkedRegistration::advance(std::size_t ready) {
  while (registered_ < bytes_) {
    const std::size_t size = std::min(chunk_bytes_, bytes_ - registered_);
    if (registered_ + size > ready) return;
    registrar_.add(data_ + registered_, size);
    registered_ += size;
  }
}

std::size_t registration_limit(std::string_view release) {
  const char* const end = release.data() + release.size();
  int major = 0;
  int minor = 0;
  const auto first = std::from_chars(release.data(), end, major);
  if (first.ec != std::errc{} || first.ptr == end || *first.ptr != '.') return 2 * kGiB;
  if (std::from_chars(first.ptr + 1, end, minor).ec != std::errc{}) return 2 * kGiB;
  return major == 6 && minor >= 11 && minor <= 13 ? 2 * kGiB : 4 * kGiB;
}

std::size_t chunk_size(std::size_t limit, std::size_t page_bytes) {
  for (const std::size_t border : {kHugePage, kSystemPage}) {
    const std::size_t factor = border / std::gcd(border, page_bytes);
    if (page_bytes <= limit / factor) {
      const std::size_t step = page_bytes * factor;
      return limit / step * step;
    }
  }
  return limit;
}

}  // namespace sparse_kvcm
