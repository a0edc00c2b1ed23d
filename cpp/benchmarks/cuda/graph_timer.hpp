// Times work that is captured once into a CUDA graph and replayed.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm::bench {

inline void check_cuda_call(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

class BenchStream {
 public:
  BenchStream() { check_cuda_call(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~BenchStream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  BenchStream(const BenchStream&) = delete;
  BenchStream& operator=(const BenchStream&) = delete;

  [[nodiscard]] cudaStream_t get() const { return stream_; }
  [[nodiscard]] Stream id() const { return reinterpret_cast<Stream>(stream_); }
  void synchronize() const { check_cuda_call(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Median seconds of a replay of what `work` puts on `stream`. `before` runs ahead of each replay
// and is not timed; it puts state back.
inline double median_replay_seconds(const BenchStream& stream, const std::function<void()>& work,
                                    const std::function<void()>& before, int replays = 15) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda_call(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  work();
  check_cuda_call(cudaStreamEndCapture(stream.get(), &graph));
  check_cuda_call(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check_cuda_call(cudaEventCreate(&begin));
  check_cuda_call(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < replays + 2; ++i) {
    before();
    stream.synchronize();
    check_cuda_call(cudaEventRecord(begin, stream.get()));
    check_cuda_call(cudaGraphLaunch(executable, stream.get()));
    check_cuda_call(cudaEventRecord(end, stream.get()));
    check_cuda_call(cudaEventSynchronize(end));
    float ms = 0;
    check_cuda_call(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  static_cast<void>(cudaEventDestroy(begin));
  static_cast<void>(cudaEventDestroy(end));
  static_cast<void>(cudaGraphExecDestroy(executable));
  static_cast<void>(cudaGraphDestroy(graph));
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                   times.end());
  return static_cast<double>(times[times.size() / 2]) * 1e-3;
}

}  // namespace sparse_kvcm::bench
