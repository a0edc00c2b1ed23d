// Turns ops::GroupMemory into what copy kernels take as parameters.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/device/copy_layout.hpp"
#include "sparse_kvcm/ops.hpp"

namespace sparse_kvcm {

// Appends the group's pieces at `pieces`, whose position in the launch's list is `first_piece`.
// A word is as wide as the arena's addresses, strides and the host row allow, whatever the layout
// would: the caller of `ops` may pass any.
[[nodiscard]] device::CopyGroup make_copy_group(const ops::GroupMemory& memory,
                                                device::CopyPiece* pieces,
                                                std::int32_t first_piece);

}  // namespace sparse_kvcm
