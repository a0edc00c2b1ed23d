// A CPU backend that watches the order of work: each stream has a clock of all streams, events
// carry it, waits merge it. Two accesses to one place, of which one writes, must be ordered;
// otherwise a GPU could do them in any order. No event counts as done before the host has waited
// for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "faulty_backend.hpp"

namespace sparse_kvcm::testing {

class OrderedBackend final : public FaultyBackend {
 public:
  enum class Access : std::uint8_t { kRead, kWrite };

  // Work of the engine's own on `stream`: a kernel that reads or writes `place`.
  void touch(Stream stream, const void* place, Access access) {
    tick(stream);
    check(stream, place, access);
  }
  // Places that were accessed out of order.
  [[nodiscard]] std::int64_t num_races() const { return num_races_; }
  [[nodiscard]] std::int64_t num_checks() const { return num_checks_; }
  // So many more events cannot be recorded.
  void fail_records(std::int32_t count) { failing_records_ = count; }

  [[nodiscard]] EventPtr record(Stream stream) override {
    if (failing_records_ > 0) {
      --failing_records_;
      throw DeviceFault();
    }
    tick(stream);
    return std::make_shared<Stamp>(clocks_[stream]);
  }
  void wait(Stream stream, const Event& event) override { merge(clocks_[stream], event); }
  void synchronize(const Event& event) override { merge(host_, event); }
  [[nodiscard]] bool is_done(const Event& event) const override {
    return std::ranges::all_of(static_cast<const Stamp&>(event).clock, [&](const auto& part) {
      const auto known = host_.find(part.first);
      return known != host_.end() && known->second >= part.second;
    });
  }
  void copy_pages(const PageCopy& copy, Stream stream) override {
    tick(stream);
    const bool to_host = copy.direction == PageDirection::kToHost;
    for (const PageCopy::Page& page : copy.pages) {
      check(stream, copy.device + page.device_slot * copy.device_stride,
            to_host ? Access::kRead : Access::kWrite);
      check(stream, copy.host + page.host_slot * copy.host_stride,
            to_host ? Access::kWrite : Access::kRead);
    }
    FaultyBackend::copy_pages(copy, stream);
  }
  void move_units(const ops::MoveParams& params, Stream stream) override {
    tick(stream);
    const bool to_host = params.direction == ops::MoveDirection::kArenaToHost;
    for (const ops::UnitMove& move : params.moves) {
      const ops::GroupMemory& group = params.groups.front();
      check(stream, group.host + move.host_unit * group.host_unit_bytes,
            to_host ? Access::kWrite : Access::kRead);
      check(stream, group.pieces.front().arena + move.slot,  // a name, not an address
            to_host ? Access::kRead : Access::kWrite);
    }
    FaultyBackend::move_units(params, stream);
  }
  void patch(std::int32_t* destination, std::span<const PatchRun> runs,
             std::span<const std::int32_t> words, Stream stream) override {
    tick(stream);
    for (const PatchRun& run : runs) check(stream, destination + run.offset, Access::kWrite);
    FaultyBackend::patch(destination, runs, words, stream);
  }

 private:
  using Clock = std::map<Stream, std::int64_t>;
  struct Stamp final : Event {
    explicit Stamp(Clock at) : clock(std::move(at)) {}
    Clock clock;
  };
  struct History {
    std::map<Stream, std::int64_t> reads;
    std::map<Stream, std::int64_t> writes;
  };

  void tick(Stream stream) { ++clocks_[stream][stream]; }
  static void merge(Clock& clock, const Event& event) {
    for (const auto& [stream, time] : static_cast<const Stamp&>(event).clock) {
      clock[stream] = std::max(clock[stream], time);
    }
  }
  void check(Stream stream, const void* place, Access access) {
    ++num_checks_;
    History& history = places_[place];
    Clock& clock = clocks_[stream];
    const auto ordered = [&](const std::map<Stream, std::int64_t>& earlier) {
      return std::ranges::all_of(earlier,
                                 [&](const auto& e) { return clock[e.first] >= e.second; });
    };
    const bool fine =
        ordered(history.writes) && (access == Access::kRead || ordered(history.reads));
    num_races_ += fine ? 0 : 1;
    (access == Access::kRead ? history.reads : history.writes)[stream] = clock[stream];
  }

  std::map<Stream, Clock> clocks_;
  Clock host_;
  std::map<const void*, History> places_;
  std::int64_t num_races_ = 0;
  std::int64_t num_checks_ = 0;
  std::int32_t failing_records_ = 0;
};

}  // namespace sparse_kvcm::testing
