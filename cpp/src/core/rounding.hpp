// Whole pages, aligned sizes and sums of them. REQUIRES, of all: values >= 0, unit >= 1.
#pragma once

#include <concepts>
#include <limits>

namespace sparse_kvcm {

template <std::integral T>
constexpr T ceil_div(T value, T unit) {
  return value / unit + (value % unit != 0 ? 1 : 0);
}

template <std::integral T>
constexpr T round_up(T value, T unit) {
  return ceil_div(value, unit) * unit;
}

// The sum, or the largest number.
template <std::integral T>
constexpr T capped_sum(T a, T b) {
  const T most = std::numeric_limits<T>::max();
  return b > most - a ? most : a + b;
}

}  // namespace sparse_kvcm
