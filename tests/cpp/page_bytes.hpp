// What lies in pages of dense layers: each page of a request and layer group has bytes of its own,
// known from its name. Goes through the backend, so that it works on every device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.hpp"
#include "sparse_kvcm/kv_cache_manager.hpp"

namespace sparse_kvcm::testing {

// Names the contents of a page.
struct PageTag {
  std::uint32_t request = 0;
  std::int32_t layer_group = 0;
  std::int32_t page = 0;
};

class PageBytes {
 public:
  PageBytes(const KvCacheManager& manager, std::shared_ptr<Backend> backend);

  // Layer groups that are not sparse.
  [[nodiscard]] const std::vector<std::int32_t>& dense_groups() const { return dense_groups_; }
  void write(std::int32_t slot, const PageTag& tag) const;
  [[nodiscard]] bool holds(std::int32_t slot, const PageTag& tag) const;
  // Bytes that are no page's.
  void poison(std::int32_t layer_group, std::int32_t slot) const;

  // All pages that the request has now, as the attention layers would have written them.
  void write_all(const KvCache& cache, std::uint32_t request) const;
  // Those of computed tokens: what lies in the others is nobody's yet.
  [[nodiscard]] bool holds_all(const KvCache& cache, std::uint32_t request) const;

 private:
  [[nodiscard]] std::vector<std::uint32_t> words(const PageTag& tag, std::int32_t pool,
                                                 std::int64_t bytes) const;
  [[nodiscard]] std::byte* place(std::int32_t layer_group, std::int32_t pool,
                                 std::int32_t slot) const;
  [[nodiscard]] const std::vector<std::int64_t>& pool_bytes(std::int32_t layer_group) const;

  std::shared_ptr<const Storage> storage_;
  std::shared_ptr<Backend> backend_;
  std::vector<std::int32_t> dense_groups_;
  BufferPtr pinned_;
};

}  // namespace sparse_kvcm::testing
