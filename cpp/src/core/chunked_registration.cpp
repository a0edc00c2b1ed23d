#include "core/chunked_registration.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/host_advice.hpp"
#include "core/system_file.hpp"

namespace sparse_kvcm {
namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;

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

void ChunkedRegistration::add_all(const std::function<void(std::size_t)>& registered) {
  while (registered_ < bytes_) {
    const std::size_t size = std::min(chunk_bytes_, bytes_ - registered_);
    registrar_.add(data_ + registered_, size);
    registered_ += size;
    if (registered) registered(registered_);
  }
}

std::size_t registration_limit(std::string_view release) {
  const std::size_t dot = std::min(release.find('.'), release.size());
  const auto major = parse_number(release.substr(0, dot));
  const auto minor = parse_number(release.substr(std::min(dot + 1, release.size())));
  const bool small = !major || !minor || (*major == 6 && *minor >= 11 && *minor <= 13);
  return small ? 2 * kGiB : 4 * kGiB;
}

std::size_t chunk_size(std::size_t limit, std::size_t page_bytes, std::size_t system_page) {
  if (page_bytes > limit) return limit;
  for (const std::size_t border : {kHugePage, system_page}) {
    const std::size_t step = std::lcm(border, page_bytes);
    if (step > 0 && step <= limit) return limit / step * step;
  }
  return limit;
}

}  // namespace sparse_kvcm
