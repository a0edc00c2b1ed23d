// Checks of what the host can see of an operation's arguments: sizes, strides, host arrays and
// pointers that are null although the shape says that something is there. A pointer to no elements
// may be null. What device memory holds is the backends' to check.
#pragma once

#include "sparse_kvcm/ops.hpp"

namespace sparse_kvcm {

// Each throws InvalidArgument with the argument, its limit and the value given.
void check(const ops::ResolveParams& params);
void check(const ops::FetchParams& params);
void check(const ops::MoveParams& params);
void check(const ops::ConvertParams& params);
void check(const ops::ResetParams& params);

}  // namespace sparse_kvcm
