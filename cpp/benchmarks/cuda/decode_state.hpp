// The device state of a decode batch in many selection groups: what resolve and fetch work on, with
// the sizes of a real model.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.hpp"
#include "cuda/graph_timer.hpp"
#include "cuda/trace.hpp"

namespace sparse_kvcm::bench {

struct DecodeShape {
  std::int32_t b = 1;
  std::int32_t k = 2048;
  std::int32_t cached_slots = 4096;
  std::int32_t window_slots = 64;
  std::int32_t units = 32'768;
  std::int32_t groups = 21;
  std::int32_t members = 0;  // 0 = no bytes, resolve only
  std::int32_t unit_bytes = 576;
  std::int32_t host_groups = 0;  // groups with bytes of their own; others share them in turn
};

template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(Backend& backend, std::size_t count)
      : memory_(backend.allocate_device(count * sizeof(T))), count_(count) {}
  [[nodiscard]] T* get() const { return reinterpret_cast<T*>(memory_->device_data()); }
  [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }
  // Waits for the bytes to arrive: a copy of pageable memory may return before, and the streams of
  // the benchmarks do not wait for the stream that it is on.
  void set(const std::vector<T>& values) {
    check_cuda_call(
        cudaMemcpy(get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    check_cuda_call(cudaStreamSynchronize(cudaStreamLegacy));
  }

 private:
  BufferPtr memory_;
  std::size_t count_ = 0;
};

class DecodeState {
 public:
  DecodeState(Device device, const DecodeShape& shape);

  // Runs all but the last `kept` steps of `traces` through resolve, so that the caches are as in
  // mid-decode, and keeps the selections of the rest for `resolve`. Row r of group g follows trace
  // (r + 5 g) mod the number of traces, with its ordinals rotated.
  void warm_up(const std::vector<Trace>& traces, std::int32_t kept);
  // Puts the caches back to where warm_up left them.
  void restore(const BenchStream& stream);

  void resolve(std::int32_t step, std::int32_t group, const BenchStream& stream) const;
  // Fetches what the last resolve of that step and group missed.
  void fetch(std::int32_t step, std::int32_t group, const BenchStream& stream) const;
  [[nodiscard]] ops::FetchParams fetch_params(std::int32_t step, std::int32_t group) const;
  // Replaces the miss lists of a kept step by `misses` random units a row, in runs of `run`.
  void set_misses(std::int32_t step, std::int32_t group, std::int32_t misses, std::int32_t run,
                  std::uint64_t seed);

  [[nodiscard]] std::int64_t total_misses(std::int32_t step, std::int32_t group) const;
  [[nodiscard]] ops::GroupMemory memory(std::int32_t group) const;
  [[nodiscard]] const DecodeShape& shape() const { return shape_; }

 private:
  struct Outputs {
    DeviceArray<std::int32_t> slots, write_slots, ordinals, miss_slots, misses, hits;
    DeviceArray<std::uint32_t> errors, cursor;
  };
  [[nodiscard]] std::size_t index(std::int32_t step, std::int32_t group) const {
    return static_cast<std::size_t>(step * shape_.groups + group);
  }
  [[nodiscard]] ops::LaunchRows launch() const;
  void allocate_bytes();
  void fill_selection(const std::vector<Trace>& traces, std::int32_t step, std::int32_t group,
                      std::vector<std::int32_t>& host) const;
  void run_resolve(const std::int32_t* selection, const StepState* step, std::int32_t group,
                   const Outputs& outputs, Stream stream) const;
  Outputs make_outputs() const;

  Device device_;
  DecodeShape shape_;
  std::shared_ptr<Backend> backend_;
  std::int64_t slots_ = 0;
  std::int64_t pages_ = 0;  // of one row's history
  DeviceArray<std::int32_t> rows_, page_table_;
  DeviceArray<RowState> states_;
  DeviceArray<StepState> steps_;
  DeviceArray<std::uint32_t> batch_error_;
  std::vector<DeviceArray<Entry>> entries_, kept_entries_;
  std::vector<DeviceArray<std::uint32_t>> last_, kept_last_;
  std::vector<DeviceArray<std::int32_t>> selections_;  // [kept steps x groups]
  std::vector<Outputs> outputs_;                       // [kept steps x groups]
  std::vector<BufferPtr> arenas_;                      // [members]
  std::vector<BufferPtr> host_;                        // [host_groups]
  std::vector<ops::Piece> pieces_;
  std::int32_t first_kept_ = 0;
};

}  // namespace sparse_kvcm::bench
