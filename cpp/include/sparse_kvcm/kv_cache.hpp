// A KvCache is one request: its history on the host, its lease in the arena and its lengths.
//
//   0 <= window_begin <= watermark <= committed_length <= length <= need      (while ACTIVE)
//
// Units below `watermark` are in host history. Units in [window_begin, length) are in the window
// of the lease. Units in [committed_length, length) are pending growth: they become real when
// Batch::record_read commits the step that wrote them, and go when the step is aborted.
//
// Dense layers count tokens: history_length() of them are computed, and there are pages for
// capacity().
// A unit is tokens_per_unit tokens, so that
//
//   committed_length == history_length / tokens_per_unit, rounded down           (while seated)
//
// while not seated the dense layers may be ahead: a prefill writes their pages and import_history
// brings its units.
//
// In a resident manager (config.hpp) there is no lease: watermark and window_begin follow the
// committed length, and resize alone brings computed tokens in.
//
// States: SUSPENDED (initial, no lease) -> resume -> ACTIVE -> suspend -> SUSPENDED ... -> CLOSED.
//
// Created by KvCacheManager, which it keeps alive. Many threads may work on one manager, but one
// thread at a time on a KvCache, write_history excepted. No call of it can be captured in a CUDA
// graph: one whose stream is being captured throws InvalidState. Memory of the history and the
// lease belongs to the manager; it goes back at close, or when the open step that still reads it
// ends.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "sparse_kvcm/entry.hpp"
#include "sparse_kvcm/storage.hpp"
#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm {

class Request;  // src/manager

enum class KvCacheState : std::uint8_t { kSuspended, kActive, kClosed };

// A request's part of the arena. `generation` is never used twice in a manager's life.
struct Lease {
  std::int32_t id = -1;
  std::int32_t base = 0;          // first slot
  std::int32_t cached_slots = 0;  // N; 0 = all window
  std::int32_t window_slots = 0;  // W
  std::uint64_t generation = 0;
  [[nodiscard]] std::int32_t num_slots() const { return cached_slots + window_slots; }
  friend bool operator==(const Lease&, const Lease&) = default;
};

// Units of one member layer in host memory: row i holds the unit's regions one after the other.
struct UnitRows {
  const std::byte* data = nullptr;  // [num_units, unit_bytes of the layer's layout]
  std::int64_t row_stride = 0;      // bytes from row to row, >= unit_bytes
};

// One region of one member layer in pages, as dense pools keep it: that of unit u of page p lies at
// data + p * page_stride + u * bytes of the region.
struct RegionPages {
  const std::byte* data = nullptr;
  std::int64_t page_stride = 0;  // bytes; any number if there is one page
};

// Units of one selection group in pages, layer by layer.
struct HistoryPages {
  std::int32_t first = 0;                // ordinal of the first unit of the first page
  std::int32_t num_units = 0;            // the last page may have fewer than the others
  std::int32_t units_per_page = 0;       // of these pages, whatever host history's are
  std::span<const RegionPages> regions;  // [members, regions of the layout]
};

class KvCache {
 public:
  // Made by KvCacheManager::create_kv_cache.
  explicit KvCache(std::shared_ptr<Request> request);
  ~KvCache();  // closes
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  // Takes an empty lease; a lease that is all window is loaded from host history, suspended pages
  // of dense layers come back to the GPU.
  // Returns false, and changes nothing, if the arena has no room or all lease ids are out, or if
  // with it a pool group on the GPU would be used beyond max_util_for_resume.
  // No-op (true) if ACTIVE. Throws InvalidState if CLOSED.
  // Work is ordered on `stream` after all earlier work of the manager.
  [[nodiscard]] bool resume(Stream stream);

  // Drops pending growth, flushes the window, moves the pages of dense layers that the computed
  // tokens leave readable to host pages, leaves its Batch and returns the lease.
  // No-op if SUSPENDED. Throws InvalidState if CLOSED or in an open step; OutOfPages if host
  // history lacks pages for the window's units, or the cold pools (a resident manager without a
  // cold_quota has none) for the others: the request then stays ACTIVE and as it was, since
  // everything on the host is reserved before anything is given up.
  void suspend(Stream stream);

  // `history_length` tokens are computed, what comes next writes [history_length, capacity).
  // Not seated, a prefill: takes and gives up pages of dense layers alone, and drops pending
  // growth. In a resident manager the units of history_length are then committed.
  // Seated: as Batch::resize_tokens for its row, and marks it dirty.
  // False, and nothing changed, if a pool group or host history has too few pages.
  // Throws InvalidState unless ACTIVE, or in an open step; InvalidArgument unless history_length()
  // <= history_length <= capacity <= need * tokens_per_unit, if history_length holds fewer units
  // than are committed (another number, if seated), for growth past max_new_units while seated, or
  // for computed tokens whose pages the step at hand has in scratch (swa_scratch_reuse); naming the
  // present history_length plans that step anew.
  [[nodiscard]] bool resize(std::int32_t capacity, std::int32_t history_length, Stream stream);

  // Appends `num_units` units to host history: a prompt, or a received transfer. `layers` has one
  // element per member layer of each group, in the order of KvCacheManager::layers(). All of it or
  // nothing. The units need no window: they are fetched when selected (a lease that is all window
  // is loaded at once). Work on an all-window lease is ordered on `stream`; the host memory of
  // `layers` may be reused when the call returns.
  // Throws InvalidArgument for a wrong number of layers, null data, a short stride, or units past
  // `need`; OutOfPages if host history is full; InvalidState if CLOSED, in an open step, with
  // growth pending, with the watermark below the committed length, or of a resident manager.
  void import_history(std::span<const UnitRows> layers, std::int32_t num_units, Stream stream);

  // Receiving: units that arrive in pages, a few at a time, from a prefill's pools for instance.
  //
  //   reserve_history(n)    host pages for n more units; from here on the request is receiving
  //   write_history(...)    repacks them, row by row, in any order: each unit of each group once
  //   commit_history()      the watermark moves behind them, all at once
  //
  // A receiving request is in no Batch, and resize, suspend, import_history and Batch::add refuse
  // it. close() drops what was received. Nobody can read it before commit_history.
  //
  // False, and nothing changed, if host history has too few pages.
  // Throws InvalidArgument unless num_units is in [1, need - committed_length]; InvalidState if
  // CLOSED, seated, in an open step, receiving already, with growth pending or the watermark below
  // the committed length, or of a resident manager.
  [[nodiscard]] bool reserve_history(std::int32_t num_units);
  // Copies on the calling thread, without the manager's lock, once the device no longer uses what
  // the pages had before; returns when done. Any number of threads may be in it for one request,
  // and one may close() it meanwhile: its pages go back when the last of them is out.
  // Throws InvalidArgument for a bad group, a wrong number of regions, null data, a page stride
  // shorter than a page, or units that are not reserved or have been written; InvalidState if
  // CLOSED or not receiving.
  void write_history(std::int32_t group, const HistoryPages& pages);
  // The newest units, as many as its window has, are also loaded into the lease, if it has one: the
  // last page is there without a fetch. Ordered on `stream`.
  // Throws InvalidState if CLOSED, not receiving, or units have not been written; and what the
  // device throws. The request is still receiving then.
  void commit_history(Stream stream);

  // Leaves its Batch and returns pages and lease; during an open step that has the request, they
  // go back when the step ends, and those that a write_history fills, when it does. No-op if
  // CLOSED. Never throws.
  void close() noexcept;

  [[nodiscard]] KvCacheState state() const;
  [[nodiscard]] std::int32_t need() const;
  [[nodiscard]] std::int32_t length() const;
  [[nodiscard]] std::int32_t committed_length() const;
  [[nodiscard]] std::int32_t watermark() const;
  [[nodiscard]] std::int32_t window_begin() const;
  [[nodiscard]] std::optional<Lease> lease() const;       // while ACTIVE, unless resident
  [[nodiscard]] std::optional<std::int32_t> row() const;  // while seated
  [[nodiscard]] std::int32_t capacity() const;            // tokens
  [[nodiscard]] std::int32_t history_length() const;      // tokens
  [[nodiscard]] bool is_receiving() const;
  // The page table of a layer group: slots on the GPU, or host page ids of the sparse one; -1 =
  // none.
  // Throws InvalidArgument for a group outside [0, num_layer_groups), as all below.
  [[nodiscard]] std::vector<std::int32_t> get_base_page_indices(std::int32_t layer_group) const;
  // Keeps `buffer`, in host memory, equal to the table, -1 behind it, until it is replaced (by an
  // empty one to stop) or the request closed; `owner` lives as long. Throws InvalidArgument if it
  // is shorter than the table can get: need / units per page, rounded up.
  void set_base_page_index_buf(std::int32_t layer_group, std::span<std::int32_t> buffer,
                               std::shared_ptr<const void> owner);
  // Pages of this request since the last call. [num_layer_groups]
  [[nodiscard]] std::vector<LayerGroupStatistics> get_and_reset_statistics();
  // Host page ids, one per started page of the history, in order.
  [[nodiscard]] std::vector<std::int32_t> host_pages() const;

  // The lease's entries in one selection group, decoded, slot by slot. For tests and debugging:
  // waits for all closed steps (launches of an open one are not waited for). Throws InvalidState
  // unless ACTIVE, InvalidArgument for a bad group.
  [[nodiscard]] std::vector<DecodedEntry> decode_entries(std::int32_t group) const;

  [[nodiscard]] const std::shared_ptr<Request>& request() const { return request_; }

 private:
  template <class Get>
  auto look(Get get) const;

  std::shared_ptr<Request> request_;
  // By layer group. Here, so that they go outside of the manager's lock, whatever their end does.
  std::vector<std::shared_ptr<const void>> index_owners_;
};

}  // namespace sparse_kvcm
