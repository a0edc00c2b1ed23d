#include "backend/ops_check.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/check.hpp"

namespace sparse_kvcm {
namespace {

constexpr std::int64_t kMaxSlots = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMaxMisses = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kAccessBytes = 4;  // the narrowest access that copies make

// The checks of one operation; `function` goes into its messages.
struct Checker {
  const char* function;

  void at_least(const char* name, std::int64_t value, std::int64_t limit) const {
    if (value < limit) fail_argument(function, name, " must be >= ", limit, ", got ", value);
  }

  void in_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) const {
    if (value < low || value > high) {
      fail_argument(function, name, " must be in [", low, ", ", high, "], got ", value);
    }
  }

  // A pointer to `count` elements.
  void array(const char* name, const void* pointer, std::int64_t count) const {
    if (pointer == nullptr && count > 0) {
      fail_argument(function, name, " must point to ", count, " elements, got null");
    }
  }

  void launch(const ops::LaunchRows& launch) const {
    at_least("launch.b", launch.b, 0);
    at_least("launch.num_rows", launch.num_rows, 0);
    array("launch.rows", launch.rows, launch.b);
    array("launch.row_states", launch.row_states, launch.num_rows);
  }

  void selection(const std::int32_t* selection, std::int64_t stride, std::int64_t b,
                 std::int64_t k) const {
    array("selection", selection, b * k);
    if (stride < k) {
      fail_argument(function, "selection_stride must be >= k = ", k, ", got ", stride);
    }
    if (b > 0 && stride > kMaxBytes / 4 / b) {
      fail_argument(function, "selection_stride must be <= ", kMaxBytes / 4 / b, " with b = ", b,
                    ", got ", stride);
    }
  }

  void piece(const ops::GroupMemory& memory, std::size_t i) const {
    const ops::Piece& piece = memory.pieces[i];
    const auto fail = [&](const auto&... parts) {
      fail_argument(function, "memory.pieces[", i, "].", parts...);
    };
    if (piece.bytes < 1 || piece.bytes % kAccessBytes != 0) {
      fail("bytes must be a positive multiple of ", kAccessBytes, ", got ", piece.bytes);
    }
    if (piece.host_offset < 0 || piece.host_offset % kAccessBytes != 0) {
      fail("host_offset must be a multiple of ", kAccessBytes, ", >= 0, got ", piece.host_offset);
    }
    const std::int64_t behind =
        i == 0 ? 0 : std::int64_t{memory.pieces[i - 1].host_offset} + memory.pieces[i - 1].bytes;
    if (piece.host_offset != behind) {
      fail("host_offset must be ", behind, ", right behind the piece before, got ",
           piece.host_offset);
    }
    if (std::int64_t{piece.host_offset} + piece.bytes > memory.host_unit_bytes) {
      fail("host_offset + bytes must be <= host_unit_bytes = ", memory.host_unit_bytes, ", got ",
           std::int64_t{piece.host_offset} + piece.bytes);
    }
    const std::int64_t dense = std::int64_t{memory.units_per_page} * piece.bytes;
    if (piece.page_bytes < dense || piece.page_bytes % kAccessBytes != 0) {
      fail("page_bytes must be a multiple of ", kAccessBytes,
           ", >= units_per_page * bytes = ", dense, ", got ", piece.page_bytes);
    }
    const std::int64_t pages = (memory.num_slots - 1) / memory.units_per_page + 1;
    if (memory.num_slots > 0 && piece.page_bytes > kMaxBytes / pages) {
      fail("page_bytes must be <= ", kMaxBytes / pages, " with ", pages, " pages, got ",
           piece.page_bytes);
    }
    if (piece.arena == nullptr && memory.num_slots > 0) {
      fail("arena must point to ", memory.num_slots, " slots, got null");
    }
    if (reinterpret_cast<std::uintptr_t>(piece.arena) % kAccessBytes != 0) {
      fail("arena must be aligned to ", kAccessBytes, " bytes, got ",
           static_cast<const void*>(piece.arena));
    }
  }

  void memory(const ops::GroupMemory& memory) const {
    in_range("memory.num_slots", memory.num_slots, 0, kMaxSlots);
    at_least("memory.units_per_page", memory.units_per_page, 1);
    in_range("memory.num_host_pages", memory.num_host_pages, 0,
             std::numeric_limits<std::int32_t>::max());
    const std::int64_t host_units = memory.num_host_pages * memory.units_per_page;
    if (memory.host_unit_bytes < 1 || memory.host_unit_bytes % kAccessBytes != 0) {
      fail_argument(function, "memory.host_unit_bytes must be a positive multiple of ",
                    kAccessBytes, ", got ", memory.host_unit_bytes);
    }
    if (host_units > 0 && memory.host_unit_bytes > kMaxBytes / host_units) {
      fail_argument(function, "memory.host_unit_bytes must be <= ", kMaxBytes / host_units,
                    " with ", host_units, " host units, got ", memory.host_unit_bytes);
    }
    array("memory.host", memory.host, host_units);
    if (reinterpret_cast<std::uintptr_t>(memory.host) % kAccessBytes != 0) {
      fail_argument(function, "memory.host must be aligned to ", kAccessBytes, " bytes, got ",
                    static_cast<const void*>(memory.host));
    }
    in_range("memory.pieces.size()", static_cast<std::int64_t>(memory.pieces.size()), 1,
             kMaxPieces);
    for (std::size_t i = 0; i < memory.pieces.size(); ++i) piece(memory, i);
  }
};

}  // namespace

void check(const ops::ResolveParams& params) {
  const Checker check{"resolve"};
  const std::int64_t b = params.launch.b;
  const std::int64_t k = params.k;
  check.launch(params.launch);
  check.in_range("k", k, 1, kMaxCachedSlots);
  check.selection(params.selection, params.selection_stride, b, k);
  check.array("step", params.step, 1);
  check.in_range("num_slots", params.num_slots, 0, kMaxSlots);
  check.array("entries", params.entries, params.num_slots);
  check.at_least("num_leases", params.num_leases, 0);
  check.array("last", params.last, params.num_leases);
  check.at_least("max_new_units", params.max_new_units, 0);
  check.at_least("no_write_slot", params.no_write_slot, kNoSlot);
  if (params.max_units < 1 || params.max_units > kMaxUnits) {
    fail_argument("resolve", "max_units must be in [1, ", kMaxUnits, "], got ", params.max_units);
  }
  if (params.threads != 0 && params.threads != 256 && params.threads != 512) {
    fail_argument("resolve", "threads must be 0, 256 or 512, got ", params.threads);
  }
  check.array("slots", params.slots, b * k);
  check.array("write_slots", params.write_slots, b * params.max_new_units);
  check.array("miss_ordinals", params.miss_ordinals, b * k);
  check.array("miss_slots", params.miss_slots, b * k);
  check.array("miss_counts", params.miss_counts, b);
  check.array("hit_counts", params.hit_counts, b);
  check.array("errors.errors", params.errors.errors, b);
}

void check(const ops::FetchParams& params) {
  const Checker check{"fetch"};
  const std::int64_t b = params.launch.b;
  check.launch(params.launch);
  check.at_least("k", params.k, 1);
  check.in_range("launch.b * k", b * params.k, 0, kMaxMisses);
  check.array("miss_ordinals", params.miss_ordinals, b * params.k);
  check.array("miss_slots", params.miss_slots, b * params.k);
  check.array("miss_counts", params.miss_counts, b);
  check.in_range("max_pages", params.max_pages, 0, std::numeric_limits<std::int32_t>::max());
  check.array("page_table", params.page_table, params.launch.num_rows * params.max_pages);
  check.memory(params.memory);
  check.array("errors.errors", params.errors.errors, b);
}

void check(const ops::MoveParams& params) {
  const Checker check{"move_units"};
  std::int64_t num_slots = kMaxSlots;
  std::int64_t num_host_units = kMaxBytes;
  for (const ops::GroupMemory& memory : params.groups) {
    check.memory(memory);
    num_slots = std::min(num_slots, memory.num_slots);
    num_host_units = std::min(num_host_units, memory.num_host_pages * memory.units_per_page);
  }
  for (std::size_t i = 0; i < params.moves.size(); ++i) {
    const ops::UnitMove& move = params.moves[i];
    if (move.slot < 0 || move.slot >= num_slots) {
      fail_argument("move_units", "moves[", i, "].slot must be in [0, ", num_slots, "), got ",
                    move.slot);
    }
    if (move.host_unit < 0 || move.host_unit >= num_host_units) {
      fail_argument("move_units", "moves[", i, "].host_unit must be in [0, ", num_host_units,
                    "), got ", move.host_unit);
    }
  }
}

void check(const ops::ConvertParams& params) {
  const Checker check{"convert"};
  const std::int64_t cells = std::int64_t{params.b} * params.k;
  check.at_least("b", params.b, 0);
  check.at_least("k", params.k, 1);
  check.at_least("units_per_page", params.units_per_page, 1);
  check.in_range("num_slots", params.num_slots, 0, kMaxSlots);
  check.array("slots", params.slots, cells);
  if (params.out32 != nullptr && params.out64 != nullptr) {
    fail_argument("convert", "out32 and out64 must not both be given, got two outputs");
  }
  if (params.out32 == nullptr) check.array("out32 or out64", params.out64, cells);

  const std::int64_t limit =
      params.out32 != nullptr ? std::numeric_limits<std::int32_t>::max() : kMaxBytes;
  check.in_range("first", params.first, 0, limit);
  const std::int64_t last_slot = std::max<std::int64_t>(params.num_slots - 1, 0);
  const std::int64_t pages = last_slot / params.units_per_page;
  const std::int64_t offsets = std::min<std::int64_t>(last_slot, params.units_per_page - 1);
  std::int64_t room = limit - params.first;
  check.in_range("page_stride", params.page_stride, 0, pages > 0 ? room / pages : kMaxBytes);
  room -= pages * params.page_stride;
  check.in_range("unit_stride", params.unit_stride, 0, offsets > 0 ? room / offsets : kMaxBytes);

  if (params.selection == nullptr) return;
  check.selection(params.selection, params.selection_stride, params.b, params.k);
  check.launch(params.launch);
  if (params.launch.b != params.b) {
    fail_argument("convert", "launch.b must be b = ", params.b, ", got ", params.launch.b);
  }
  check.array("errors.errors", params.errors.errors, params.b);
}

void check(const ops::ResetParams& params) {
  const Checker check{"reset_leases"};
  check.in_range("num_slots", params.num_slots, 0, kMaxSlots);
  check.at_least("num_leases", params.num_leases, 0);
  if (params.entries.size() != params.last.size()) {
    fail_argument("reset_leases", "last must have one array per group, ", params.entries.size(),
                  " as entries has, got ", params.last.size());
  }
  for (std::size_t group = 0; group < params.entries.size(); ++group) {
    check.array("every array of entries", params.entries[group], params.num_slots);
    check.array("every array of last", params.last[group], params.num_leases);
  }
  for (std::size_t i = 0; i < params.leases.size(); ++i) {
    const ops::LeaseReset& lease = params.leases[i];
    if (lease.lease_id < 0 || lease.lease_id >= params.num_leases) {
      fail_argument("reset_leases", "leases[", i, "].lease_id must be in [0, ", params.num_leases,
                    "), got ", lease.lease_id);
    }
    if (lease.cached_slots < 0 || lease.cached_slots > kMaxCachedSlots) {
      fail_argument("reset_leases", "leases[", i, "].cached_slots must be in [0, ", kMaxCachedSlots,
                    "], got ", lease.cached_slots);
    }
    if (lease.base < 0 || lease.base > params.num_slots - lease.cached_slots) {
      fail_argument("reset_leases", "leases[", i, "].base must be in [0, ",
                    params.num_slots - lease.cached_slots, "] with ", lease.cached_slots,
                    " cached slots, got ", lease.base);
    }
  }
}

}  // namespace sparse_kvcm
