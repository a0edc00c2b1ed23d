// The vocabulary of the directed tests of KvCacheManager, KvCache and Batch, on the CPU backend.
//
//   const KvCachePtr kv = active(/*history=*/20);
//   const std::int32_t row = batch->add(*kv);
//   grow({{row, 21}});
//   step({row});                       publish ... record_read, with every byte written and checked
//   EXPECT_EQ(kv->committed_length(), 21);
//   expect_refused<InvalidState>("Batch.wait_ready", [&] { batch->wait_ready(0); });
//
// expect_refused also checks that nothing that can be observed has changed, bytes included.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "snapshot.hpp"
#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/kv_cache_manager.hpp"
#include "unit_bytes.hpp"

namespace sparse_kvcm::testing {

class EngineTest : public ::testing::Test {
 protected:
  static constexpr std::int32_t kPage = 4;
  static constexpr std::int32_t kTopK = 4;
  static constexpr std::int32_t kCached = 8;  // N
  static constexpr std::int32_t kWindow = 8;  // W
  static constexpr std::int32_t kNeed = 40;

  EngineTest() { make(config()); }

  // Groups {7, 3} and {5}; pages of 4 units; room for 4 leases and 30 host pages.
  static KvCacheManagerConfig config();
  // A new manager with one Batch of 4 rows; the old ones are gone.
  void make(const KvCacheManagerConfig& config);
  void use(std::unique_ptr<KvCacheManager> new_manager);
  BatchPtr make_batch(const BatchOptions& options);

  KvCachePtr request(const KvCacheOptions& options);
  // ACTIVE, with `history` imported units.
  KvCachePtr active(std::int32_t history, std::int32_t need = kNeed);
  // ACTIVE and seated in `batch`.
  KvCachePtr seated(std::int32_t history, std::int32_t need = kNeed);
  void import(KvCache& cache, std::int32_t num_units);
  // Takes host pages until `left` are free, in requests that do nothing else.
  void fill_host(std::int64_t left);

  // resize that must be kOk for every row.
  void grow(const std::vector<RowLength>& lengths);
  void open();  // publish and wait_ready
  // Selects `selection` for `row` in all groups, fetches, and writes the row's new units.
  void launch(std::int32_t row, const std::vector<std::int32_t>& selection = {-1});
  // The step that publish opens: launches `rows`, commits them.
  void step(const std::vector<std::int32_t>& rows);
  void record(const std::vector<std::int32_t>& rows) { batch->record_read(rows, 0); }

  // What one resolve of one row gave.
  struct Resolved {
    std::vector<std::int32_t> slots;
    std::vector<std::int32_t> write_slots;
    std::int32_t misses = 0;
    std::int32_t hits = 0;
    std::uint32_t error = 0;
  };
  Resolved resolve(std::int32_t group, std::int32_t row,
                   const std::vector<std::int32_t>& selection);
  void fetch(std::int32_t group, std::int32_t row, std::size_t k);

  // Version 1 of a unit of the cache.
  [[nodiscard]] UnitTag tag(const KvCache& cache, std::int32_t ordinal) const;
  void expect_history(const KvCache& cache) const;  // every unit below the watermark
  [[nodiscard]] Snapshot snapshot() const;
  [[nodiscard]] std::vector<std::int64_t> occupancy() const {
    return numbers(manager->occupancy());
  }

  template <class Exception, class Call>
  void expect_refused(const std::string& function, Call call) const {
    const Snapshot before = snapshot();
    try {
      call();
      ADD_FAILURE() << function << " was not refused";
    } catch (const Exception& error) {
      EXPECT_EQ(std::string(error.what()).find("[" + function + "] "), 0U) << error.what();
    }
    EXPECT_EQ(first_difference(before, snapshot()), "");
  }

  std::unique_ptr<KvCacheManager> manager;
  std::unique_ptr<UnitBytes> bytes;
  BatchPtr batch;
  std::vector<KvCachePtr> requests;
  std::vector<BatchPtr> batches;
  std::vector<KvCachePtr> fillers;
};

}  // namespace sparse_kvcm::testing
