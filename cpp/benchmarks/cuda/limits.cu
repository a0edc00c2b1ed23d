#include "cuda/limits.hpp"

#include "cuda/graph_timer.hpp"

namespace sparse_kvcm::bench {
namespace {

__global__ void empty_kernel() {}

double copy_seconds(void* destination, const void* source, std::size_t bytes) {
  const BenchStream stream;
  return median_replay_seconds(
      stream,
      [&] {
        check_cuda_call(
            cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault, stream.get()));
      },
      [] {}, 7);
}

}  // namespace

double link_copy_rate() {
  static const double rate = [] {
    constexpr std::size_t kBytes = std::size_t{1} << 30;
    void* pinned = nullptr;
    void* device = nullptr;
    check_cuda_call(cudaHostAlloc(&pinned, kBytes, cudaHostAllocDefault));
    check_cuda_call(cudaMalloc(&device, kBytes));
    const double seconds = copy_seconds(device, pinned, kBytes);
    static_cast<void>(cudaFree(device));
    static_cast<void>(cudaFreeHost(pinned));
    return static_cast<double>(kBytes) / seconds;
  }();
  return rate;
}

double device_copy_rate() {
  static const double rate = [] {
    constexpr std::size_t kBytes = std::size_t{4} << 30;
    void* source = nullptr;
    void* destination = nullptr;
    check_cuda_call(cudaMalloc(&source, kBytes));
    check_cuda_call(cudaMalloc(&destination, kBytes));
    const double seconds = copy_seconds(destination, source, kBytes);
    static_cast<void>(cudaFree(source));
    static_cast<void>(cudaFree(destination));
    return 2.0 * static_cast<double>(kBytes) / seconds;
  }();
  return rate;
}

double empty_launch_seconds() {
  static const double seconds = [] {
    constexpr int kNodes = 200;
    const BenchStream stream;
    return median_replay_seconds(
               stream,
               [&] {
                 for (int i = 0; i < kNodes; ++i) empty_kernel<<<1, 32, 0, stream.get()>>>();
               },
               [] {}) /
           kNodes;
  }();
  return seconds;
}

}  // namespace sparse_kvcm::bench
