// Moves the dense pages of a request to the host or back, in three steps, so that several things
// can succeed or fail together: reserve every slot on the other side, copy, commit. What is not
// committed is given back.
//
// Thread-compatible with its RequestPages, which it must not outlive.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.hpp"
#include "sparse_kvcm/request_pages.hpp"
#include "storage/storage_state.hpp"

namespace sparse_kvcm {

class PageMigration {
 public:
  PageMigration(RequestPages& pages, PageDirection direction);
  ~PageMigration();  // gives back what was reserved
  PageMigration(const PageMigration&) = delete;
  PageMigration& operator=(const PageMigration&) = delete;

  // Plans for a request of `history_length` computed tokens: what they leave readable moves. False,
  // and nothing reserved, if a pool group lacks slots or, on the way to the device, would be used
  // beyond max_util_for_resume. `stream` waits until the slots may be written.
  // Throws what the device throws.
  [[nodiscard]] bool reserve(std::int32_t history_length, Stream stream);
  // Enqueues the copies, one per layer group and pool. If it throws some may be on their way, so
  // the caller has to fence `stream` before others take the slots.
  void copy(Stream stream) const;
  // After a copy that failed: what was reserved goes back, for reuse after the work that `stream`
  // has.
  void give_back(Stream stream) noexcept;
  // The request has moved; `copied` lies behind the copies.
  void commit(const EventPtr& copied) noexcept;
  // What it moves.
  [[nodiscard]] std::int64_t num_pages() const;
  [[nodiscard]] std::int64_t num_bytes() const;

 private:
  struct Group {
    std::vector<RequestPages::HostPage> pages;  // what moves: page, and the slot that it leaves
    std::vector<Slot> taken;                    // where to
  };

  void plan(std::int32_t layer_group, std::int32_t history_length);
  [[nodiscard]] bool take(std::int32_t layer_group, Stream stream);
  [[nodiscard]] bool fits_on_device() const;
  void copy_group(std::int32_t layer_group, Stream stream) const;
  void commit_to_host(std::int32_t layer_group, const EventPtr& copied);
  void commit_to_device(std::int32_t layer_group, const EventPtr& copied);
  [[nodiscard]] PoolGroup& destination(std::int32_t layer_group) const;
  [[nodiscard]] Group& group(std::int32_t layer_group) {
    return groups_[static_cast<std::size_t>(layer_group)];
  }
  [[nodiscard]] const LayerGroupDesc& desc(std::int32_t layer_group) const;

  RequestPages& pages_;
  StorageState& storage_;
  PageDirection direction_;
  std::int32_t history_length_ = 0;
  std::vector<Group> groups_;  // [num_layer_groups]
};

}  // namespace sparse_kvcm
