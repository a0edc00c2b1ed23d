#include "graph.hpp"

#include <cuda_runtime_api.h>

#include "cuda/error.hpp"

namespace sparse_kvcm::testing {
namespace {

class CudaGraph final : public Graph {
 public:
  CudaGraph() {
    SPARSE_KVCM_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~CudaGraph() override {
    static_cast<void>(cudaStreamSynchronize(stream_));
    if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(executable_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  [[nodiscard]] Stream stream() const override { return reinterpret_cast<Stream>(stream_); }

  void capture(std::function<void()> launches) override {
    cudaGraph_t graph = nullptr;
    SPARSE_KVCM_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    launches();
    SPARSE_KVCM_CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
    SPARSE_KVCM_CUDA_CHECK(cudaGraphInstantiate(&executable_, graph, 0));
    SPARSE_KVCM_CUDA_CHECK(cudaGraphDestroy(graph));
  }
  void replay() override { SPARSE_KVCM_CUDA_CHECK(cudaGraphLaunch(executable_, stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

std::unique_ptr<Graph> make_cuda_graph(std::int32_t index) {
  SPARSE_KVCM_CUDA_CHECK(cudaSetDevice(index));
  return std::make_unique<CudaGraph>();
}

}  // namespace sparse_kvcm::testing
