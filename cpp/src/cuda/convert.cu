// One thread per slot. The check of the selection rides along; what it reads beyond the slot is the
// row of the launch position, and the ordinal where there is no slot.
#include <algorithm>

#include "cuda/device/seat.cuh"
#include "cuda/error.hpp"
#include "cuda/kernels.hpp"

namespace sparse_kvcm {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 4096;

// The faults of a cell whose slot is not in the arena.
__device__ std::uint32_t cell_faults(const ops::ConvertParams& p, std::int32_t slot, std::int64_t i,
                                     std::int64_t j, std::int32_t seat) {
  if (slot != kNoSlot) return kErrorLease;
  if (seat < 0) return 0;
  const std::int32_t ordinal = p.selection[i * p.selection_stride + j];
  return ordinal >= 0 && ordinal < p.launch.row_states[seat].length ? kErrorUncovered : 0;
}

__device__ void check_cell(const ops::ConvertParams& p, std::int32_t slot, bool in_arena,
                           std::int64_t i, std::int64_t j) {
  std::int32_t seat = kPaddingRow;
  if (p.selection != nullptr) {
    seat = device::find_seat(p.launch.rows[i], p.launch.row_states, p.launch.num_rows);
    if (seat == device::kNoSeat && j == 0) device::raise(p.errors.batch_error, kBatchErrorRow);
  }
  if (in_arena) return;
  const std::uint32_t bits = cell_faults(p, slot, i, j, seat);
  if (p.errors.errors != nullptr) device::raise(p.errors.errors + i, bits);
  if (p.errors.row_errors != nullptr && seat >= 0) device::raise(p.errors.row_errors + seat, bits);
}

__global__ void convert_kernel(ops::ConvertParams p) {
  const std::int64_t num_cells = static_cast<std::int64_t>(p.b) * p.k;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t cell = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       cell < num_cells; cell += step) {
    const std::int32_t slot = p.slots[cell];
    const bool in_arena = slot >= 0 && slot < p.num_slots;
    const std::int64_t index = in_arena ? p.first + slot / p.units_per_page * p.page_stride +
                                              slot % p.units_per_page * p.unit_stride
                                        : kNoSlot;
    if (p.out32 != nullptr) {
      p.out32[cell] = static_cast<std::int32_t>(index);
    } else {
      p.out64[cell] = index;
    }
    check_cell(p, slot, in_arena, cell / p.k, cell % p.k);
  }
}

}  // namespace

void launch_convert(const ops::ConvertParams& params, cudaStream_t stream) {
  const std::int64_t num_cells = static_cast<std::int64_t>(params.b) * params.k;
  const std::int64_t blocks = std::min((num_cells + kThreads - 1) / kThreads, kMaxBlocks);
  convert_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  SPARSE_KVCM_CUDA_CHECK(cudaGetLastError());
}

cudaError_t probe_kernel_image() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, convert_kernel);
}

}  // namespace sparse_kvcm
