// What tests of ranges share.
#pragma once

#include <cstddef>

#include "backend/mapped_range.hpp"

namespace sparse_kvcm::testing {

inline constexpr std::size_t kGranule = std::size_t{2} << 20;
inline constexpr std::size_t kReserved = 8 * kGranule;

// Makes the range `bytes` long, and fills it.
inline void resize(MappedRange& range, std::size_t bytes) {
  range.resize(bytes);
  range.start_filling();
}

}  // namespace sparse_kvcm::testing
