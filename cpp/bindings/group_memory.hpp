// One selection group's bytes in arrays of the caller, checked once and used by many launches.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "array.hpp"
#include "sparse_kvcm/ops.hpp"
#include "sparse_kvcm/unit_layout.hpp"

namespace sparse_kvcm::bindings {

// Keeps the arrays alive.
class GroupMemoryArrays {
 public:
  // `arenas`: uint8 [pages, page_bytes] per member; `host`: uint8 [host_pages, units_per_page,
  // host_unit_bytes] in host memory.
  GroupMemoryArrays(nb::handle arenas, nb::handle host, nb::handle layout,
                    nb::handle units_per_page);

  [[nodiscard]] ops::GroupMemory memory() const;
  [[nodiscard]] Device device() const { return device_; }
  [[nodiscard]] const UnitLayout& layout() const { return layout_; }
  [[nodiscard]] std::int32_t num_members() const {
    return static_cast<std::int32_t>(arenas_.size());
  }
  [[nodiscard]] std::int32_t units_per_page() const { return units_per_page_; }
  [[nodiscard]] std::int64_t num_slots() const { return num_slots_; }
  [[nodiscard]] std::int64_t num_host_pages() const { return host_.extent(0); }

 private:
  UnitLayout layout_;
  std::int32_t units_per_page_;
  std::int64_t host_unit_bytes_ = 0;
  std::int64_t num_slots_ = 0;
  Device device_;
  std::vector<Array> arenas_;
  Array host_;
  std::vector<ops::Piece> pieces_;
};

void bind_group_memory(nb::module_& m);

}  // namespace sparse_kvcm::bindings
