// The memory and the slots of one pool group. Thread-compatible.
//
// Invariant: every pool has memory for slots [0, max(extent of the allocator, goal)), and the
// allocator hands out only what lies in it and is filled.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "backend/backend.hpp"
#include "backend/filler.hpp"
#include "backend/mapped_range.hpp"
#include "sparse_kvcm/storage_layout.hpp"
#include "storage/page_allocator.hpp"
#include "storage/slot_allocator.hpp"

namespace sparse_kvcm {

// kFixed: set once, so that it is mapped as one granule of that size, and opened to the device in
// large chunks, which end between slots where that is possible.
enum class PoolSize : std::uint8_t { kChanges, kFixed };

// What pools are made of.
struct PoolMemory {
  std::shared_ptr<MemoryDriver> driver;
  std::shared_ptr<Filler> filler;
  std::int64_t granule_bytes = 0;
  std::int64_t max_slots = 0;  // that there can ever be; all that there will be in a fixed pool
  PoolSize size = PoolSize::kChanges;
};

class PoolGroup {
 public:
  // No slots yet. Throws std::bad_alloc.
  PoolGroup(const PoolGroupDesc& desc, const std::shared_ptr<Backend>& backend,
            const PoolMemory& memory);

  // More slots, or as many. Throws what MappedRange::resize does: then there are no more slots, and
  // what memory was mapped for them goes with the next trim().
  void grow(std::int32_t num_slots);
  // Fewer. Memory stays until trim().
  void shrink(std::int32_t num_slots);
  // Whether there is memory that no slot needs; unmaps it. REQUIRES: synchronize() before, which
  // waits for the device.
  [[nodiscard]] bool has_spare_memory() const;
  void trim();
  void synchronize() const { pools_.front().memory->synchronize(); }
  // Lets memory be filled, which the above have stopped, and stops it.
  void start_filling() noexcept;
  void stop_filling() noexcept;
  // From any thread, also beside the calls above.
  void wait_usable() const;
  // Appends the pools that are to be filled.
  void add_unfilled(std::vector<MappedRange*>& ranges) const;

  // Takes newly filled slots into use; call before asking the allocators for some.
  void refresh();
  [[nodiscard]] SlotAllocator& slots() { return std::get<SlotAllocator>(allocator_); }
  [[nodiscard]] PageAllocator& pages() { return std::get<PageAllocator>(allocator_); }

  [[nodiscard]] std::int32_t num_slots() const { return goal_; }
  // Slots from the first to the last that may be in use, those that drain too.
  [[nodiscard]] std::int32_t num_addressed() const;
  // Slots from the first on whose memory is filled.
  [[nodiscard]] std::int32_t num_filled() const;
  [[nodiscard]] std::int32_t num_free() const;
  [[nodiscard]] std::int32_t num_draining() const;
  [[nodiscard]] std::int64_t mapped_bytes() const;
  [[nodiscard]] const std::shared_ptr<MappedRange>& pool(std::int32_t index) const;
  [[nodiscard]] std::int32_t num_pools() const { return static_cast<std::int32_t>(pools_.size()); }

 private:
  struct Pool {
    std::int64_t slot_bytes = 0;
    std::shared_ptr<MappedRange> memory;
  };
  [[nodiscard]] static std::size_t bytes_for(const Pool& pool, std::int32_t num_slots);
  [[nodiscard]] std::size_t used_bytes(const Pool& pool, std::int32_t num_slots) const;
  void set_target(std::int32_t num_slots);

  std::vector<Pool> pools_;
  PoolSize size_;
  std::int32_t goal_ = 0;  // slots once everything is filled and drained
  std::variant<SlotAllocator, PageAllocator> allocator_;
};

}  // namespace sparse_kvcm
