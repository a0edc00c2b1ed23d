#include "sparse_kvcm/batch.hpp"

#include "manager/batch_state.hpp"

namespace sparse_kvcm {

Batch::Batch(std::shared_ptr<BatchState> state) : state_(std::move(state)) {}
Batch::~Batch() { close(); }

std::int32_t Batch::add(KvCache& cache) { return state_->add(cache.request()); }
std::int32_t Batch::add(KvCache& cache, std::int32_t row) {
  return state_->add(cache.request(), row);
}
void Batch::remove(KvCache& cache) { state_->remove(*cache.request()); }
void Batch::close() noexcept { state_->close(); }

std::vector<ResizeResult> Batch::resize(std::span<const RowLength> lengths) {
  return state_->resize(lengths);
}
std::vector<std::int32_t> Batch::publish(Stream stream) { return state_->publish(stream); }
void Batch::wait_ready(Stream stream) { state_->wait_ready(stream); }
void Batch::resolve(std::int32_t group, const std::int32_t* rows, std::int32_t b,
                    const std::int32_t* selection, std::int32_t k, std::int64_t selection_stride,
                    const ResolveOutputs& outputs, Stream stream) {
  state_->resolve(group, rows, b, selection, k, selection_stride, outputs, stream);
}
void Batch::fetch(std::int32_t group, const std::int32_t* rows, std::int32_t b, std::int32_t k,
                  const ResolveOutputs& outputs, Stream stream) {
  state_->fetch(group, rows, b, k, outputs, stream);
}
ResolveOutputs Batch::outputs(std::int32_t group) const { return state_->outputs(group); }
void Batch::record_read(std::span<const std::int32_t> rows, Stream stream) {
  state_->record_read(rows, stream);
}
void Batch::abort_step(Stream stream) { state_->abort_step(stream); }
StepErrors Batch::take_errors() { return state_->take_errors(); }

std::int32_t Batch::max_rows() const { return state_->options().max_rows; }
std::uint32_t Batch::clock() const { return state_->clock(); }
bool Batch::step_open() const { return state_->step_open(); }
std::vector<std::int32_t> Batch::dirty_rows() const {
  return {state_->dirty().begin(), state_->dirty().end()};
}
const RowState* Batch::row_states_address() const { return state_->memory().row_states; }
const std::int32_t* Batch::page_table_address() const { return state_->memory().page_table; }
std::int64_t Batch::max_pages() const { return state_->memory().max_pages; }

BatchMemoryUse Batch::memory_use() const { return state_->memory().use(); }

}  // namespace sparse_kvcm
