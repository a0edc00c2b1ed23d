// Fields that both configurations have: pages, units and the device.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "sparse_kvcm/device.hpp"

namespace sparse_kvcm::bindings {

template <class Config>
void bind_common_fields(nanobind::class_<Config>& config) {
  config.def_ro("tokens_per_block", &Config::tokens_per_block, "Page size in tokens.")
      .def_ro("tokens_per_unit", &Config::tokens_per_unit, "Tokens that one unit stands for.")
      .def_prop_ro(
          "device", [](const Config& self) { return to_string(self.device); },
          "\"cpu\" or \"cuda:<index>\".");
}

}  // namespace sparse_kvcm::bindings
