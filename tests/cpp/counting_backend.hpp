// Counts what an engine sends, so that a test can say what a publish may cost.
#pragma once

#include "faulty_backend.hpp"

namespace sparse_kvcm::testing {

class CountingBackend final : public FaultyBackend {
 public:
  void patch(std::int32_t* destination, std::span<const PatchRun> runs,
             std::span<const std::int32_t> words, Stream stream) override {
    ++patches;
    for (const PatchRun& run : runs) patched_words += run.count;
    FaultyBackend::patch(destination, runs, words, stream);
  }
  void copy_pages(const PageCopy& copy, Stream stream) override {
    ++page_copies;
    FaultyBackend::copy_pages(copy, stream);
  }
  [[nodiscard]] EventPtr record(Stream stream) override {
    ++records;
    return FaultyBackend::record(stream);
  }
  void reset() { patches = patched_words = page_copies = records = 0; }

  std::int64_t patches = 0;
  std::int64_t patched_words = 0;
  std::int64_t page_copies = 0;
  std::int64_t records = 0;
};

}  // namespace sparse_kvcm::testing
