#include "cuda/decode_state.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

namespace sparse_kvcm::bench {
namespace {

constexpr std::int32_t kPage = 64;
constexpr std::int32_t kMaxSteps = 1024;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

DecodeState::DecodeState(Device device, const DecodeShape& shape)
    : device_(device), shape_(shape), backend_(backend_for(device)) {
  const std::int32_t lease = shape_.cached_slots + shape_.window_slots;
  slots_ = std::int64_t{shape_.b} * lease;
  pages_ = (shape_.units + kPage - 1) / kPage;
  std::vector<std::int32_t> rows(size(shape_.b));
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<RowState> states;
  std::vector<std::int32_t> table;
  for (std::int32_t row = 0; row < shape_.b; ++row) {
    const std::int32_t begin = shape_.units - shape_.window_slots + 1;
    states.push_back({row, row * lease, shape_.cached_slots, shape_.window_slots, shape_.units,
                      shape_.units - 1, begin, shape_.units - 1});
    for (std::int64_t page = 0; page < pages_; ++page) {
      table.push_back(static_cast<std::int32_t>(row * pages_ + page));
    }
  }
  std::vector<StepState> steps(kMaxSteps);
  for (std::uint32_t s = 0; s < kMaxSteps; ++s) steps[s] = {s + 1, 1};
  rows_ = {*backend_, rows.size()};
  rows_.set(rows);
  states_ = {*backend_, states.size()};
  states_.set(states);
  page_table_ = {*backend_, table.size()};
  page_table_.set(table);
  steps_ = {*backend_, steps.size()};
  steps_.set(steps);
  batch_error_ = {*backend_, 1};
  const std::vector<Entry> empty(size(slots_), kEmptyEntry);
  for (std::int32_t group = 0; group < shape_.groups; ++group) {
    entries_.emplace_back(*backend_, size(slots_));
    entries_.back().set(empty);
    kept_entries_.emplace_back(*backend_, size(slots_));
    last_.emplace_back(*backend_, size(shape_.b));
    kept_last_.emplace_back(*backend_, size(shape_.b));
  }
  if (shape_.members > 0) allocate_bytes();
}

void DecodeState::allocate_bytes() {
  const std::int64_t host_unit = std::int64_t{shape_.members} * shape_.unit_bytes;
  for (std::int32_t member = 0; member < shape_.members; ++member) {
    arenas_.push_back(backend_->allocate_device(size(slots_ * shape_.unit_bytes)));
    pieces_.push_back({arenas_.back()->device_data(), std::int64_t{kPage} * shape_.unit_bytes,
                       shape_.unit_bytes, member * shape_.unit_bytes});
  }
  for (std::int32_t group = 0; group < std::max(1, shape_.host_groups); ++group) {
    host_.push_back(backend_->allocate_pinned(size(shape_.b * pages_ * kPage * host_unit)));
  }
}

void DecodeState::fill_selection(const std::vector<Trace>& traces, std::int32_t step,
                                 std::int32_t group, std::vector<std::int32_t>& host) const {
  const std::int32_t cached = shape_.units - shape_.window_slots;
  for (std::int32_t row = 0; row < shape_.b; ++row) {
    const Trace& trace = traces[size(row + 5 * group) % traces.size()];
    const std::int64_t turn = (std::int64_t{row} * 7919 + std::int64_t{group} * 104'729) % cached;
    const std::vector<std::int32_t>& from = trace[size(step)];
    for (std::int32_t j = 0; j < shape_.k; ++j) {
      host[size(std::int64_t{row} * shape_.k + j)] =
          static_cast<std::int32_t>((from[size(j)] + turn) % cached);
    }
  }
}

void DecodeState::warm_up(const std::vector<Trace>& traces, std::int32_t kept) {
  const auto total = static_cast<std::int32_t>(traces.front().size());
  first_kept_ = total - kept;
  const BenchStream stream;
  std::vector<std::vector<std::int32_t>> staged(size(shape_.groups));
  const Outputs scratch = make_outputs();
  DeviceArray<std::int32_t> selection(*backend_, size(std::int64_t{shape_.b} * shape_.k));
  for (std::int32_t step = 0; step < total; ++step) {
    {
      std::vector<std::jthread> threads;
      for (std::int32_t group = 0; group < shape_.groups; ++group) {
        threads.emplace_back([&, group] {
          staged[size(group)].resize(size(std::int64_t{shape_.b} * shape_.k));
          fill_selection(traces, step, group, staged[size(group)]);
        });
      }
    }
    for (std::int32_t group = 0; group < shape_.groups; ++group) {
      if (step >= first_kept_) {
        selections_.emplace_back(*backend_, staged[size(group)].size());
        selections_.back().set(staged[size(group)]);
        outputs_.push_back(make_outputs());
        continue;
      }
      selection.set(staged[size(group)]);
      run_resolve(selection.get(), steps_.get() + step, group, scratch, stream.id());
      stream.synchronize();
    }
  }
  for (std::int32_t g = 0; g < shape_.groups; ++g) {
    check_cuda_call(cudaMemcpyAsync(kept_entries_[size(g)].get(), entries_[size(g)].get(),
                                    entries_[size(g)].bytes(), cudaMemcpyDeviceToDevice,
                                    stream.get()));
    check_cuda_call(cudaMemcpyAsync(kept_last_[size(g)].get(), last_[size(g)].get(),
                                    last_[size(g)].bytes(), cudaMemcpyDeviceToDevice,
                                    stream.get()));
  }
  stream.synchronize();
}

void DecodeState::restore(const BenchStream& stream) {
  for (std::int32_t g = 0; g < shape_.groups; ++g) {
    check_cuda_call(cudaMemcpyAsync(entries_[size(g)].get(), kept_entries_[size(g)].get(),
                                    entries_[size(g)].bytes(), cudaMemcpyDeviceToDevice,
                                    stream.get()));
    check_cuda_call(cudaMemcpyAsync(last_[size(g)].get(), kept_last_[size(g)].get(),
                                    last_[size(g)].bytes(), cudaMemcpyDeviceToDevice,
                                    stream.get()));
  }
}

DecodeState::Outputs DecodeState::make_outputs() const {
  Backend& backend = *backend_;
  const std::size_t cells = size(std::int64_t{shape_.b} * shape_.k);
  const std::size_t b = size(shape_.b);
  return {{backend, cells}, {backend, b}, {backend, cells}, {backend, cells},
          {backend, b},     {backend, b}, {backend, b},     {backend, 2}};
}

ops::LaunchRows DecodeState::launch() const {
  return {rows_.get(), shape_.b, states_.get(), shape_.b};
}

void DecodeState::run_resolve(const std::int32_t* selection, const StepState* step,
                              std::int32_t group, const Outputs& outputs, Stream stream) const {
  ops::ResolveParams p;
  p.launch = launch();
  p.selection = selection;
  p.selection_stride = shape_.k;
  p.k = shape_.k;
  p.step = step;
  p.entries = entries_[size(group)].get();
  p.num_slots = slots_;
  p.last = last_[size(group)].get();
  p.num_leases = shape_.b;
  p.max_new_units = 1;
  p.max_units = shape_.units;
  p.slots = outputs.slots.get();
  p.write_slots = outputs.write_slots.get();
  p.miss_ordinals = outputs.ordinals.get();
  p.miss_slots = outputs.miss_slots.get();
  p.miss_counts = outputs.misses.get();
  p.hit_counts = outputs.hits.get();
  p.errors = {outputs.errors.get(), nullptr, batch_error_.get()};
  ops::resolve(device_, p, stream);
}

void DecodeState::resolve(std::int32_t step, std::int32_t group, const BenchStream& stream) const {
  const std::size_t i = index(step, group);
  run_resolve(selections_[i].get(), steps_.get() + first_kept_ + step, group, outputs_[i],
              stream.id());
}

ops::GroupMemory DecodeState::memory(std::int32_t group) const {
  return {pieces_,
          host_[size(group) % host_.size()]->device_data(),
          std::int64_t{shape_.members} * shape_.unit_bytes,
          shape_.b * pages_,
          slots_,
          kPage};
}

ops::FetchParams DecodeState::fetch_params(std::int32_t step, std::int32_t group) const {
  const Outputs& outputs = outputs_[index(step, group)];
  ops::FetchParams p;
  p.launch = launch();
  p.miss_ordinals = outputs.ordinals.get();
  p.miss_slots = outputs.miss_slots.get();
  p.miss_counts = outputs.misses.get();
  p.k = shape_.k;
  p.page_table = page_table_.get();
  p.max_pages = pages_;
  p.memory = memory(group);
  p.cursor = outputs.cursor.get();
  p.errors = {outputs.errors.get(), nullptr, batch_error_.get()};
  return p;
}

void DecodeState::fetch(std::int32_t step, std::int32_t group, const BenchStream& stream) const {
  ops::fetch(device_, fetch_params(step, group), stream.id());
}

void DecodeState::set_misses(std::int32_t step, std::int32_t group, std::int32_t misses,
                             std::int32_t run, std::uint64_t seed) {
  const std::size_t i = index(step, group);
  while (outputs_.size() <= i) outputs_.push_back(make_outputs());
  std::mt19937_64 random(seed);
  const std::int32_t cached = shape_.units - shape_.window_slots;
  std::vector<std::int32_t> ordinals(size(std::int64_t{shape_.b} * shape_.k), 0);
  std::vector<std::int32_t> slots(ordinals.size(), 0);
  for (std::int32_t row = 0; row < shape_.b; ++row) {
    std::vector<std::int32_t> chosen;
    for (std::int32_t m = 0; m < misses; m += run) {
      chosen.push_back(static_cast<std::int32_t>(random() % size(cached / run)) * run);
    }
    std::sort(chosen.begin(), chosen.end());
    for (std::int32_t m = 0; m < misses; ++m) {
      const std::size_t cell = size(std::int64_t{row} * shape_.k + m);
      ordinals[cell] = chosen[size(m / run)] + m % run;
      slots[cell] =
          row * (shape_.cached_slots + shape_.window_slots) + m * (shape_.cached_slots / misses);
    }
  }
  outputs_[i].ordinals.set(ordinals);
  outputs_[i].miss_slots.set(slots);
  outputs_[i].misses.set(std::vector<std::int32_t>(size(shape_.b), misses));
}

std::int64_t DecodeState::total_misses(std::int32_t step, std::int32_t group) const {
  std::vector<std::int32_t> counts(size(shape_.b));
  check_cuda_call(cudaMemcpy(counts.data(), outputs_[index(step, group)].misses.get(),
                             counts.size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost));
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

}  // namespace sparse_kvcm::bench
