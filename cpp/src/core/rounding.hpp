// Whole pages and aligned sizes. REQUIRES, of all: value >= 0, unit >= 1.
#pragma once

#include <concepts>

namespace sparse_kvcm {

template <std::integral T>
constexpr T ceil_div(T value, T unit) {
  return value / unit + (value % unit != 0 ? 1 : 0);
}

template <std::integral T>
constexpr T round_up(T value, T unit) {
  return ceil_div(value, unit) * unit;
}

}  // namespace sparse_kvcm
