// From a quota to slots.
//
// A tier's granules are dealt to its pool groups by weight. A group whose share gives it no more
// than its least is set to that and leaves the deal, the rest is dealt again: so a small group
// costs the others, never the floor of one.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "core/rounding.hpp"
#include "sparse_kvcm/storage_layout.hpp"
#include "storage/config_check.hpp"
#include "storage/granule.hpp"

namespace sparse_kvcm {
namespace {

constexpr std::int64_t kLeastGranule = std::int64_t{2} << 20;
constexpr std::int64_t kGiB = std::int64_t{1} << 30;
constexpr std::int64_t kMaxSlots = std::numeric_limits<std::int32_t>::max();  // ids have 32 bits
// Stands for all that is more: no quota has it, and two of them fit 64 bits.
constexpr std::int64_t kMaxBytes = 4'000'000'000'000'000'000;

std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

// One pool group in a deal.
struct Hand {
  std::size_t pool_group = 0;
  double weight = 0;
  std::int64_t min_slots = 0;
  std::int64_t slots = 0;
};

// Deals `granules` by weight, lightest first, each to the nearest whole number of what is left.
std::vector<std::int64_t> deal(const std::vector<Hand>& hands, std::int64_t granules) {
  double weight = 0;
  for (const Hand& hand : hands) weight += hand.weight;
  std::vector<std::int64_t> shares;
  for (const Hand& hand : hands) {
    const auto share = static_cast<std::int64_t>(
        std::floor(static_cast<double>(granules) * (hand.weight / weight) + 0.5));
    shares.push_back(std::min(share, granules));
    granules -= shares.back();
    weight -= hand.weight;
  }
  return shares;
}

}  // namespace

std::int64_t granules_for(const std::vector<std::int64_t>& slot_bytes, std::int64_t num_slots,
                          std::int64_t granule) {
  std::int64_t granules = 0;
  for (const std::int64_t bytes : slot_bytes) {
    const bool fits = num_slots <= kMaxBytes / bytes;
    const std::int64_t wanted = fits ? bytes * num_slots : kMaxBytes;
    granules = std::min(granules + std::max<std::int64_t>(1, ceil_div(wanted, granule)),
                        ceil_div(kMaxBytes, granule));
  }
  return granules;
}

std::int64_t slots_for(const std::vector<std::int64_t>& slot_bytes, std::int64_t granules,
                       std::int64_t granule) {
  std::int64_t low = 0;
  std::int64_t high = std::min(kMaxSlots, granules * granule / std::ranges::max(slot_bytes)) + 1;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (granules_for(slot_bytes, middle, granule) <= granules ? low : high) = middle;
  }
  return low;
}

std::int64_t granule_for(std::int64_t quota) {
  constexpr int kMostDoublings = 4;
  const auto gib = static_cast<std::uint64_t>(quota / kGiB);
  return kLeastGranule << std::clamp(static_cast<int>(std::bit_width(gib)) - 1, 0, kMostDoublings);
}

std::vector<double> StorageLayout::pool_ratio() const {
  const std::vector<std::int64_t> typical = typical_slots();
  const std::vector<std::int64_t> cold = cold_slots();
  std::vector<double> weights(pool_groups_.size());
  std::vector<double> sums(config_.cache_tiers.size());
  for (std::size_t g = 0; g < weights.size(); ++g) {
    const PoolGroupDesc& group = pool_groups_[g];
    std::int64_t slots = cold[g];
    for (const std::int32_t id : group.layer_groups) {
      if (!group.is_cold) slots += typical[static_cast<std::size_t>(id)];
    }
    weights[g] = static_cast<double>(slots) * static_cast<double>(sum(group.slot_bytes));
    const bool is_told = group.level == kGpuLevel && !config_.initial_pool_ratio.empty();
    if (is_told) weights[g] = config_.initial_pool_ratio[g];
    sums[static_cast<std::size_t>(group.level)] += weights[g];
  }
  for (std::size_t g = 0; g < weights.size(); ++g) {
    weights[g] /= sums[static_cast<std::size_t>(pool_groups_[g].level)];
  }
  return weights;
}

// Suspended pages need no more than they are, and part of one request's are of no use; history can
// use whatever there is.
void StorageLayout::leave_rest_to_history(std::int64_t granules, std::int64_t granule,
                                          std::vector<std::int64_t>& slots) const {
  const auto history = std::ranges::find(pool_groups_, true, &PoolGroupDesc::is_sparse);
  if (history == pool_groups_.end()) return;
  const auto home = static_cast<std::size_t>(history - pool_groups_.begin());
  const std::vector<std::int64_t> most = cold_slots();
  const std::vector<std::int64_t> one = cold_slots_of({{longest_of(suspended())}, 0});
  std::vector<std::int64_t> raised = slots;
  std::int64_t taken = 0;
  for (std::size_t g = 0; g < slots.size(); ++g) {
    if (!pool_groups_[g].is_cold) continue;
    slots[g] = std::min(slots[g], most[g]);
    raised[g] = std::max(slots[g], one[g]);
    taken += granules_for(pool_groups_[g].slot_bytes, raised[g], granule);
  }
  const std::int64_t floor = granules_for(history->slot_bytes, min_slots()[home], granule);
  if (taken <= std::min(granules / 2, granules - floor)) slots = raised;
  for (std::size_t g = 0; g < slots.size(); ++g) {
    if (!pool_groups_[g].is_cold) continue;
    const std::int64_t share = granules_for(pool_groups_[g].slot_bytes, slots[g], granule);
    slots[g] = slots_for(pool_groups_[g].slot_bytes, share, granule);
    granules -= share;
  }
  slots[home] = slots_for(history->slot_bytes, granules, granule);
}

void StorageLayout::check_level(const char* function, std::int32_t level) const {
  if (level < 0 || level >= num_levels()) {
    fail_argument(function, "level must be in [0, ", num_levels(), "), got ", level);
  }
}

std::int64_t StorageLayout::granule_bytes(std::int32_t level) const {
  check_level("StorageLayout.granule_bytes", level);
  return granule_for(config_.cache_tiers[static_cast<std::size_t>(level)].quota);
}

std::int64_t StorageLayout::get_num_bytes(std::int32_t pool_group, std::int64_t num_slots) const {
  constexpr const char* kFunction = "StorageLayout.get_num_bytes";
  if (pool_group < 0 || std::cmp_greater_equal(pool_group, pool_groups_.size())) {
    fail_argument(kFunction, "pool_group must be in [0, ", pool_groups_.size(), "), got ",
                  pool_group);
  }
  const PoolGroupDesc& group = pool_groups_[static_cast<std::size_t>(pool_group)];
  const double bytes = static_cast<double>(num_slots) * static_cast<double>(sum(group.slot_bytes));
  if (num_slots < 0 || num_slots > kMaxSlots || bytes > static_cast<double>(kMaxBytes)) {
    fail_argument(kFunction, "num_slots must be in [0, ", kMaxSlots,
                  "] and take less than 4e18 bytes, got ", num_slots, " for pool group ",
                  pool_group);
  }
  const std::int64_t granule = granule_bytes(group.level);
  return granules_for(group.slot_bytes, num_slots, granule) * granule;
}

std::int64_t StorageLayout::min_quota(std::int32_t level) const {
  check_level("StorageLayout.min_quota", level);
  const std::vector<std::int64_t> slots = min_slots();
  std::int64_t bytes = 0;
  for (std::size_t g = 0; g < pool_groups_.size(); ++g) {
    if (pool_groups_[g].level != level) continue;
    bytes += get_num_bytes(static_cast<std::int32_t>(g), slots[g]);
  }
  return bytes;
}

std::int64_t StorageLayout::effective_quota(std::int32_t level, std::int64_t quota) const {
  if (quota < 1 || quota > kMaxTierBytes) {
    fail_argument("StorageLayout.effective_quota", "quota must be in [1, ", kMaxTierBytes,
                  "], got ", quota);
  }
  return std::max(min_quota(level), round_up(quota, granule_bytes(level)));
}

std::vector<std::int64_t> StorageLayout::slots_for_quota(std::int32_t level,
                                                         std::int64_t quota) const {
  const std::int64_t granule = granule_bytes(level);
  std::vector<std::int64_t> slots(pool_groups_.size());
  if (std::ranges::count(pool_groups_, level, &PoolGroupDesc::level) == 0) return slots;
  const std::vector<double> ratio = pool_ratio();
  const std::vector<std::int64_t> least = min_slots();
  auto bytes_of = [&](const Hand& hand) -> const std::vector<std::int64_t>& {
    return pool_groups_[hand.pool_group].slot_bytes;
  };
  std::vector<Hand> hands;
  for (std::size_t g = 0; g < pool_groups_.size(); ++g) {
    if (pool_groups_[g].level == level) hands.push_back({g, ratio[g], least[g], 0});
  }
  std::ranges::stable_sort(hands, {}, &Hand::weight);

  const std::int64_t all_granules = effective_quota(level, quota) / granule;
  std::int64_t granules = all_granules;
  // Host history with a set size takes it before the rest is dealt, if the floors of the rest let
  // it.
  const auto history = std::ranges::find_if(
      hands, [&](const Hand& hand) { return pool_groups_[hand.pool_group].is_sparse; });
  bool history_is_set = false;
  if (config_.max_host_pages && history != hands.end() && hands.size() > 1) {
    std::int64_t floors = 0;
    for (const Hand& hand : hands) {
      const bool is_history = hand.pool_group == history->pool_group;
      floors += granules_for(bytes_of(hand), is_history ? *config_.max_host_pages : hand.min_slots,
                             granule);
    }
    history_is_set = floors <= granules && *config_.max_host_pages >= history->min_slots;
    if (history_is_set) {
      slots[history->pool_group] = *config_.max_host_pages;
      granules -= granules_for(bytes_of(*history), *config_.max_host_pages, granule);
      hands.erase(history);
    }
  }
  for (std::size_t dealt = 0; !hands.empty() && hands.size() != dealt;) {
    dealt = hands.size();
    const std::vector<std::int64_t> shares = deal(hands, granules);
    for (std::size_t i = 0; i < hands.size(); ++i) {
      hands[i].slots = slots_for(bytes_of(hands[i]), shares[i], granule);
    }
    std::erase_if(hands, [&](const Hand& hand) {
      if (hand.slots > hand.min_slots) return false;
      const std::int64_t taken = granules_for(bytes_of(hand), hand.min_slots, granule);
      slots[hand.pool_group] = slots_for(bytes_of(hand), taken, granule);
      granules -= taken;
      return true;
    });
  }
  for (const Hand& hand : hands) slots[hand.pool_group] = hand.slots;
  if (level == kSparseHistoryLevel && !history_is_set) {
    leave_rest_to_history(all_granules, granule, slots);
  }
  if (config_.max_host_pages) {
    for (std::size_t g = 0; g < pool_groups_.size(); ++g) {
      if (pool_groups_[g].is_sparse)
        slots[g] = std::min<std::int64_t>(slots[g], *config_.max_host_pages);
    }
  }
  return slots;
}

}  // namespace sparse_kvcm
