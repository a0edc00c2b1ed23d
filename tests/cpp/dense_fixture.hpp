// EngineTest with dense layers beside the sparse ones, of which few pages fit.
//
//   layer 100   keeps everything           one pool, 128 KiB a page
//   layer 101   a window of 8 tokens       two pools, 128 and 64 KiB
//   layer 102   a window of 4, 4 sinks     the same sizes, so the same pool group
//
// A page has 4 tokens, a token is a unit. With the least quotas each pool group has 16 slots; on
// the host 16 pages of layer 100, 10 of the other two.
#pragma once

#include <memory>
#include <vector>

#include "engine_fixture.hpp"
#include "faulty_backend.hpp"
#include "page_bytes.hpp"

namespace sparse_kvcm::testing {

class DenseTest : public EngineTest {
 protected:
  static constexpr std::int32_t kSlots = 16;

  DenseTest() { use_dense(dense_config()); }

  static KvCacheManagerConfig dense_config();
  // A new manager on `backend`.
  void use_dense(const KvCacheManagerConfig& config);

  // ACTIVE, with `history` imported units and the pages of as many tokens, written.
  KvCachePtr prefilled(std::int32_t history, std::int32_t need = kNeed);
  KvCachePtr seated(std::int32_t history, std::int32_t need = kNeed);
  // resize_tokens that must be kOk, and the new pages written.
  void grow_tokens(const std::vector<RowTokens>& capacities);
  // A step in which each of `rows` grows by one token.
  void decode(const std::vector<std::int32_t>& rows);
  [[nodiscard]] KvCache& at_row(std::int32_t row) const;
  [[nodiscard]] std::uint32_t index_of(const KvCache& cache) const;
  void write_pages(const KvCache& cache) const { pages->write_all(cache, index_of(cache)); }
  [[nodiscard]] bool holds_pages(const KvCache& cache) const {
    return pages->holds_all(cache, index_of(cache));
  }
  // The layer group of a layer, and the table of a row in it as the device has it.
  [[nodiscard]] std::int32_t group_of(std::int32_t layer) const;
  [[nodiscard]] std::vector<std::int32_t> device_table(std::int32_t layer_group,
                                                       std::int32_t row) const;
  // Whether the device has for each row what its request says, -1 and 0 elsewhere.
  void expect_device_tables() const;
  [[nodiscard]] std::vector<std::int64_t> free_slots() const;  // per pool group

  std::shared_ptr<FaultyBackend> backend = std::make_shared<FaultyBackend>();
  std::unique_ptr<PageBytes> pages;
};

}  // namespace sparse_kvcm::testing
