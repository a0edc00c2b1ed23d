#include "sparse_kvcm/kv_cache.hpp"

#include "core/check.hpp"
#include "manager/request.hpp"

namespace sparse_kvcm {

KvCache::KvCache(std::shared_ptr<Request> request) : request_(std::move(request)) {}
KvCache::~KvCache() { close(); }

bool KvCache::resume(Stream stream) { return request_->resume(stream); }
void KvCache::suspend(Stream stream) { request_->suspend(stream); }
void KvCache::import_history(std::span<const UnitRows> layers, std::int32_t num_units,
                             Stream stream) {
  request_->import_history(layers, num_units, stream);
}
void KvCache::close() noexcept { request_->close(); }

KvCacheState KvCache::state() const { return request_->state; }
std::int32_t KvCache::need() const { return request_->need; }
std::int32_t KvCache::length() const { return request_->length; }
std::int32_t KvCache::committed_length() const { return request_->committed; }
std::int32_t KvCache::watermark() const { return request_->watermark; }
std::int32_t KvCache::window_begin() const { return request_->window_begin; }
std::vector<std::int32_t> KvCache::host_pages() const { return request_->pages; }

std::optional<Lease> KvCache::lease() const {
  return state() == KvCacheState::kActive ? request_->lease : std::nullopt;
}

std::optional<std::int32_t> KvCache::row() const {
  if (request_->batch == nullptr) return std::nullopt;
  return request_->row;
}

std::vector<DecodedEntry> KvCache::decode_entries(std::int32_t group) const {
  const char* function = "KvCache.decode_entries";
  const std::shared_ptr<ManagerState>& manager = request_->manager();
  manager->check_group(function, group);
  if (state() != KvCacheState::kActive) fail_state(function, "the request has no lease; resume it");
  const auto count = static_cast<std::size_t>(request_->lease->cached_slots);
  if (request_->reset_pending) return std::vector<DecodedEntry>(count);

  const BufferPtr copy = manager->backend->allocate_pinned(count * sizeof(Entry));
  const Entry* entries = manager->arena.entries(group) + request_->lease->base;
  manager->timeline.enter(0);
  manager->backend->download(*copy, reinterpret_cast<const std::byte*>(entries),
                             count * sizeof(Entry), 0);
  manager->backend->synchronize(*manager->backend->record(0));
  std::vector<DecodedEntry> decoded;
  decoded.reserve(count);
  const auto* words = reinterpret_cast<const Entry*>(copy->data());
  for (std::size_t i = 0; i < count; ++i) decoded.push_back(decode_entry(words[i]));
  return decoded;
}

}  // namespace sparse_kvcm
