// The extension module sparse_kvcm._core. What is public of it is re-exported by the package.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

NB_MODULE(_core, m) {
  m.doc() = "The C++ engine of sparse_kvcm. Use it through the package.";
  m.def("version", [] { return SPARSE_KVCM_VERSION; }, "Version of the build.");
  sparse_kvcm::bindings::bind_errors(m);
  sparse_kvcm::bindings::bind_device(m);
  sparse_kvcm::bindings::bind_host_limits(m);
  sparse_kvcm::bindings::bind_config(m);
  sparse_kvcm::bindings::bind_storage_config(m);
  sparse_kvcm::bindings::bind_page_index(m);
  sparse_kvcm::bindings::bind_storage_layout(m);
  sparse_kvcm::bindings::bind_request_pages(m);
  sparse_kvcm::bindings::bind_storage(m);
  sparse_kvcm::bindings::bind_ops(m);
  sparse_kvcm::bindings::bind_kv_cache(m);
  sparse_kvcm::bindings::bind_batch(m);
  sparse_kvcm::bindings::bind_manager(m);
}
