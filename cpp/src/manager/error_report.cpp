#include "manager/error_report.hpp"

#include <utility>

namespace sparse_kvcm {
namespace {

// Reports that nobody takes are joined rather than kept for ever.
constexpr std::size_t kMaxPending = 64;

}  // namespace

ErrorReport::ErrorReport(const ManagerState& manager, const BatchMemory& memory,
                         std::int32_t max_rows)
    : backend_(*manager.backend),
      device_words_(memory.row_errors),
      report_bytes_(static_cast<std::size_t>(memory.report_words) * sizeof(std::uint32_t)),
      step_bytes_(static_cast<std::size_t>(memory.step_words) * sizeof(std::uint32_t)),
      num_groups_(manager.num_groups()),
      max_rows_(max_rows) {}

void ErrorReport::collect(std::uint32_t clock, Stream stream) {
  // Nobody takes them: leave the words on the device, where later ones are ORed to them.
  if (pending_.size() >= kMaxPending) return;
  BufferPtr words;
  if (spare_.empty()) {
    words = backend_.allocate_pinned(report_bytes_);
  } else {
    words = std::move(spare_.back());
    spare_.pop_back();
  }
  auto* source = reinterpret_cast<std::byte*>(device_words_);
  backend_.download(*words, source, report_bytes_, stream);
  EventPtr arrived = backend_.record(stream);
  backend_.clear(source, step_bytes_, stream);
  pending_.push_back({clock, std::move(words), std::move(arrived)});
}

StepErrors ErrorReport::take() {
  StepErrors errors;
  while (!pending_.empty() && backend_.is_done(*pending_.front().arrived)) {
    decode(pending_.front(), errors);
    spare_.push_back(std::move(pending_.front().words));
    pending_.pop_front();
  }
  return errors;
}

void ErrorReport::decode(const Report& report, StepErrors& errors) const {
  const auto* words = reinterpret_cast<const std::uint32_t*>(report.words->data());
  for (std::int32_t group = 0; group < num_groups_; ++group) {
    for (std::int32_t row = 0; row < max_rows_; ++row) {
      const std::uint32_t bits = *words++;
      if (bits != 0) errors.rows.push_back({row, group, bits, report.clock});
    }
  }
  errors.batch |= *words;
}

}  // namespace sparse_kvcm
