#include "sparse_kvcm/kv_cache.hpp"

#include "core/check.hpp"
#include "manager/request.hpp"

namespace sparse_kvcm {

KvCache::KvCache(std::shared_ptr<Request> request)
    : request_(std::move(request)),
      index_owners_(static_cast<std::size_t>(request_->manager()->num_layer_groups())) {}
KvCache::~KvCache() { close(); }

bool KvCache::resume(Stream stream) {
  const auto held = request_->manager()->lock_for("KvCache.resume");
  return request_->resume(stream);
}
void KvCache::suspend(Stream stream) {
  const auto held = request_->manager()->lock_for("KvCache.suspend");
  request_->suspend(stream);
}
bool KvCache::resize(std::int32_t capacity, std::int32_t history_length, Stream stream) {
  const auto held = request_->manager()->lock_for("KvCache.resize");
  return request_->resize(capacity, history_length, stream);
}
void KvCache::import_history(std::span<const UnitRows> layers, std::int32_t num_units,
                             Stream stream) {
  const auto held = request_->manager()->lock_for("KvCache.import_history");
  request_->import_history(layers, num_units, stream);
}
bool KvCache::reserve_history(std::int32_t num_units) {
  const auto held = request_->manager()->lock_for("KvCache.reserve_history");
  return request_->reserve_history(num_units);
}
void KvCache::write_history(std::int32_t group, const HistoryPages& pages) {
  // Kept, since another thread may let go of this object meanwhile.
  const std::shared_ptr<Request> request = request_;
  ManagerState& manager = *request->manager();
  std::vector<std::int32_t> host_pages;
  EventPtr ready;
  {
    const auto held = manager.lock_for("KvCache.write_history");
    host_pages = request->begin_write(group, pages);
    ready = request->reserved_ready;
  }
  try {
    if (ready) manager.backend->synchronize(*ready);
    manager.history.write(group, pages, host_pages);
  } catch (...) {
    const auto held = manager.lock();
    request->drop_write(group, pages);
    throw;
  }
  const auto held = manager.lock();
  request->end_write();
}
void KvCache::commit_history(Stream stream) {
  const auto held = request_->manager()->lock_for("KvCache.commit_history");
  request_->commit_history(stream);
}
void KvCache::close() noexcept {
  {
    const auto held = request_->manager()->lock();
    request_->close();
  }
  index_owners_.clear();
}

// Of what a getter shows, the Batch that the request sits in changes some.
template <class Get>
auto KvCache::look(Get get) const {
  const auto held = request_->manager()->lock();
  return get(static_cast<const Request&>(*request_));
}

KvCacheState KvCache::state() const {
  return look([](const Request& r) { return r.state; });
}
std::int32_t KvCache::need() const { return request_->need; }
std::int32_t KvCache::length() const {
  return look([](const Request& r) { return r.length; });
}
std::int32_t KvCache::committed_length() const {
  return look([](const Request& r) { return r.committed; });
}
std::int32_t KvCache::watermark() const {
  return look([](const Request& r) { return r.watermark; });
}
std::int32_t KvCache::window_begin() const {
  return look([](const Request& r) { return r.window_begin; });
}
bool KvCache::is_receiving() const {
  return look([](const Request& r) { return r.is_receiving(); });
}
std::int32_t KvCache::capacity() const {
  return look([](const Request& r) { return r.dense ? r.dense->capacity() : r.tokens; });
}
std::int32_t KvCache::history_length() const {
  return look([](const Request& r) { return r.history; });
}
std::vector<std::int32_t> KvCache::host_pages() const {
  return look([](const Request& r) { return r.pages; });
}
std::optional<Lease> KvCache::lease() const {
  return look(
      [](const Request& r) { return r.state == KvCacheState::kActive ? r.lease : std::nullopt; });
}
std::optional<std::int32_t> KvCache::row() const {
  return look(
      [](const Request& r) { return r.batch == nullptr ? std::nullopt : std::optional(r.row); });
}

std::vector<std::int32_t> KvCache::get_base_page_indices(std::int32_t layer_group) const {
  request_->manager()->check_layer_group("KvCache.get_base_page_indices", layer_group);
  return look([&](const Request& r) { return r.page_indices(layer_group); });
}

void KvCache::set_base_page_index_buf(std::int32_t layer_group, std::span<std::int32_t> buffer,
                                      std::shared_ptr<const void> owner) {
  constexpr const char* kFunction = "KvCache.set_base_page_index_buf";
  request_->manager()->check_layer_group(kFunction, layer_group);
  {
    const auto held = request_->manager()->lock_for(kFunction);
    request_->set_index_buffer(layer_group, buffer);
  }
  index_owners_[static_cast<std::size_t>(layer_group)] = std::move(owner);
}

std::vector<LayerGroupStatistics> KvCache::get_and_reset_statistics() {
  const auto held = request_->manager()->lock();
  return request_->get_and_reset_statistics();
}

std::vector<DecodedEntry> KvCache::decode_entries(std::int32_t group) const {
  const char* function = "KvCache.decode_entries";
  const std::shared_ptr<ManagerState>& manager = request_->manager();
  manager->check_group(function, group);
  const auto held = manager->lock_for(function);
  if (request_->state != KvCacheState::kActive)
    fail_state(function, "the request has no lease; resume it");
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
