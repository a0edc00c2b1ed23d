#include "manager/batch_memory.hpp"

#include "core/check.hpp"
#include "core/rounding.hpp"
#include "core/staging_size.hpp"
#include "manager/table_patch.hpp"

namespace sparse_kvcm {
namespace {

constexpr std::int64_t kAlignment = 256;

// Walks the layout twice: once without memory to learn its size, once to hand out addresses.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <class T>
  T* take(std::int64_t count) {
    std::byte* place = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * static_cast<std::int64_t>(sizeof(T)), kAlignment);
    return reinterpret_cast<T*>(place);
  }
  [[nodiscard]] std::int64_t used() const { return used_; }

 private:
  std::byte* base_;
  std::int64_t used_ = 0;
};

}  // namespace

void check(const char* function, const KvCacheManagerConfig& config, const BatchOptions& options) {
  if (options.max_rows < 1 || options.max_rows > kMaxRows) {
    fail_argument(function, "max_rows must be in [1, ", kMaxRows, "], got ", options.max_rows);
  }
  if (options.max_units < 1 || options.max_units > kMaxUnits) {
    fail_argument(function, "max_units must be in [1, ", kMaxUnits, "], got ", options.max_units);
  }
  const std::int64_t trash = config.arena_pages * config.units_per_page();
  if (options.no_write_slot != kNoSlot && options.no_write_slot != trash) {
    fail_argument(function, "no_write_slot must be ", kNoSlot, " or the trash slot ", trash,
                  ", got ", options.no_write_slot);
  }
}

BatchMemoryUse planned_batch_memory(const KvCacheManagerConfig& config,
                                    const BatchOptions& options) {
  check(config);
  check("planned_batch_memory", config, options);
  return BatchMemory::planned_use(config, options);
}

BatchMemory::BatchMemory(const KvCacheManagerConfig& config, const BatchOptions& options,
                         const StorageLayout& layout)
    : max_rows(options.max_rows),
      num_layer_groups(static_cast<std::int32_t>(layout.layer_groups().size())),
      max_pages(ceil_div(options.max_units, config.units_per_page())) {
  for (std::int32_t g = 0; g < num_layer_groups; ++g) {
    if (layout.layer_groups()[static_cast<std::size_t>(g)].life_cycle.is_sparse) sparse_group = g;
  }
}

BatchMemoryUse BatchMemory::planned_use(const KvCacheManagerConfig& config,
                                        const BatchOptions& options) {
  BatchMemory nowhere(config, options, StorageLayout(storage_config(config)));
  const std::int64_t bytes = nowhere.carve(config, nullptr);
  return {bytes, nowhere.staging_bytes()};
}

BatchMemoryUse BatchMemory::use() const {
  return {static_cast<std::int64_t>(buffer_->bytes()), staging_bytes()};
}

BatchMemory::BatchMemory(const KvCacheManagerConfig& config, const BatchOptions& options,
                         const StorageLayout& layout, Backend& backend)
    : BatchMemory(config, options, layout) {
  buffer_ = allocate_part(backend, static_cast<std::size_t>(carve(config, nullptr)),
                          "KvCacheManager.create_batch", "buffers of the Batch");
  carve(config, buffer_->device_data());
}

std::int64_t BatchMemory::carve(const KvCacheManagerConfig& config, std::byte* base) {
  Carver carver(base);
  const std::int64_t rows = max_rows;
  const auto groups = static_cast<std::int64_t>(config.groups.size());
  row_states = carver.take<RowState>(rows);
  page_tables = carver.take<std::int32_t>(num_layer_groups * rows * max_pages);
  page_counts = carver.take<std::int32_t>(num_layer_groups * rows);
  step = carver.take<StepState>(1);
  report_words = groups * rows + 1;
  step_words = report_words + 2 * groups;
  row_errors = carver.take<std::uint32_t>(step_words);
  outputs.clear();
  for (const SelectionGroupConfig& group : config.groups) {
    ResolveOutputs out;
    out.slots = carver.take<std::int32_t>(rows * group.top_k);
    out.write_slots = carver.take<std::int32_t>(rows * config.max_new_units);
    out.miss_ordinals = carver.take<std::int32_t>(rows * group.top_k);
    out.miss_slots = carver.take<std::int32_t>(rows * group.top_k);
    out.miss_counts = carver.take<std::int32_t>(rows);
    out.hit_counts = carver.take<std::int32_t>(rows);
    out.errors = carver.take<std::uint32_t>(rows);
    outputs.push_back(out);
  }
  if (base != nullptr) {
    batch_error = row_errors + groups * rows;
    for (std::size_t g = 0; g < outputs.size(); ++g) outputs[g].cursor = batch_error + 1 + 2 * g;
  }
  return carver.used();
}

std::int64_t BatchMemory::staging_bytes() const {
  // Of two steps: the largest upload, which is every row with all its tables, and the report.
  const std::int64_t upload = TablePatch::most_bytes(max_rows, num_layer_groups, max_pages);
  const auto report = static_cast<std::size_t>(report_words) * sizeof(std::int32_t);
  return static_cast<std::int64_t>(
      2 * (staging_chunk_bytes(static_cast<std::size_t>(upload)) + report));
}

}  // namespace sparse_kvcm
