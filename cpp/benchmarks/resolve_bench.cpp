// resolve on drifting selections: each step replaces 13 % of a row's units, the miss rate of the
// GLM-5 trace at N = 2 K. A call is a step of the program, in a clock of its own.
// The limit is a copy of what a launch must read and write: entries, and a slot per selected unit.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "array.hpp"
#include "bench.hpp"
#include "sparse_kvcm/ops.hpp"

namespace sparse_kvcm::bench {
namespace {

struct Shape {
  std::int32_t b = 151;
  std::int32_t k = 2'048;
  std::int32_t cached_slots = 4'096;
  std::int32_t num_units = 32'768;
};

constexpr std::int32_t kWindow = 64;
constexpr std::size_t kSteps = 32;  // selections that take turns

std::vector<RowState> seats(const Shape& shape) {
  std::vector<RowState> rows;
  rows.reserve(static_cast<std::size_t>(shape.b));
  for (std::int32_t r = 0; r < shape.b; ++r) {
    rows.push_back({.lease_id = r,
                    .base = r * (shape.cached_slots + kWindow),
                    .cached_slots = shape.cached_slots,
                    .window_slots = kWindow,
                    .length = shape.num_units,
                    .committed = shape.num_units - 1,
                    .window_begin = shape.num_units - kWindow,
                    .watermark = shape.num_units - 1});
  }
  return rows;
}

// [kSteps][b * k]. The first k of a row's shuffled units are selected, and some of them change.
std::vector<std::vector<std::int32_t>> drift(const Shape& shape) {
  std::mt19937 random(1);
  const auto below = [&](std::int32_t n) {
    return std::uniform_int_distribution<std::size_t>(0, static_cast<std::size_t>(n) - 1)(random);
  };
  std::vector<std::vector<std::int32_t>> steps(kSteps);
  std::vector<std::int32_t> units(static_cast<std::size_t>(shape.num_units));
  for (std::int32_t r = 0; r < shape.b; ++r) {
    std::iota(units.begin(), units.end(), 0);
    std::shuffle(units.begin(), units.end(), random);
    for (std::vector<std::int32_t>& step : steps) {
      for (std::int32_t change = 0; change < shape.k * 13 / 100; ++change) {
        std::swap(units[below(shape.k)],
                  units[static_cast<std::size_t>(shape.k) + below(shape.num_units - shape.k)]);
      }
      step.insert(step.end(), units.begin(), units.begin() + shape.k);
    }
  }
  return steps;
}

class ResolveProgram {
 public:
  ResolveProgram(const Shape& shape, Device device)
      : device_(device),
        backend_(*backend_for(device)),
        rows_(backend_, launch_order(shape.b)),
        row_states_(backend_, seats(shape)),
        step_(backend_, {StepState{}}),
        entries_(backend_, std::vector<Entry>(num_slots(shape), kEmptyEntry)),
        last_(backend_, std::vector<std::uint32_t>(static_cast<std::size_t>(shape.b))),
        output_(backend_, std::vector<std::int32_t>(3 * cells(shape) +
                                                    4 * static_cast<std::size_t>(shape.b))) {
    for (const auto& selection : drift(shape)) selections_.emplace_back(backend_, selection);
    params_.launch = {rows_.data(), shape.b, row_states_.data(), shape.b};
    params_.selection_stride = params_.k = shape.k;
    params_.step = step_.data();
    params_.entries = entries_.data();
    params_.num_slots = static_cast<std::int64_t>(num_slots(shape));
    params_.last = last_.data();
    params_.num_leases = shape.b;
    params_.max_new_units = 1;
    params_.slots = output_.data();
    params_.miss_ordinals = params_.slots + cells(shape);
    params_.miss_slots = params_.miss_ordinals + cells(shape);
    params_.miss_counts = params_.miss_slots + cells(shape);
    params_.hit_counts = params_.miss_counts + shape.b;
    params_.write_slots = params_.hit_counts + shape.b;
    params_.errors.errors = reinterpret_cast<std::uint32_t*>(params_.write_slots + shape.b);
  }

  void next_step() {
    state_.open = 1;
    ++state_.clock;
    step_.write(backend_, {state_});
    params_.selection = selections_[state_.clock % kSteps].data();
    ops::resolve(device_, params_, 0);
  }

 private:
  static std::vector<std::int32_t> launch_order(std::int32_t b) {
    std::vector<std::int32_t> rows(static_cast<std::size_t>(b));
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }
  static std::size_t num_slots(const Shape& shape) {
    return static_cast<std::size_t>(shape.b) *
           static_cast<std::size_t>(shape.cached_slots + kWindow);
  }
  static std::size_t cells(const Shape& shape) {
    return static_cast<std::size_t>(shape.b) * static_cast<std::size_t>(shape.k);
  }

  Device device_;
  Backend& backend_;
  Array<std::int32_t> rows_;
  Array<RowState> row_states_;
  Array<StepState> step_;
  Array<Entry> entries_;
  Array<std::uint32_t> last_;
  Array<std::int32_t> output_;  // all of them, one behind the other
  std::vector<Array<std::int32_t>> selections_;
  StepState state_;
  ops::ResolveParams params_;
};

Measurement measure(Context& context, const Shape& shape) {
  context.require(DeviceKind::kCpu);  // the GPU's cases are in cuda/
  ResolveProgram program(shape, context.device());
  for (std::size_t step = 0; step < kSteps; ++step) program.next_step();  // fills the cache
  const double seconds = context.median_seconds([&] { program.next_step(); });
  const double bytes = 4.0 * shape.b * (shape.cached_slots + shape.k);
  return time_ms(seconds, bytes / context.copy_rate());
}

const Registration kGlm("resolve", "b151_k2048_n4096_32k_units",
                        [](Context& context) { return measure(context, {}); });
const Registration kOne("resolve", "b1_k2048_n4096_32k_units",
                        [](Context& context) { return measure(context, {.b = 1}); });
const Registration kTight("resolve", "b151_k2048_n2048_32k_units", [](Context& context) {
  return measure(context, {.cached_slots = 2'048});
});
const Registration kLong("resolve", "b16_k2048_n4096_1m_units", [](Context& context) {
  return measure(context, {.b = 16, .num_units = 1 << 20});
});

}  // namespace
}  // namespace sparse_kvcm::bench
