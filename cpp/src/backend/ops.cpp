// Every operation is: check the arguments, skip an empty launch, one virtual call.
#include "sparse_kvcm/ops.hpp"

#include "backend/backend.hpp"
#include "backend/ops_check.hpp"

namespace sparse_kvcm::ops {

void resolve(Device device, const ResolveParams& params, Stream stream) {
  check(params);
  const auto backend = backend_for(device);
  if (params.launch.b > 0) backend->resolve(params, stream);
}

void fetch(Device device, const FetchParams& params, Stream stream) {
  check(params);
  const auto backend = backend_for(device);
  if (params.launch.b > 0) backend->fetch(params, stream);
}

void move_units(Device device, const MoveParams& params, Stream stream) {
  check(params);
  const auto backend = backend_for(device);
  if (!params.moves.empty() && !params.groups.empty()) backend->move_units(params, stream);
}

void convert(Device device, const ConvertParams& params, Stream stream) {
  check(params);
  const auto backend = backend_for(device);
  if (params.b > 0) backend->convert(params, stream);
}

void reset_leases(Device device, const ResetParams& params, Stream stream) {
  check(params);
  const auto backend = backend_for(device);
  if (!params.leases.empty() && !params.entries.empty()) backend->reset_leases(params, stream);
}

}  // namespace sparse_kvcm::ops
