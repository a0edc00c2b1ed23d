// The limits themselves: a plain copy on the host, and the link to the device.
#include "backend/backend.hpp"
#include "bench.hpp"

namespace sparse_kvcm::bench {
namespace {

constexpr std::size_t kBytes = std::size_t{64} << 20;

const Registration kMemcpy("copy", "host_memcpy_256MiB",
                           [](Context& context) { return rate_gb_per_s(context.copy_rate(), {}); });

const Registration kDownload("copy", "device_to_pinned_64MiB", [](Context& context) {
  const auto backend = backend_for(context.device());
  const BufferPtr device = backend->allocate_device(kBytes);
  const BufferPtr pinned = backend->allocate_pinned(kBytes);
  const double seconds =
      context.median_seconds([&] { backend->download(*pinned, device->device_data(), kBytes, 0); });
  return rate_gb_per_s(static_cast<double>(kBytes) / seconds, {});
});

}  // namespace
}  // namespace sparse_kvcm::bench
