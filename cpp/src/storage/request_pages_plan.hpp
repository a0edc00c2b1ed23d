// The next state of one layer group's table, and how to get there: as what changes, so that a step
// of a long request costs what it changes.
#pragma once

#include <cstdint>
#include <vector>

#include "sparse_kvcm/request_pages.hpp"
#include "storage/slot_allocator.hpp"

namespace sparse_kvcm {

struct RequestPages::Plan {
  struct Edit {
    std::int32_t page = 0;
    std::int32_t slot = 0;  // -1 = none; the slot that it gets, once it is taken
    bool wants_slot = false;
  };
  std::int32_t num_pages = 0;
  std::vector<Edit> edits;  // pages ascending
  PageRange scratch;
  std::vector<std::int32_t> scratch_slots;  // -1 = wanted
  std::vector<std::int32_t> given;          // slots that the table no longer has
  std::vector<Slot> taken;                  // from the pool group
};

}  // namespace sparse_kvcm
