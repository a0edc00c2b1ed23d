// One launch per selection group. The misses of all rows form one list, request-major; a few
// hundred warps walk it, a unit each, so that what is in flight at a time lies close together in
// host memory: address translation, not bandwidth, is what single rows of a large history run out
// of.
// With a cursor each warp takes the next unit of the list when it is done with one. Without, it
// takes every n-th, and fast warps run ahead of slow ones, so that more memory is in use at a time.
//
// Each block numbers the list for itself, kRowsAtOnce rows at a time.
#include "cuda/copy_group.hpp"
#include "cuda/device/block_scan.cuh"
#include "cuda/device/overlap.cuh"
#include "cuda/device/seat.cuh"
#include "cuda/device/unit_copy.cuh"
#include "cuda/kernels.hpp"
#include "cuda/launch.hpp"

namespace sparse_kvcm {
namespace {

using device::kFullWarp;
using device::kWarpSize;

constexpr int kThreads = 256;
constexpr int kRowsAtOnce = 2048;

// What the kernel needs of ops::FetchParams. Lives in the launch's constant parameters.
struct FetchLaunch {
  ops::LaunchRows launch;
  const StepState* step;
  const std::int32_t* miss_ordinals;
  const std::int32_t* miss_slots;
  const std::int32_t* miss_counts;
  std::int32_t k;
  const std::int32_t* page_table;
  std::int64_t max_pages;
  std::int64_t num_slots;
  std::int64_t num_host_pages;
  ops::LaunchErrors errors;
  std::uint32_t* cursor;
  device::CopyGroup group;
  device::CopyPiece pieces[kMaxPieces];
};

__device__ std::int32_t seat_of(const FetchLaunch& p, std::int64_t i) {
  return device::find_seat(p.launch.rows[i], p.launch.row_states, p.launch.num_rows);
}

__device__ void report(const FetchLaunch& p, std::int64_t i, std::uint32_t bits) {
  device::raise(p.errors.errors + i, bits);
  if (p.errors.row_errors != nullptr) {
    device::raise(p.errors.row_errors + p.launch.rows[i], bits);
  }
}

// Misses of launch position `i`. Loads ahead of its checks: their latencies are what a short list
// waits for.
__device__ std::uint32_t count_misses(const FetchLaunch& p, std::int64_t i) {
  const std::int32_t misses = min(max(p.miss_counts[i], 0), p.k);
  const bool is_open = p.step == nullptr || p.step->open != 0;
  const std::int32_t seat = seat_of(p, i);
  if (seat < 0) {
    if (seat == device::kNoSeat && blockIdx.x == 0) {
      device::raise(p.errors.batch_error, kBatchErrorRow);
    }
    return 0;
  }
  if (!is_open) {
    if (blockIdx.x == 0) report(p, i, kErrorStale);
    return 0;
  }
  return static_cast<std::uint32_t>(misses);
}

// Items of the whole list that launch positions first .. first + rows take.
struct ListPart {
  std::int32_t first = 0;
  std::int32_t rows = 0;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

// ends[j]: where the items of position part.first + j end.
__device__ void number_misses(const FetchLaunch& p, ListPart& part, std::uint32_t* ends,
                              std::uint32_t* warp_totals) {
  part.end = part.begin;
  for (std::int32_t begin = 0; begin < part.rows; begin += kThreads) {
    const std::int32_t j = begin + static_cast<std::int32_t>(threadIdx.x);
    const std::uint32_t misses = j < part.rows ? count_misses(p, part.first + j) : 0;
    const std::uint32_t below_in_warp = device::begin_block_scan(misses, warp_totals);
    __syncthreads();
    const device::BlockSums sums = device::end_block_scan<kThreads>(below_in_warp, warp_totals);
    if (j < part.rows) ends[j] = part.end + sums.below + misses;
    part.end += sums.total;
    __syncthreads();
  }
}

// The first j with item < ends[j], from `j` on; the whole warp looks.
__device__ std::int32_t find_row(const std::uint32_t* ends, std::int32_t rows, std::int32_t j,
                                 std::uint32_t item) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarpSize;
  for (;; j += kWarpSize) {
    const bool behind = j + lane < rows && item >= ends[j + lane];
    const int passed = __popc(__ballot_sync(kFullWarp, behind));
    if (passed < kWarpSize) return j + passed;
  }
}

// Where a unit comes from and goes to.
struct Copy {
  std::int64_t host_unit = -1;  // -1: nowhere
  std::int32_t slot = 0;
};

// Miss `m` of launch position `i`.
__device__ Copy find_copy(const FetchLaunch& p, std::int64_t i, std::int64_t m) {
  const std::int32_t ordinal = p.miss_ordinals[i * p.k + m];
  const std::int32_t slot = p.miss_slots[i * p.k + m];
  const std::int32_t row = p.launch.rows[i];
  std::uint32_t error = 0;
  std::int64_t page = kNoPage;
  if (ordinal < 0) {
    error = kErrorRange;
  } else if (ordinal >= p.launch.row_states[row].watermark) {
    error = kErrorHole;
  } else if (slot < 0 || slot >= p.num_slots) {
    error = kErrorLease;
  } else {
    const std::int32_t column = ordinal / p.group.units_per_page;
    if (column < p.max_pages) page = p.page_table[row * p.max_pages + column];
    if (page < 0 || page >= p.num_host_pages) error = kErrorPage;
  }
  if (error != 0) {
    if (threadIdx.x % kWarpSize == 0) report(p, i, error);
    return {};
  }
  return {page * p.group.units_per_page + ordinal % p.group.units_per_page, slot};
}

// Gives a warp its items: the first by the warp's number, then the next that no warp has taken.
class Dealer {
 public:
  __device__ explicit Dealer(std::uint32_t* cursor) : cursor_(cursor), shares_(cursor != nullptr) {}

  // The list has `size` items: where that is no more than one for each warp, nobody asks for
  // another.
  __device__ void expect(std::uint32_t size) { shares_ = cursor_ != nullptr && size > num_warps(); }
  [[nodiscard]] __device__ static std::uint32_t first() {
    return threadIdx.x / kWarpSize * gridDim.x + blockIdx.x;
  }
  [[nodiscard]] __device__ std::uint32_t after(std::uint32_t item) const {
    if (!shares_) return item + num_warps();
    std::uint32_t taken = 0;
    if (threadIdx.x % kWarpSize == 0) taken = atomicAdd(cursor_, 1u);
    return num_warps() + __shfl_sync(kFullWarp, taken, 0);
  }
  // By the whole block, once all its warps are done: the last block leaves zeros.
  __device__ void finish() const {
    __syncthreads();
    if (!shares_ || threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(cursor_ + 1, 1u) == gridDim.x - 1) cursor_[0] = cursor_[1] = 0;
  }

 private:
  [[nodiscard]] __device__ static std::uint32_t num_warps() {
    return gridDim.x * (kThreads / kWarpSize);
  }
  std::uint32_t* cursor_;
  bool shares_;
};

// A warp's way through the list: the item that it has, and what that copies.
class Walk {
 public:
  __device__ Walk(const FetchLaunch& p, const std::uint32_t* ends, const Dealer& dealer)
      : p_(p), ends_(ends), dealer_(dealer), item_(Dealer::first()) {}

  __device__ void enter(const ListPart& part) {
    part_ = part;
    row_ = 0;
    look_up();
  }
  [[nodiscard]] __device__ bool is_in_part() const { return item_ < part_.end; }
  [[nodiscard]] __device__ const Copy& copy() const { return copy_; }
  __device__ void advance() {
    item_ = dealer_.after(item_);
    look_up();
  }

 private:
  __device__ void look_up() {
    copy_ = {};
    if (!is_in_part()) return;
    row_ = find_row(ends_, part_.rows, row_, item_);
    const std::uint32_t begin = row_ == 0 ? part_.begin : ends_[row_ - 1];
    copy_ = find_copy(p_, part_.first + row_, item_ - begin);
  }

  const FetchLaunch& p_;
  const std::uint32_t* ends_;
  const Dealer& dealer_;
  std::uint32_t item_;
  ListPart part_;
  std::int32_t row_ = 0;  // within the part
  Copy copy_;
};

__global__ void __launch_bounds__(kThreads) fetch_kernel(const __grid_constant__ FetchLaunch p) {
  __shared__ std::uint32_t ends[kRowsAtOnce];
  __shared__ std::uint32_t warp_totals[kWarpSize];
  device::let_later_work_begin();
  device::wait_for_earlier_work();
  Dealer dealer(p.cursor);
  Walk walk(p, ends, dealer);
  ListPart part;
  for (; part.first < p.launch.b; part.first += kRowsAtOnce, part.begin = part.end) {
    part.rows = min(p.launch.b - part.first, kRowsAtOnce);
    number_misses(p, part, ends, warp_totals);
    if (part.rows == p.launch.b) dealer.expect(part.end);
    walk.enter(part);
    while (walk.is_in_part()) {
      const Copy copy = walk.copy();
      bool knows_next = false;
      const auto look_ahead = [&] {
        if (!knows_next) walk.advance();
        knows_next = true;
      };
      if (copy.host_unit >= 0) {
        device::copy_unit<ops::MoveDirection::kHostToArena>(p.group, p.pieces, copy.host_unit,
                                                            copy.slot, look_ahead);
      }
      look_ahead();
    }
    __syncthreads();
  }
  dealer.finish();
}

}  // namespace

void launch_fetch(const ops::FetchParams& params, std::int32_t in_flight, cudaStream_t stream) {
  FetchLaunch p{params.launch,
                params.step,
                params.miss_ordinals,
                params.miss_slots,
                params.miss_counts,
                params.k,
                params.page_table,
                params.max_pages,
                params.memory.num_slots,
                params.memory.num_host_pages,
                params.errors,
                params.cursor,
                {},
                {}};
  p.group = make_copy_group(params.memory, p.pieces, 0);
  const auto blocks = static_cast<unsigned>(in_flight / (kThreads / kWarpSize));
  launch_to_overlap(fetch_kernel, {blocks, kThreads}, stream, p);
}

}  // namespace sparse_kvcm
