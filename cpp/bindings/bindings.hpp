// The parts of the extension module, one per concept and file.
#pragma once

#include <nanobind/nanobind.h>

namespace sparse_kvcm::bindings {

void bind_errors(nanobind::module_& m);
void bind_device(nanobind::module_& m);
void bind_host_limits(nanobind::module_& m);
void bind_config(nanobind::module_& m);
void bind_storage_config(nanobind::module_& m);
void bind_page_index(nanobind::module_& m);
void bind_storage_layout(nanobind::module_& m);
void bind_storage(nanobind::module_& m);
void bind_request_pages(nanobind::module_& m);
void bind_kv_cache(nanobind::module_& m);
void bind_batch(nanobind::module_& m);
void bind_manager(nanobind::module_& m);
void bind_ops(nanobind::module_& m);

}  // namespace sparse_kvcm::bindings
