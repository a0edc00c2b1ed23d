// One request decodes a few steps on the CPU backend. Its history lies in host memory; the arena
// holds a working set of 16 cached and 8 window units.
//
// An engine does the same with its own indexer and attention in place of the stand-ins here:
// select(), and read_is_right(), which checks that each slot holds the unit that was selected. A
// unit is 64 bytes that repeat its ordinal.
#include <sparse_kvcm/kv_cache_manager.hpp>
#include <sparse_kvcm/ops.hpp>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <vector>

namespace kvcm = sparse_kvcm;

namespace {

constexpr kvcm::Stream kStream = 0;
constexpr std::int32_t kUnitBytes = 64;
constexpr std::int32_t kTopK = 12;
constexpr std::int32_t kPromptUnits = 100;
constexpr std::int32_t kSteps = 5;

using Unit = std::array<std::int32_t, kUnitBytes / sizeof(std::int32_t)>;

Unit unit_of(std::int32_t ordinal) {
  Unit unit;
  unit.fill(ordinal);
  return unit;
}

kvcm::KvCacheManagerConfig make_config() {
  kvcm::KvCacheManagerConfig config;
  config.tokens_per_block = 8;
  config.groups = {{.layers = {0, 1}, .top_k = kTopK, .layout = kvcm::UnitLayout({kUnitBytes})}};
  config.cached_slots = 16;
  config.window_slots = 8;
  config.arena_pages = 3;  // 24 slots: one lease
  config.host_pages = 32;
  config.max_leases = 1;
  return config;
}

void import_prompt(kvcm::KvCache& cache) {
  std::vector<Unit> units;
  for (std::int32_t ordinal = 0; ordinal < kPromptUnits; ++ordinal) {
    units.push_back(unit_of(ordinal));
  }
  const kvcm::UnitRows rows{reinterpret_cast<const std::byte*>(units.data()), kUnitBytes};
  const std::vector<kvcm::UnitRows> layers(2, rows);  // both layers hold the same, here
  cache.import_history(layers, kPromptUnits, kStream);
}

// Stands for the indexer: the newest unit, and every 9th, of which some move on from step to step.
std::array<std::int32_t, kTopK> select(std::int32_t length) {
  std::array<std::int32_t, kTopK> selection;
  selection[0] = length - 1;
  for (std::int32_t j = 1; j < kTopK; ++j) {
    selection[j] = 9 * (j - 1) + (j % 4 == 0 ? length % 9 : 0);
  }
  return selection;
}

// Attention kernels want an index form of their own; here, the byte offset of each slot.
std::array<std::int64_t, kTopK> byte_offsets(const kvcm::KvCacheManagerConfig& config,
                                             const std::int32_t* slots) {
  std::array<std::int64_t, kTopK> offsets;
  kvcm::ops::ConvertParams params;
  params.slots = slots;
  params.b = 1;
  params.k = kTopK;
  params.units_per_page = config.units_per_page();
  params.page_stride = config.groups[0].layout.page_bytes(config.units_per_page());
  params.unit_stride = kUnitBytes;
  params.num_slots = (config.arena_pages + 1) * config.units_per_page();  // with the trash page
  params.out64 = offsets.data();
  kvcm::ops::convert(config.device, params, kStream);
  return offsets;
}

void write_unit(const kvcm::KvCacheManager& manager, std::int32_t slot, std::int32_t ordinal) {
  const Unit unit = unit_of(ordinal);
  for (const std::int32_t layer : manager.layers()) {
    // One region of 64 bytes and pages without padding: slots lie side by side.
    std::memcpy(manager.arena(layer).data + std::int64_t{slot} * kUnitBytes, unit.data(),
                kUnitBytes);
  }
}

bool read_is_right(const std::byte* arena, const std::array<std::int64_t, kTopK>& offsets,
                   const std::array<std::int32_t, kTopK>& selection) {
  for (std::int32_t j = 0; j < kTopK; ++j) {
    const Unit expected = unit_of(selection[j]);
    if (std::memcmp(arena + offsets[j], expected.data(), kUnitBytes) != 0) return false;
  }
  return true;
}

}  // namespace

int main() {
  const kvcm::KvCacheManagerConfig config = make_config();
  kvcm::KvCacheManager manager(config);
  const auto batch = manager.create_batch({.max_rows = 1, .max_units = 256});

  const auto cache = manager.create_kv_cache({.need = kPromptUnits + kSteps});
  import_prompt(*cache);
  if (!cache->resume(kStream)) return EXIT_FAILURE;
  const std::int32_t row = batch->add(*cache);

  for (std::int32_t step = 0; step < kSteps; ++step) {
    const std::int32_t length = cache->length() + 1;
    const std::array growth{kvcm::RowLength{row, length}};
    if (batch->resize(growth)[0] != kvcm::ResizeResult::kOk) return EXIT_FAILURE;
    batch->publish(kStream);
    batch->wait_ready(kStream);

    const auto selection = select(length);
    const kvcm::ResolveOutputs outputs = batch->outputs(0);
    batch->resolve(0, &row, 1, selection.data(), kTopK, kTopK, outputs, kStream);
    batch->fetch(0, &row, 1, kTopK, outputs, kStream);
    write_unit(manager, outputs.write_slots[0], length - 1);

    const auto offsets = byte_offsets(config, outputs.slots);
    for (const std::int32_t layer : manager.layers()) {
      if (!read_is_right(manager.arena(layer).data, offsets, selection)) return EXIT_FAILURE;
    }
    batch->record_read({&row, 1}, kStream);
    std::cout << "step " << step << ": " << length << " units, " << outputs.hit_counts[0]
              << " hits, " << outputs.miss_counts[0] << " misses\n";
  }
  return EXIT_SUCCESS;
}
