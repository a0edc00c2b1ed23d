// Receiving: host pages first, then units page by page, then the watermark.
//
// What is copied is not copied under the lock. That is safe because a receiving request's pages
// cannot go: nothing but close gives them back, and close leaves it to the last writer.
#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "core/rounding.hpp"
#include "manager/device_work.hpp"
#include "manager/request.hpp"

namespace sparse_kvcm {

void Request::check_not_receiving(const char* function) const {
  if (is_receiving()) {
    fail_state(function, "the request is receiving units [", committed, ", ", reserved,
               "); commit_history ends that, or close");
  }
}

void Request::check_reserve(std::int32_t num_units) const {
  constexpr const char* kFunction = "KvCache.reserve_history";
  check_open(kFunction);
  check_not_in_step(kFunction);
  check_not_receiving(kFunction);
  if (manager_->is_resident()) {
    fail_state(kFunction, "the manager has no groups, so no host history");
  }
  if (batch != nullptr) fail_state(kFunction, "the request has row ", row, "; leave the Batch");
  if (has_growth()) fail_state(kFunction, "growth is pending; resize the request back");
  if (watermark != committed) {
    fail_state(kFunction, "the watermark ", watermark, " is below the committed length ", committed,
               "; suspend first");
  }
  if (num_units < 1 || num_units > need - committed) {
    fail_argument(kFunction, "num_units must be in [1, ", need - committed, "] (need ", need,
                  ", committed ", committed, "), got ", num_units);
  }
}

bool Request::reserve_history(std::int32_t num_units) {
  check_reserve(num_units);
  written_.assign(static_cast<std::size_t>(manager_->num_groups()),
                  std::vector<bool>(static_cast<std::size_t>(num_units)));
  const auto pages_before = static_cast<std::int32_t>(pages.size());
  if (!take_pages(committed + num_units)) {
    keep_pages(pages_before);
    return false;
  }
  reserved = committed + num_units;
  reserved_ready = manager_->timeline.newest();
  return true;
}

void Request::check_write(std::int32_t group, const HistoryPages& source) const {
  constexpr const char* kFunction = "KvCache.write_history";
  check_open(kFunction);
  if (!is_receiving()) fail_state(kFunction, "the request is not receiving; reserve_history first");
  manager_->check_group(kFunction, group);
  if (source.units_per_page < 1 || source.units_per_page > kMaxPageTokens) {
    fail_argument(kFunction, "units_per_page must be in [1, ", kMaxPageTokens, "], got ",
                  source.units_per_page);
  }
  if (source.first < committed || source.first > reserved || source.num_units < 0 ||
      source.num_units > reserved - source.first) {
    fail_argument(kFunction, "units must be in [", committed, ", ", reserved,
                  "), those reserved, got ", source.num_units, " from ", source.first);
  }
  check_regions(group, source);
}

std::pair<Request::Marks, Request::Marks> Request::written(std::int32_t group,
                                                           const HistoryPages& source) noexcept {
  const auto begin = written_[static_cast<std::size_t>(group)].begin() + (source.first - committed);
  return {begin, begin + source.num_units};
}

void Request::check_regions(std::int32_t group, const HistoryPages& source) const {
  constexpr const char* kFunction = "KvCache.write_history";
  const SelectionGroupConfig& config = manager_->config.groups[static_cast<std::size_t>(group)];
  const std::vector<std::int32_t>& bytes = config.layout.region_bytes();
  if (source.regions.size() != config.layers.size() * bytes.size()) {
    fail_argument(kFunction, "regions must be ", config.layers.size(), " member layers x ",
                  bytes.size(), " regions, got ", source.regions.size());
  }
  for (std::size_t i = 0; i < source.regions.size() && source.num_units > 0; ++i) {
    const RegionPages& region = source.regions[i];
    const std::int64_t page = std::int64_t{source.units_per_page} * bytes[i % bytes.size()];
    if (region.data == nullptr) fail_argument(kFunction, "regions[", i, "].data must not be null");
    if (source.num_units > source.units_per_page && region.page_stride < page) {
      fail_argument(kFunction, "regions[", i, "].page_stride must be >= ", page, " bytes, got ",
                    region.page_stride);
    }
  }
}

std::vector<std::int32_t> Request::begin_write(std::int32_t group, const HistoryPages& source) {
  check_write(group, source);
  const auto [begin, end] = written(group, source);
  const auto twice = std::find(begin, end, true);
  if (twice != end) {
    fail_argument("KvCache.write_history", "units must be written once, got ", source.num_units,
                  " from ", source.first, ", of which ", source.first + (twice - begin),
                  " has been");
  }
  std::vector<std::int32_t> taken = pages;
  std::fill(begin, end, true);
  ++num_writers_;
  return taken;
}

void Request::drop_write(std::int32_t group, const HistoryPages& source) noexcept {
  const auto [begin, end] = written(group, source);
  std::fill(begin, end, false);
  end_write();
}

void Request::end_write() noexcept {
  --num_writers_;
  if (state == KvCacheState::kClosed && left_step == nullptr) end_step(Growth::kDrop);
}

void Request::commit_history(Stream stream) {
  constexpr const char* kFunction = "KvCache.commit_history";
  check_open(kFunction);
  if (!is_receiving()) fail_state(kFunction, "the request is not receiving; reserve_history first");
  if (num_writers_ > 0)
    fail_state(kFunction, num_writers_, " calls of write_history are under way");
  for (std::size_t group = 0; group < written_.size(); ++group) {
    const auto lacking = std::find(written_[group].begin(), written_[group].end(), false);
    if (lacking != written_[group].end()) {
      fail_state(kFunction, "each of the ", reserved - committed, " units must be written once, ",
                 "group ", group, " lacks unit ", committed + (lacking - written_[group].begin()));
    }
  }
  manager_->check_not_capturing(kFunction, stream);
  const std::int32_t begin = all_window() ? 0
                             : lease      ? std::max(window_begin, reserved - lease->window_slots)
                                          : reserved;
  if (begin < reserved) {
    DeviceWork work(*manager_, kFunction, stream);
    load_window(std::max(committed, begin), reserved, stream);
    work.leave();
  }
  length = committed = watermark = std::exchange(reserved, 0);
  history = tokens = std::max(history, committed * manager_->config.tokens_per_unit);
  window_begin = begin;
  reserved_ready = nullptr;
  written_.clear();
}

}  // namespace sparse_kvcm
