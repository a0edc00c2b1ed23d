// import_history: a prompt or a transfer enters host history.
#include <algorithm>

#include "core/check.hpp"
#include "manager/batch_state.hpp"
#include "manager/device_work.hpp"
#include "manager/request.hpp"

namespace sparse_kvcm {

void Request::import_history(std::span<const UnitRows> layers, std::int32_t num_units,
                             Stream stream) {
  check_import(layers, num_units);
  manager_->check_not_capturing("KvCache.import_history", stream);
  const auto pages_before = static_cast<std::int32_t>(pages.size());
  const std::int32_t new_length = committed + num_units;
  try {
    if (!take_pages(new_length)) {
      throw OutOfPages(message("KvCache.import_history", "host history lacks pages for ", num_units,
                               " units: ", manager_->history.num_free_pages(),
                               " are free beyond those taken; close or shrink others"));
    }
    manager_->timeline.join();
    std::size_t first_layer = 0;
    for (std::int32_t group = 0; group < manager_->num_groups(); ++group) {
      const std::size_t members =
          manager_->config.groups[static_cast<std::size_t>(group)].layers.size();
      manager_->history.write(group, layers.subspan(first_layer, members), pages, committed,
                              num_units);
      first_layer += members;
    }
    if (all_window()) {
      DeviceWork work(*manager_, "KvCache.import_history", stream);
      load_window(committed, new_length, stream);
      work.leave();
    }
  } catch (...) {
    keep_pages(pages_before);
    throw;
  }
  length = committed = watermark = new_length;
  history = tokens = std::max(history, new_length * manager_->config.tokens_per_unit);
  window_begin = all_window() ? 0 : new_length;
  if (batch != nullptr) batch->mark_dirty(row);
}

void Request::check_import(std::span<const UnitRows> layers, std::int32_t num_units) const {
  const char* function = "KvCache.import_history";
  check_open(function);
  check_not_in_step(function);
  check_not_receiving(function);
  if (manager_->is_resident()) {
    fail_state(function,
               "the manager has no groups, so no host history; resize to the computed tokens");
  }
  if (has_growth()) {
    fail_state(function, length - committed, " units (", tokens - history,
               " tokens) of growth are pending; publish and record them, or resize the row back");
  }
  const std::int64_t last =
      (std::int64_t{committed} + num_units) * manager_->config.tokens_per_unit;
  if (dense && batch != nullptr &&
      (last > dense->capacity() || !dense->holds(static_cast<std::int32_t>(last)))) {
    fail_state(function, "dense layers have pages for ", dense->capacity(), " tokens, of which ",
               "some that ", last, " need may be in scratch; leave the Batch and resize the ",
               "request first");
  }
  if (watermark != committed) {
    fail_state(function, "the watermark ", watermark, " is below the committed length ", committed,
               "; publish or suspend first");
  }
  if (num_units < 0 || num_units > need - committed) {
    fail_argument(function, "num_units must be in [0, ", need - committed, "] (need ", need,
                  ", committed ", committed, "), got ", num_units);
  }
  check_import_layers(layers, num_units);
}

void Request::check_import_layers(std::span<const UnitRows> layers, std::int32_t num_units) const {
  const char* function = "KvCache.import_history";
  if (layers.size() != manager_->layers.size()) {
    fail_argument(function, "layers must have one element per member layer, ",
                  manager_->layers.size(), ", got ", layers.size());
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto group = static_cast<std::size_t>(manager_->layer_groups[i]);
    const std::int64_t unit_bytes = manager_->config.groups[group].layout.unit_bytes();
    if (layers[i].data == nullptr && num_units > 0) {
      fail_argument(function, "layers[", i, "].data must point to ", num_units, " rows, got null");
    }
    if (layers[i].row_stride < unit_bytes) {
      fail_argument(function, "layers[", i, "].row_stride must be >= ", unit_bytes, " bytes, got ",
                    layers[i].row_stride);
    }
  }
}

}  // namespace sparse_kvcm
