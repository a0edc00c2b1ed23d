// What this build and this machine can run on.
#pragma once

#include <string>

#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm {

// True if this build has the CUDA backend and the machine a driver with at least one GPU.
// Never throws. Thread-safe.
[[nodiscard]] bool cuda_is_available() noexcept;

// Why cuda_is_available() is false, as a sentence; empty if it is true.
[[nodiscard]] std::string cuda_unavailable_reason();

// "cpu", "cuda" (= "cuda:0") or "cuda:<index>". Throws InvalidArgument otherwise.
[[nodiscard]] Device parse_device(const std::string& name);

}  // namespace sparse_kvcm
