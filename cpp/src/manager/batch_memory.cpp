#include "manager/batch_memory.hpp"

#include "core/rounding.hpp"

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
  [[nodiscard]] std::size_t used() const { return static_cast<std::size_t>(used_); }

 private:
  std::byte* base_;
  std::int64_t used_ = 0;
};

void carve(BatchMemory& memory, Carver& carver, const KvCacheManagerConfig& config,
           const BatchOptions& options) {
  const std::int64_t rows = options.max_rows;
  const auto groups = static_cast<std::int64_t>(config.groups.size());
  memory.row_states = carver.take<RowState>(rows);
  memory.page_tables = carver.take<std::int32_t>(memory.num_layer_groups * rows * memory.max_pages);
  memory.page_counts = carver.take<std::int32_t>(memory.num_layer_groups * rows);
  memory.step = carver.take<StepState>(1);
  memory.step_words = groups * rows + 1 + 2 * groups;
  memory.row_errors = carver.take<std::uint32_t>(memory.step_words);
  memory.batch_error = memory.row_errors + groups * rows;
  std::uint32_t* cursor = memory.batch_error + 1;
  memory.outputs.clear();
  for (const SelectionGroupConfig& group : config.groups) {
    ResolveOutputs out;
    out.slots = carver.take<std::int32_t>(rows * group.top_k);
    out.write_slots = carver.take<std::int32_t>(rows * config.max_new_units);
    out.miss_ordinals = carver.take<std::int32_t>(rows * group.top_k);
    out.miss_slots = carver.take<std::int32_t>(rows * group.top_k);
    out.miss_counts = carver.take<std::int32_t>(rows);
    out.hit_counts = carver.take<std::int32_t>(rows);
    out.errors = carver.take<std::uint32_t>(rows);
    out.cursor = cursor;
    cursor += 2;
    memory.outputs.push_back(out);
  }
}

}  // namespace

BatchMemory::BatchMemory(const KvCacheManagerConfig& config, const BatchOptions& options,
                         const StorageLayout& layout, Backend& backend)
    : max_rows(options.max_rows),
      num_layer_groups(static_cast<std::int32_t>(layout.layer_groups().size())),
      max_pages(ceil_div(options.max_units, config.units_per_page())) {
  while (!layout.layer_groups()[static_cast<std::size_t>(sparse_group)].life_cycle.is_sparse) {
    ++sparse_group;
  }
  Carver size(nullptr);
  carve(*this, size, config, options);
  buffer_ = backend.allocate_device(size.used());
  Carver place(buffer_->device_data());
  carve(*this, place, config, options);
}

}  // namespace sparse_kvcm
