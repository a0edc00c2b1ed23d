// A set of rows as bits: what a step costs must follow the rows that changed, and a pass over the
// words of 3,000 rows is 47 loads.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sparse_kvcm {

class RowSet {
 public:
  // Empty, of rows in [0, num_rows).
  explicit RowSet(std::int32_t num_rows)
      : num_rows_(num_rows), words_((static_cast<std::size_t>(num_rows) + 63) / 64) {}

  [[nodiscard]] bool contains(std::int32_t row) const { return (word(row) & bit(row)) != 0; }
  // False if it was there already.
  bool insert(std::int32_t row) {
    if (contains(row)) return false;
    word(row) |= bit(row);
    ++size_;
    return true;
  }
  void erase(std::int32_t row) {
    if (!contains(row)) return;
    word(row) &= ~bit(row);
    --size_;
  }
  void insert_all() {
    for (std::int32_t row = 0; row < num_rows_; ++row) insert(row);
  }
  void clear() {
    std::ranges::fill(words_, 0);
    size_ = 0;
  }

  [[nodiscard]] std::int32_t size() const { return size_; }
  [[nodiscard]] bool empty() const { return size_ == 0; }
  // Calls `visit` for each row, ascending. It may erase the row at hand and insert ones before it.
  template <class Visit>
  void for_each(Visit visit) const {
    for (std::size_t i = 0; i < words_.size() && size_ > 0; ++i) {
      for (std::uint64_t left = words_[i]; left != 0; left &= left - 1) {
        visit(static_cast<std::int32_t>(i) * 64 + std::countr_zero(left));
      }
    }
  }
  [[nodiscard]] std::vector<std::int32_t> rows() const {
    std::vector<std::int32_t> rows;
    rows.reserve(static_cast<std::size_t>(size_));
    for_each([&](std::int32_t row) { rows.push_back(row); });
    return rows;
  }
  // The lowest row in it, or -1.
  [[nodiscard]] std::int32_t first() const {
    const auto found = std::ranges::find_if(words_, [](std::uint64_t w) { return w != 0; });
    if (found == words_.end()) return -1;
    return static_cast<std::int32_t>(found - words_.begin()) * 64 + std::countr_zero(*found);
  }

 private:
  static std::uint64_t bit(std::int32_t row) {
    return std::uint64_t{1} << (static_cast<std::uint32_t>(row) % 64);
  }
  [[nodiscard]] const std::uint64_t& word(std::int32_t row) const {
    return words_[static_cast<std::size_t>(row) / 64];
  }
  [[nodiscard]] std::uint64_t& word(std::int32_t row) {
    return words_[static_cast<std::size_t>(row) / 64];
  }

  std::int32_t num_rows_;
  std::int32_t size_ = 0;
  std::vector<std::uint64_t> words_;
};

}  // namespace sparse_kvcm
