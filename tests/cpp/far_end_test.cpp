// Offsets that 32 bits do not hold: an arena of more than 4 GiB per member layer, a host history of
// more than 8 GiB, entries of more than 2 GiB. The units at their far ends get the right bytes, and
// the units beside them keep theirs.
//
// Skipped where memory does not suffice.
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "group_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int64_t kNeededKiB = std::int64_t{24} << 20;
constexpr std::int32_t kUnitsPerPage = 64;
constexpr std::int32_t kUnitBytes = 1152;
constexpr std::int32_t kMembers = 2;
constexpr std::int32_t kPages = 58'300;  // of the arena and of host history
constexpr std::int32_t kSlots = kPages * kUnitsPerPage;
static_assert(std::int64_t{kSlots - 128} * kUnitBytes > std::int64_t{1} << 32);
static_assert(std::int64_t{kSlots - 128} * kUnitBytes * kMembers > std::int64_t{8} << 30);

// MemAvailable of /proc/meminfo, or 0.
std::int64_t available_kib() {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string name; meminfo >> name;) {
    std::int64_t value = 0;
    if (name == "MemAvailable:" && meminfo >> value) return value;
    meminfo.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

using Bytes = std::vector<std::byte>;

class FarEndTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (available_kib() < kNeededKiB) {
      GTEST_SKIP() << "needs " << (kNeededKiB >> 20) << " GiB of host memory, there are "
                   << (available_kib() >> 20);
    }
    backend_ = backend_for(device());
    scratch_ = backend_->allocate_pinned(kUnitBytes);
  }

  // The bytes that tell a unit and member.
  static Bytes tagged(std::int64_t unit, std::int32_t member) {
    Bytes bytes(kUnitBytes);
    for (std::int32_t i = 0; i < kUnitBytes; ++i) {
      bytes[static_cast<std::size_t>(i)] = tag(unit, member, 0, i);
    }
    return bytes;
  }
  static Bytes poison() { return Bytes(kUnitBytes, kPoisonByte); }

  void allocate() {
    for (std::int32_t member = 0; member < kMembers; ++member) {
      arenas_.push_back(backend_->allocate_device(std::size_t{kSlots} * kUnitBytes));
      pieces_.push_back({arenas_.back()->device_data(), std::int64_t{kUnitsPerPage} * kUnitBytes,
                         kUnitBytes, member * kUnitBytes});
    }
    host_ = backend_->allocate_pinned(std::size_t{kSlots} * kUnitBytes * kMembers);
  }
  [[nodiscard]] ops::GroupMemory memory() const {
    return {pieces_, host_->device_data(), kUnitBytes * kMembers, kPages, kSlots, kUnitsPerPage};
  }

  [[nodiscard]] std::byte* in_arena(std::int32_t member, std::int64_t slot) const {
    return arenas_[static_cast<std::size_t>(member)]->device_data() + slot * kUnitBytes;
  }
  [[nodiscard]] std::byte* in_host(std::int32_t member, std::int64_t unit) const {
    return host_->data() + (unit * kMembers + member) * kUnitBytes;
  }
  void synchronize() const { backend_->synchronize(*backend_->record(0)); }

  // Puts a unit's bytes there and poison on both sides.
  void set_arena(std::int64_t slot, std::int64_t unit) const {
    for_each_neighbour(slot, [&](std::int32_t member, std::int64_t at) {
      const Bytes bytes = at == slot && unit >= 0 ? tagged(unit, member) : poison();
      const Upload upload{in_arena(member, at), bytes.data(), bytes.size()};
      backend_->upload({&upload, 1}, 0);
    });
    synchronize();
  }
  void set_host(std::int64_t place, std::int64_t unit) const {
    for_each_neighbour(place, [&](std::int32_t member, std::int64_t at) {
      const Bytes bytes = at == place && unit >= 0 ? tagged(unit, member) : poison();
      std::copy(bytes.begin(), bytes.end(), in_host(member, at));
    });
  }
  void expect_arena(std::int64_t slot, std::int64_t unit) const {
    for_each_neighbour(slot, [&](std::int32_t member, std::int64_t at) {
      SCOPED_TRACE(::testing::Message() << "slot " << at << ", member " << member);
      backend_->download(*scratch_, in_arena(member, at), kUnitBytes, 0);
      synchronize();
      const Bytes actual(scratch_->data(), scratch_->data() + kUnitBytes);
      expect_equal("arena", actual, at == slot ? tagged(unit, member) : poison());
    });
  }
  void expect_host(std::int64_t place, std::int64_t unit) const {
    synchronize();
    for_each_neighbour(place, [&](std::int32_t member, std::int64_t at) {
      SCOPED_TRACE(::testing::Message() << "host unit " << at << ", member " << member);
      const Bytes actual(in_host(member, at), in_host(member, at) + kUnitBytes);
      expect_equal("host", actual, at == place ? tagged(unit, member) : poison());
    });
  }

  std::shared_ptr<Backend> backend_;
  std::vector<BufferPtr> arenas_;
  BufferPtr host_, scratch_;
  std::vector<ops::Piece> pieces_;

 private:
  template <class Call>
  static void for_each_neighbour(std::int64_t place, const Call& call) {
    for (std::int64_t at = std::max<std::int64_t>(place - 1, 0);
         at <= std::min<std::int64_t>(place + 1, kSlots - 1); ++at) {
      for (std::int32_t member = 0; member < kMembers; ++member) call(member, at);
    }
  }
};
SPARSE_KVCM_ON_EVERY_DEVICE(FarEndTest);

// Slots, and host units, of which byte offsets pass 2^31, 2^32, 2^33 and the end.
constexpr std::int32_t kPast31 = (std::int64_t{1} << 31) / kUnitBytes + 2;
constexpr std::int32_t kPast32 = (std::int64_t{1} << 32) / kUnitBytes + 2;
const std::vector<std::int32_t> kFar{kSlots - 1, kPast32, kPast31, kPast32 / 2 + 5, kSlots - 70, 1};

TEST_P(FarEndTest, FetchFlushAndLoadMoveTheRightBytes) {
  allocate();
  // Miss i goes to kFar[i]; it is the first unit of one of the far pages, on column i of the table.
  const auto k = static_cast<std::int32_t>(kFar.size());
  std::vector<std::int32_t> table, ordinals;
  for (std::int32_t i = 0; i < k; ++i) {
    table.push_back(kFar[static_cast<std::size_t>(k - 1 - i)] / kUnitsPerPage);
    ordinals.push_back(i * kUnitsPerPage + i * 7);
  }
  const auto unit_of = [&](std::size_t i) {
    return std::int64_t{table[i]} * kUnitsPerPage + static_cast<std::int64_t>(i) * 7;
  };
  for (std::size_t i = 0; i < kFar.size(); ++i) {
    set_host(unit_of(i), unit_of(i));
    set_arena(kFar[i], -1);
  }
  const DeviceArray rows(device(), std::vector<std::int32_t>{0});
  const DeviceArray states(device(), std::vector<RowState>{{.lease_id = 0, .watermark = kSlots}});
  const DeviceArray miss_ordinals(device(), ordinals), miss_slots(device(), kFar);
  const DeviceArray counts(device(), std::vector<std::int32_t>{k});
  const DeviceArray page_table(device(), table);
  const DeviceArray<std::uint32_t> errors(device(), 1, 0);
  ops::FetchParams params;
  params.launch = {rows.data(), 1, states.data(), 1};
  params.miss_ordinals = miss_ordinals.data();
  params.miss_slots = miss_slots.data();
  params.miss_counts = counts.data();
  params.k = k;
  params.page_table = page_table.data();
  params.max_pages = k;
  params.memory = memory();
  params.errors.errors = errors.data();
  ops::fetch(device(), params, 0);
  EXPECT_EQ(errors.download(), std::vector<std::uint32_t>{0});
  std::vector<ops::UnitMove> moves;
  for (std::size_t i = 0; i < kFar.size(); ++i) {
    ASSERT_NO_FATAL_FAILURE(expect_arena(kFar[i], unit_of(i)));
    set_host(unit_of(i), -1);
    moves.push_back({unit_of(i), kFar[i]});
  }
  const std::vector<ops::GroupMemory> groups{memory()};
  ops::move_units(device(), {moves, groups, ops::MoveDirection::kArenaToHost}, 0);
  for (std::size_t i = 0; i < kFar.size(); ++i) {
    ASSERT_NO_FATAL_FAILURE(expect_host(unit_of(i), unit_of(i)));
    set_arena(kFar[i], -1);
  }
  ops::move_units(device(), {moves, groups, ops::MoveDirection::kHostToArena}, 0);
  for (std::size_t i = 0; i < kFar.size(); ++i) {
    ASSERT_NO_FATAL_FAILURE(expect_arena(kFar[i], unit_of(i)));
  }
}

// A lease at the end of the largest arena whose entries pass 2^31 bytes.
TEST_P(FarEndTest, ResetAndResolveWriteTheRightEntries) {
  constexpr std::int64_t kNumSlots = (std::int64_t{1} << 29) + 4096;
  constexpr std::int32_t kCached = 100, kWindow = 3, kK = 40, kHistory = 500;
  constexpr auto kBase = static_cast<std::int32_t>(kNumSlots - kCached - kWindow);
  const BufferPtr memory = backend_->allocate_device(kNumSlots * sizeof(Entry));
  auto* const entries = reinterpret_cast<Entry*>(memory->device_data());
  const auto lease_entries = [&] {  // with one on each side
    const BufferPtr pinned = backend_->allocate_pinned((kCached + 2) * sizeof(Entry));
    backend_->download(*pinned, reinterpret_cast<std::byte*>(entries + kBase - 1), pinned->bytes(),
                       0);
    synchronize();
    const auto* data = reinterpret_cast<const Entry*>(pinned->data());
    return std::vector<Entry>(data, data + kCached + 2);
  };
  const std::vector<Entry> poisoned(kCached + 2, kPoisonWord);
  const Upload upload{reinterpret_cast<std::byte*>(entries + kBase - 1), poisoned.data(),
                      poisoned.size() * sizeof(Entry)};
  backend_->upload({&upload, 1}, 0);
  const DeviceArray<std::uint32_t> last(device(), 1, 0);
  const std::vector<ops::LeaseReset> leases{
      {.lease_id = 0, .base = kBase, .cached_slots = kCached}};
  const std::vector<Entry*> all_entries{entries};
  const std::vector<std::uint32_t*> all_last{last.data()};
  ops::reset_leases(device(), {leases, all_entries, all_last, kNumSlots, 1, 6}, 0);
  std::vector<Entry> expected(kCached + 2, kEmptyEntry);
  expected.front() = expected.back() = kPoisonWord;
  expect_equal("entries", lease_entries(), expected);

  // The lease is empty, so the i-th ordinal takes the i-th slot.
  std::vector<std::int32_t> selection(kK), slots(kK);
  for (std::int32_t j = 0; j < kK; ++j) {
    selection[static_cast<std::size_t>(j)] = 3 + j * 11;
    slots[static_cast<std::size_t>(j)] = kBase + j;
    expected[static_cast<std::size_t>(j + 1)] = 7u << 25 | static_cast<Entry>(3 + j * 11);
  }
  const DeviceArray rows(device(), std::vector<std::int32_t>{0});
  const DeviceArray states(device(), std::vector<RowState>{{.lease_id = 0,
                                                            .base = kBase,
                                                            .cached_slots = kCached,
                                                            .window_slots = kWindow,
                                                            .length = kHistory,
                                                            .committed = kHistory,
                                                            .window_begin = kHistory,
                                                            .watermark = kHistory}});
  const DeviceArray selected(device(), selection);
  const DeviceArray step(device(), std::vector<StepState>{{7, 1}});
  const DeviceArray<std::int32_t> out(device(), 4 * kK, kPoison), counts(device(), 2, kPoison);
  const DeviceArray<std::uint32_t> errors(device(), 1, kPoisonWord);
  ops::ResolveParams params;
  params.launch = {rows.data(), 1, states.data(), 1};
  params.selection = selected.data();
  params.selection_stride = params.k = kK;
  params.step = step.data();
  params.entries = entries;
  params.num_slots = kNumSlots;
  params.last = last.data();
  params.num_leases = 1;
  params.slots = out.data();
  params.write_slots = out.data() + kK;
  params.miss_ordinals = out.data() + 2 * kK;
  params.miss_slots = out.data() + 3 * kK;
  params.miss_counts = counts.data();
  params.hit_counts = counts.data() + 1;
  params.errors.errors = errors.data();
  ops::resolve(device(), params, 0);
  EXPECT_EQ(errors.download(), std::vector<std::uint32_t>{0});
  std::vector<std::int32_t> given = out.download();
  given.resize(kK);
  expect_equal("slots", given, slots);
  expect_equal("entries", lease_entries(), expected);
}

class FarConvertTest : public DeviceTest {};
SPARSE_KVCM_ON_EVERY_DEVICE(FarConvertTest);

TEST_P(FarConvertTest, ConvertGivesByteOffsetsBeyond32Bits) {
  constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max() - 1;
  const std::vector<std::int32_t> slots{kMax, kSlots - 1, kPast32, -1, 0, kMax / 2};
  const DeviceArray in(device(), slots);
  const DeviceArray<std::int64_t> out(device(), slots.size(), kPoison);
  const DeviceArray<std::uint32_t> errors(device(), 1, 0);
  const std::int64_t page_stride = std::int64_t{kUnitsPerPage} * kUnitBytes + 192;
  constexpr std::int64_t kFirst = 1'000'000'000'000;
  ops::ConvertParams params;
  params.slots = in.data();
  params.b = 1;
  params.k = static_cast<std::int32_t>(slots.size());
  params.units_per_page = kUnitsPerPage;
  params.page_stride = page_stride;
  params.unit_stride = kUnitBytes;
  params.first = kFirst;
  params.out64 = out.data();
  params.num_slots = std::numeric_limits<std::int32_t>::max();
  params.errors.errors = errors.data();
  ops::convert(device(), params, 0);
  std::vector<std::int64_t> expected;
  for (const std::int64_t slot : slots) {
    const std::int64_t offset =
        slot / kUnitsPerPage * page_stride + slot % kUnitsPerPage * kUnitBytes;
    expected.push_back(slot < 0 ? -1 : kFirst + offset);
  }
  expect_equal("out64", out.download(), expected);
  EXPECT_EQ(errors.download(), std::vector<std::uint32_t>{0});
}

}  // namespace
}  // namespace sparse_kvcm::testing
