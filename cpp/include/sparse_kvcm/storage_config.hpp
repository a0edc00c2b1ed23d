// Configuration of Storage: which bytes each layer keeps per page, for how long, and where.
//
// A *layer* has *buffers*, one per *role* ("KEY", "INDEX_KEY", ...): the opaque bytes that it keeps
// for every page of `tokens_per_block` tokens. Layers whose pages live and die together form a
// layer group (storage_layout.hpp). Memory comes in *tiers*: level 0 is the GPU, level 1 the host.
// Dense buffers have their pages on the GPU. Sparse buffers have their history on the host, and
// their working set in the arena (config.hpp).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sparse_kvcm/types.hpp"
#include "sparse_kvcm/unit_layout.hpp"

namespace sparse_kvcm {

// Levels, in the order of StorageConfig::cache_tiers.
inline constexpr std::int32_t kGpuLevel = 0;
inline constexpr std::int32_t kSparseHistoryLevel = 1;

// Where a tier's bytes lie. kGpuMem is memory of StorageConfig::device, so host memory on the CPU.
enum class CacheTier : std::uint8_t { kGpuMem = 0, kHostMem = 1 };

struct CacheTierConfig {
  CacheTier tier = CacheTier::kGpuMem;
  std::int64_t quota = 0;  // bytes, > 0; raised to what the pools need at least, then to granules
  // The most that Storage::resize can ever set, in bytes: addresses are reserved for it, not
  // memory. 0 = what the quota became at construction.
  std::int64_t max_quota = 0;
  friend bool operator==(const CacheTierConfig&, const CacheTierConfig&) = default;
};

struct BufferConfig {
  std::string role;             // unique within its layer, not empty
  std::int64_t page_bytes = 0;  // of one page as kernels see it, > 0
  // Tokens of a page as kernels see it, if that is not tokens_per_block; divides it. The buffer
  // then keeps tokens_per_block / tokens_per_block_override such pages per page.
  std::optional<std::int32_t> tokens_per_block_override;
  bool is_sparse = false;  // all buffers of a layer alike
  friend bool operator==(const BufferConfig&, const BufferConfig&) = default;
};

struct LayerConfig {
  std::int32_t layer_id = 0;  // unique, >= 0
  std::vector<BufferConfig> buffers;
  // The layer reads the newest `sliding_window_size` tokens, the query's own among them, and the
  // first `num_sink_tokens`; without a window it reads everything. Not for sparse layers.
  std::optional<std::int32_t> sliding_window_size;  // >= 1
  std::optional<std::int32_t> num_sink_tokens;      // >= 0, only with a window
  friend bool operator==(const LayerConfig&, const LayerConfig&) = default;
};

// The layers that use one selection. The first owns the indexer (leader), the rest follow it.
struct SelectionGroupConfig {
  std::vector<std::int32_t> layers;  // member layers, >= 1; a layer is in one group only
  std::int32_t top_k = 0;    // K: widest selection, in [1, cached_slots]; on a GPU as ops.hpp says
  UnitLayout layout{{576}};  // of each member layer
  // For a manager's storage (config.hpp): each region is a buffer of this role. Empty = one buffer
  // of all regions, "KEY". A Storage goes by the buffers of its layers.
  // NOLINTNEXTLINE(readability-redundant-member-init): without it braces must not leave it out.
  std::vector<std::string> roles = {};
};

// One request at a moment: it has room for `capacity` tokens, `history_length` of them computed.
struct KvCacheDesc {
  std::int32_t capacity = 0;        // >= history_length
  std::int32_t history_length = 0;  // >= 0
  friend bool operator==(const KvCacheDesc&, const KvCacheDesc&) = default;
};

// Requests that are there together. Sizes pools; unrelated to the run-time Batch.
struct BatchDesc {
  std::vector<KvCacheDesc> kv_caches;  // >= 1
  // Tokens that all of them begin with and whose whole pages they share, counted once.
  std::int32_t system_prompt_length = 0;
  friend bool operator==(const BatchDesc&, const BatchDesc&) = default;
};

// Lets pages that a prefill writes and that are stale when it ends share a few slots.
struct SwaScratchReuseConfig {
  // Tokens that may be taken back after a step (rejected drafts), >= 0.
  std::int32_t max_rewind_len = 0;
  friend bool operator==(const SwaScratchReuseConfig&, const SwaScratchReuseConfig&) = default;
};

// Called now and then while host memory is made ready, with the bytes done and all bytes:
// ascending, the last call with bytes_done == bytes_total. On the thread that asked for the memory.
// What it throws ends the work: all of the memory is given back, and the exception passes on.
using FillProgress = std::function<void(std::int64_t bytes_done, std::int64_t bytes_total)>;

inline constexpr double kLeastUtilForResume = 0.001;

struct StorageConfig {
  Device device;                       // of tier kGpuMem
  std::int32_t tokens_per_block = 64;  // page size in tokens, in [1, 65536]
  std::int32_t tokens_per_unit = 1;    // of sparse layers: 1 (DSA) or 4 (V4); divides the above
  std::vector<CacheTierConfig> cache_tiers;            // kGpuMem, then at most one kHostMem
  std::vector<LayerConfig> layers;                     // >= 1
  std::vector<SelectionGroupConfig> selection_groups;  // of the sparse layers, each in one
  double max_util_for_resume = 0.97;                   // in [kLeastUtilForResume, 1]
  std::vector<BatchDesc> constraints;                  // batches that must fit, whatever the ratio
  std::optional<BatchDesc> typical_step;               // the batch that pool sizes are balanced for
  // Requests that are suspended beside the typical step. The host tier is divided by bytes: history
  // as much as the typical step has of it, cold pools what these requests have in pages on the GPU,
  // and never more than that, so what is left over is history's too. In a tier that is too small
  // for both, cold pools have room for the longest of these requests, if that is at most half of
  // the tier. A tier without history is all theirs. Empty = one request, the longest that pools are
  // balanced for.
  std::optional<BatchDesc> suspended;
  // One positive weight per pool group of StorageLayout::pool_groups() that is not a cold one, in
  // that order, sum 1 within 1e-6; on the GPU it comes before typical_step. Empty = none.
  std::vector<double> initial_pool_ratio;
  std::optional<SwaScratchReuseConfig> swa_scratch_reuse;
  // Pages of host history, in [1, 2^31 - 1], where the host tier's quota holds as many beside the
  // floors of the cold pools; these are dealt the rest. Without cold pools what is left stays
  // unmapped. Empty = what the quota holds.
  std::optional<std::int32_t> max_host_pages;
  bool enable_stats = true;  // count what get_and_reset_statistics reports
};

// Throws InvalidArgument, naming the first field that is wrong, its limits and its value:
// besides the limits above, a sparse buffer needs a tier 1 of kHostMem and a selection group, a
// selection group only sparse layers whose buffers hold exactly the regions of its layout (one
// buffer per region, or one buffer of the arena's page), and role and layer ids must be unique.
void check(const StorageConfig& config);

}  // namespace sparse_kvcm
