#include "core/host_advice.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/check.hpp"
#include "core/rounding.hpp"

namespace sparse_kvcm {

HostAdvice::HostAdvice(const char* function, int node, Warn warn)
    : function_(function), node_(node), warn_(std::move(warn)) {
  const char* const value = std::getenv("SPARSE_KVCM_THP");
  const std::string_view wish = value == nullptr ? "" : value;
  huge_pages_ = wish != "0";
  if (wish.empty() || wish == "0" || wish == "1" || !warn_) return;
  warn_(message("SPARSE_KVCM_THP", "must be 0 or 1, got \"", wish, "\"; huge pages are asked for"));
}

// Where the kernel does not know the advice, only the speed is another.
void HostAdvice::apply(std::byte* data, std::size_t bytes) {
  const std::size_t past = reinterpret_cast<std::uintptr_t>(data) % kHugePage;
  const std::size_t before = std::min(past == 0 ? 0 : kHugePage - past, bytes);
  const std::size_t whole = huge_pages_ ? (bytes - before) / kHugePage * kHugePage : 0;
  const auto advise = [&](std::size_t begin, std::size_t end, int advice) {
    if (begin < end) static_cast<void>(madvise(data + begin, end - begin, advice));
  };
  advise(0, whole == 0 ? bytes : before, MADV_NOHUGEPAGE);
  if (whole > 0) {
    advise(before, before + whole, MADV_HUGEPAGE);
    advise(before + whole, bytes, MADV_NOHUGEPAGE);
  }
  if (node_ == kAnyNode) return;
  const int error = prefer_node(data, bytes, node_);
  if (error != 0) node_error_ = error;
}

void HostAdvice::verify(std::byte* data, std::size_t bytes) const {
  if (node_ == kAnyNode || !warn_) return;
  const std::optional<bool> there = is_on_node(data, bytes, node_);
  if (there && *there) return;
  const int error = node_error_;
  const std::string reason = error == 0 ? ""
                                        : " (mbind: " + std::generic_category().message(error) +
                                              "; in a container SYS_NICE)";
  warn_(message(function_,
                there ? "not all host memory is on the GPU's NUMA node "
                      : "it is not known whether host memory is on the NUMA node ",
                node_, reason, "; from another node the link is slower"));
}

// Where the kernel does not know the advice, a fork costs memory, no more.
void keep_from_children(std::byte* data, std::size_t bytes) noexcept {
  static_cast<void>(madvise(data, bytes, MADV_DONTFORK));
}

}  // namespace sparse_kvcm
