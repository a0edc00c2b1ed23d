#include "cpu/cpu_backend.hpp"
#include "cpu/unit_copy.hpp"

namespace sparse_kvcm {

void CpuBackend::move_units(const ops::MoveParams& params, Stream) {
  for (const ops::GroupMemory& memory : params.groups) {
    for (const ops::UnitMove& move : params.moves) {
      if (params.direction == ops::MoveDirection::kArenaToHost) {
        store_unit(memory, move.slot, move.host_unit);
      } else {
        load_unit(memory, move.host_unit, move.slot);
      }
    }
  }
}

}  // namespace sparse_kvcm
