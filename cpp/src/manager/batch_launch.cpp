// The launches of an open step: checks, default outputs, parameters.
#include <algorithm>
#include <string>
#include <vector>

#include "backend/ops_check.hpp"
#include "core/check.hpp"
#include "manager/batch_state.hpp"
#include "sparse/member_part.hpp"

namespace sparse_kvcm {

void BatchState::resolve(std::int32_t group, const std::int32_t* rows, std::int32_t b,
                         const std::int32_t* selection, std::int32_t k,
                         std::int64_t selection_stride, const ResolveOutputs& outputs,
                         Stream stream) {
  const char* function = "Batch.resolve";
  check_launch(function, group, rows, b, k);
  if (selection == nullptr && b > 0) {
    fail_argument(function, "selection must point to ", b, " rows of ", k, ", got null");
  }
  if (selection_stride < k) {
    fail_argument(function, "selection_stride must be >= k ", k, ", got ", selection_stride);
  }
  const ResolveOutputs out = with_defaults(group, outputs);
  ops::ResolveParams params;
  params.launch = launch_rows(rows, b);
  params.selection = selection;
  params.selection_stride = selection_stride;
  params.k = k;
  params.step = memory_.step;
  params.entries = manager_->arena.entries(group);
  params.num_slots = manager_->arena.num_slots();
  params.last = manager_->arena.last(group);
  params.num_leases = manager_->config.max_leases;
  params.max_new_units = manager_->config.max_new_units;
  params.no_write_slot = options_.no_write_slot;
  params.max_units = options_.max_units;
  params.slots = out.slots;
  params.write_slots = out.write_slots;
  params.miss_ordinals = out.miss_ordinals;
  params.miss_slots = out.miss_slots;
  params.miss_counts = out.miss_counts;
  params.hit_counts = out.hit_counts;
  params.errors = launch_errors(group, out);
  check(params);
  if (b > 0) manager_->backend->resolve(params, stream);
}

void BatchState::fetch(std::int32_t group, const std::int32_t* rows, std::int32_t b, std::int32_t k,
                       std::span<const std::int32_t> layers, const ResolveOutputs& outputs,
                       Stream stream) {
  check_launch("Batch.fetch", group, rows, b, k);
  const ResolveOutputs out = with_defaults(group, outputs);
  ops::FetchParams params;
  params.launch = launch_rows(rows, b);
  params.step = memory_.step;
  params.miss_ordinals = out.miss_ordinals;
  params.miss_slots = out.miss_slots;
  params.miss_counts = out.miss_counts;
  params.k = k;
  params.page_table = memory_.table(memory_.sparse_group, 0);
  params.max_pages = memory_.max_pages;
  params.errors = launch_errors(group, out);
  params.cursor = out.cursor;
  const std::vector<MemberPart> parts = member_parts(
      manager_->memory(group), manager_->history.row_layout(group), wanted_members(group, layers));
  for (const MemberPart& part : parts) {
    params.memory = part.memory();
    check(params);
    if (b > 0) manager_->backend->fetch(params, stream);
  }
}

std::vector<bool> BatchState::wanted_members(std::int32_t group,
                                             std::span<const std::int32_t> layers) const {
  const std::vector<std::int32_t>& members =
      manager_->config.groups[static_cast<std::size_t>(group)].layers;
  std::vector<bool> wanted(members.size(), layers.empty());
  for (const std::int32_t layer : layers) {
    const auto found = std::find(members.begin(), members.end(), layer);
    if (found == members.end()) {
      std::string known;
      for (const std::int32_t member : members) known += " " + std::to_string(member);
      fail_argument("Batch.fetch", "layers must be of group ", group, ", which has", known,
                    ", got ", layer);
    }
    const auto member = static_cast<std::size_t>(found - members.begin());
    if (wanted[member]) {
      fail_argument("Batch.fetch", "layers must be distinct, got ", layer, " twice");
    }
    wanted[member] = true;
  }
  return wanted;
}

StepErrors BatchState::take_errors() {
  check_open("Batch.take_errors");
  return errors_.take();
}

ResolveOutputs BatchState::outputs(std::int32_t group) const {
  manager_->check_group("Batch.outputs", group);
  return memory_.outputs[static_cast<std::size_t>(group)];
}

void BatchState::check_launch(const char* function, std::int32_t group, const std::int32_t* rows,
                              std::int32_t b, std::int32_t k) const {
  check_open(function);
  manager_->check_group(function, group);
  if (b < 0 || b > options_.max_rows) {
    fail_argument(function, "b must be in [0, ", options_.max_rows, "], got ", b);
  }
  const std::int32_t top_k = manager_->config.groups[static_cast<std::size_t>(group)].top_k;
  if (k < 1 || k > top_k) {
    fail_argument(function, "k must be in [1, ", top_k, "] (top_k of group ", group, "), got ", k);
  }
  if (rows == nullptr && b > 0) {
    fail_argument(function, "rows must point to ", b, " elements, got null");
  }
}

ResolveOutputs BatchState::with_defaults(std::int32_t group, ResolveOutputs outputs) const {
  const ResolveOutputs& own = memory_.outputs[static_cast<std::size_t>(group)];
  // A launch on misses of its own may run beside one on the Batch's, and a cursor serves one.
  if (outputs.miss_counts == nullptr && outputs.cursor == nullptr) outputs.cursor = own.cursor;
  if (outputs.slots == nullptr) outputs.slots = own.slots;
  if (outputs.write_slots == nullptr) outputs.write_slots = own.write_slots;
  if (outputs.miss_ordinals == nullptr) outputs.miss_ordinals = own.miss_ordinals;
  if (outputs.miss_slots == nullptr) outputs.miss_slots = own.miss_slots;
  if (outputs.miss_counts == nullptr) outputs.miss_counts = own.miss_counts;
  if (outputs.hit_counts == nullptr) outputs.hit_counts = own.hit_counts;
  if (outputs.errors == nullptr) outputs.errors = own.errors;
  return outputs;
}

ops::LaunchRows BatchState::launch_rows(const std::int32_t* rows, std::int32_t b) const {
  return {rows, b, memory_.row_states, options_.max_rows};
}

ops::LaunchErrors BatchState::launch_errors(std::int32_t group,
                                            const ResolveOutputs& outputs) const {
  return {outputs.errors, memory_.row_errors + std::int64_t{group} * options_.max_rows,
          memory_.batch_error};
}

}  // namespace sparse_kvcm
