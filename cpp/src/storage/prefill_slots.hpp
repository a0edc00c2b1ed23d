// The most slots that a request has in a window's layer group on its way through a prefill.
//
// Within a step the slots never fall, so the last page of each step counts, and the last page there
// is.
// From step to step they are sums of lengths in pages that grow as fast as the prefill, or stand
// still, or are shared scratch, which is a share of such a length. Which of these holds changes
// only where sinks end, or where the window, or what may be rewound, has been passed. Between these
// edges slots rise throughout or fall throughout, so the steps around the edges stand for all the
// others.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace sparse_kvcm {

class PrefillSlots {
 public:
  using Count = std::function<std::int64_t(std::int32_t length, std::int32_t history)>;

  // `count` is what a request has that goes on from `history` to `length` tokens. Steps of `step`
  // tokens in whole pages of `page`; `edges` in tokens. Lengths are at most `upper`.
  PrefillSlots(Count count, std::int64_t page, std::int64_t step,
               const std::vector<std::int64_t>& edges, std::int32_t upper);

  // On the way to `length` tokens, and there. REQUIRES: in [1, upper].
  [[nodiscard]] std::int64_t most(std::int32_t length) const;

 private:
  struct Sample {
    std::int64_t step = 0;   // its number
    std::int64_t slots = 0;  // the most up to its end
  };
  [[nodiscard]] std::int64_t at_end(std::int64_t step) const;

  Count count_;
  std::int64_t page_;
  std::int64_t step_;
  std::vector<Sample> samples_;  // steps ascending
};

}  // namespace sparse_kvcm
