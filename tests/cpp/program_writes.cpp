// The attention client of the random programs: fetches, writes new units, checks what it reads.
#include "program_driver.hpp"

namespace sparse_kvcm::testing {

void Program::fetch(std::int32_t b, Launch& launch) {
  std::int32_t skipped = kNobody;
  const ResolveOutputs& out = launch.outputs->all();
  if (options_.sabotage == Sabotage::kSkipMiss)
    for (std::int32_t i = 0; i < launch.b() && skipped == kNobody; ++i)
      if (out.miss_counts[i] > 0) skipped = i;
  if (skipped != kNobody) {
    --out.miss_counts[skipped];
    ++counts_.sabotaged;
  }
  trace("fetch batch", b, "group", launch.group);
  accepted("fetch", kNone, [&] {
    batches_[at(b)]->fetch(launch.group, launch.rows.data(), launch.b(), launch.k,
                           launch.outputs->argument(), 0);
  });
  if (skipped != kNobody) ++out.miss_counts[skipped];
  launch.phase = Phase::kFetched;
  sync();
  check_reads(b, launch);
}

void Program::write_unit(const ModelRequest& request, std::int32_t group, std::int32_t slot,
                         std::int32_t ordinal) {
  const bool one_layer = bytes_.last_layer(group) - bytes_.first_layer(group) == 1;
  if (options_.sabotage == Sabotage::kForgetWrite ||
      options_.sabotage == Sabotage::kWrongWriteSlot ||
      (options_.sabotage == Sabotage::kLeaderOnly && !one_layer))
    ++counts_.sabotaged;
  const UnitTag tag = request.tag(ordinal);
  switch (options_.sabotage) {
    case Sabotage::kForgetWrite:
      return;
    case Sabotage::kWrongWriteSlot:
      return bytes_.write_group(group, slot == request.lease->base ? slot + 1 : slot - 1, tag);
    case Sabotage::kLeaderOnly:
      return bytes_.write(bytes_.first_layer(group), slot, tag);
    default:
      return bytes_.write_group(group, slot, tag);
  }
}

// Sometimes the forward fails half-way through its writes; what follows writes them all, or aborts.
void Program::write(std::int32_t b, Launch& launch) {
  const bool all = random_.percent(92);
  const std::int32_t columns = manager_->config().max_new_units;
  trace(all ? "write batch" : "write in part batch", b, "group", launch.group);
  for (std::int32_t i = 0; i < launch.b(); ++i) {
    if (!launch.served[at(i)]) continue;
    const DeviceRow& device = model_.batch(b).device[at(launch.rows[at(i)])];
    const ModelRequest& r = model_.request(device.request);
    for (std::int32_t o = device.state.committed; o < device.state.length; ++o) {
      const std::int32_t column = i * columns + o - device.state.committed;
      if (all || random_.percent(50))
        write_unit(r, launch.group, launch.write_slots[at(column)], o);
    }
  }
  if (!all) {
    launch.partly_written = true;
    return;
  }
  launch.phase = Phase::kWritten;
  check_reads(b, launch);
}

// Every selected unit that was fetched or written must lie in the slot that resolve gave, in every
// member layer.
void Program::check_reads(std::int32_t b, const Launch& launch) {
  if (launch.phase == Phase::kResolved) return;
  for (std::int32_t i = 0; i < launch.b(); ++i) {
    if (!launch.served[at(i)]) continue;
    const DeviceRow& device = model_.batch(b).device[at(launch.rows[at(i)])];
    const ModelRequest& r = model_.request(device.request);
    const std::int32_t end =
        launch.phase == Phase::kWritten ? device.state.length : device.state.committed;
    for (std::int32_t j = 0; j < launch.k; ++j) {
      const std::int32_t o = launch.selected(i, j);
      if (o < 0 || o >= end) continue;
      require(bytes_.group_holds(launch.group, launch.slot(i, j), r.tag(o)),
              "a selected unit lies in its slot, in every member layer");
    }
  }
}

}  // namespace sparse_kvcm::testing
