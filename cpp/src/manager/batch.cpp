#include "sparse_kvcm/batch.hpp"

#include "core/check.hpp"
#include "manager/batch_state.hpp"

namespace sparse_kvcm {
namespace {

auto lock_for(BatchState& state, const char* function) {
  return state.manager()->lock_for(function);
}
auto lock(BatchState& state) { return state.manager()->lock(); }

}  // namespace

Batch::Batch(std::shared_ptr<BatchState> state) : state_(std::move(state)) {}
Batch::~Batch() { close(); }

std::int32_t Batch::add(KvCache& cache) {
  const auto held = lock_for(*state_, "Batch.add");
  return state_->add(cache.request());
}
std::int32_t Batch::add(KvCache& cache, std::int32_t row) {
  const auto held = lock_for(*state_, "Batch.add");
  return state_->add(cache.request(), row);
}
void Batch::remove(KvCache& cache) {
  const auto held = lock_for(*state_, "Batch.remove");
  state_->remove(*cache.request());
}
void Batch::close() noexcept {
  const auto held = lock(*state_);
  state_->close();
}

std::vector<ResizeResult> Batch::resize(std::span<const RowLength> lengths) {
  const auto held = lock_for(*state_, "Batch.resize");
  return state_->resize(lengths);
}
std::vector<ResizeResult> Batch::resize_tokens(std::span<const RowTokens> capacities,
                                               Stream stream) {
  const auto held = lock_for(*state_, "Batch.resize_tokens");
  return state_->resize_tokens(capacities, stream);
}
std::vector<std::int32_t> Batch::publish(Stream stream) {
  const auto held = lock_for(*state_, "Batch.publish");
  return state_->publish(stream);
}
void Batch::wait_ready(Stream stream) {
  const auto held = lock_for(*state_, "Batch.wait_ready");
  state_->wait_ready(stream);
}
void Batch::resolve(std::int32_t group, const std::int32_t* rows, std::int32_t b,
                    const std::int32_t* selection, std::int32_t k, std::int64_t selection_stride,
                    const ResolveOutputs& outputs, Stream stream) {
  const auto held = lock_for(*state_, "Batch.resolve");
  state_->resolve(group, rows, b, selection, k, selection_stride, outputs, stream);
}
void Batch::fetch(std::int32_t group, const std::int32_t* rows, std::int32_t b, std::int32_t k,
                  const ResolveOutputs& outputs, Stream stream) {
  fetch(group, rows, b, k, {}, outputs, stream);
}
void Batch::fetch(std::int32_t group, const std::int32_t* rows, std::int32_t b, std::int32_t k,
                  std::span<const std::int32_t> layers, const ResolveOutputs& outputs,
                  Stream stream) {
  const auto held = lock_for(*state_, "Batch.fetch");
  state_->fetch(group, rows, b, k, layers, outputs, stream);
}
ResolveOutputs Batch::outputs(std::int32_t group) const { return state_->outputs(group); }
void Batch::record_read(std::span<const std::int32_t> rows, Stream stream) {
  const auto held = lock_for(*state_, "Batch.record_read");
  state_->record_read(rows, stream);
}
void Batch::abort_step(Stream stream) {
  const auto held = lock_for(*state_, "Batch.abort_step");
  state_->abort_step(stream);
}
StepErrors Batch::take_errors() {
  const auto held = lock_for(*state_, "Batch.take_errors");
  return state_->take_errors();
}

// What never changes needs no lock.
std::int32_t Batch::max_rows() const { return state_->options().max_rows; }
std::int64_t Batch::max_pages() const { return state_->memory().max_pages; }
std::int32_t Batch::num_layer_groups() const { return state_->memory().num_layer_groups; }
const RowState* Batch::row_states_address() const { return state_->memory().row_states; }
const std::int32_t* Batch::page_table_address() const {
  const std::int32_t sparse = state_->memory().sparse_group;
  if (sparse < 0) {
    fail_state("Batch.page_table_address",
               "the manager has no groups, so no host history; ask for a layer group's table");
  }
  return state_->memory().table(sparse, 0);
}
const std::int32_t* Batch::page_table_address(std::int32_t layer_group) const {
  state_->manager()->check_layer_group("Batch.page_table_address", layer_group);
  return state_->memory().table(layer_group, 0);
}
const std::int32_t* Batch::page_counts_address(std::int32_t layer_group) const {
  state_->manager()->check_layer_group("Batch.page_counts_address", layer_group);
  return state_->memory().count(layer_group, 0);
}

std::uint32_t Batch::clock() const {
  const auto held = lock(*state_);
  return state_->clock();
}
bool Batch::step_open() const {
  const auto held = lock(*state_);
  return state_->step_open();
}
std::vector<std::int32_t> Batch::dirty_rows() const {
  const auto held = lock(*state_);
  return state_->dirty().rows();
}

std::vector<std::int32_t> Batch::table_rows() const {
  const auto held = lock(*state_);
  return state_->table_rows();
}

BatchMemoryUse Batch::memory_use() const { return state_->memory().use(); }

}  // namespace sparse_kvcm
