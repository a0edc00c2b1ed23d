// A selection group's bytes on a device beside a model of them in host vectors. A test writes what
// should be into the model, byte by byte, and compares everything, paddings too.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "ops_fixture.hpp"
#include "sparse_kvcm/unit_layout.hpp"

namespace sparse_kvcm::testing {

inline constexpr std::byte kPoisonByte{0xDB};

// The byte `i` of a region of a unit: wrong unit, member, region or position give another byte,
// but for one time in 256.
inline std::byte tag(std::int64_t unit, std::int32_t member, std::int32_t region, std::int32_t i) {
  auto mixed = static_cast<std::uint64_t>(((unit * 64 + member) * 4 + region) * 65'536 + i);
  mixed *= 0x9E3779B97F4A7C15u;
  return static_cast<std::byte>(mixed >> 56);
}

struct GroupShape {
  UnitLayout layout;
  std::int32_t num_members = 1;
  std::int32_t units_per_page = 1;
  std::int32_t num_slots = 1;
  std::int32_t num_host_pages = 1;
};

class TestGroup {
 public:
  TestGroup(Device device, GroupShape shape)
      : device_(device), shape_(std::move(shape)), row_(pack_host_row(shape_.layout, members())) {
    const std::int32_t pages = (shape_.num_slots - 1) / units_per_page() + 1;
    const auto arena_bytes = static_cast<std::size_t>(pages * page_bytes());
    arenas_.assign(static_cast<std::size_t>(members()), {});
    for (auto& arena : arenas_) arena.assign(arena_bytes, kPoisonByte);
    host_.assign(static_cast<std::size_t>(num_host_units() * row_.unit_bytes), kPoisonByte);
  }

  [[nodiscard]] std::int32_t members() const { return shape_.num_members; }
  [[nodiscard]] std::int32_t units_per_page() const { return shape_.units_per_page; }
  [[nodiscard]] std::int64_t num_host_units() const {
    return std::int64_t{shape_.num_host_pages} * units_per_page();
  }

  // The model's bytes of one unit and piece, in either place.
  [[nodiscard]] std::byte* in_arena(const HostPiece& piece, std::int32_t slot) {
    const std::int32_t page = slot / units_per_page(), offset = slot % units_per_page();
    return arenas_[static_cast<std::size_t>(piece.member)].data() + page * page_bytes() +
           shape_.layout.region_offset(piece.region, units_per_page()) +
           std::int64_t{offset} * piece.bytes;
  }
  [[nodiscard]] std::byte* in_host(const HostPiece& piece, std::int64_t host_unit) {
    return host_.data() + host_unit * row_.unit_bytes + piece.offset;
  }
  [[nodiscard]] const std::vector<HostPiece>& pieces() const { return row_.pieces; }

  // Model: writes the tags of `unit` there.
  void tag_host(std::int64_t host_unit, std::int64_t unit) {
    for (const HostPiece& piece : pieces()) write_tags(piece, in_host(piece, host_unit), unit);
  }
  void tag_arena(std::int32_t slot, std::int64_t unit) {
    for (const HostPiece& piece : pieces()) write_tags(piece, in_arena(piece, slot), unit);
  }

  // The model's bytes to the device.
  void upload(const PinnedOptions& options = {}) {
    device_arenas_.clear();
    for (const auto& arena : arenas_) device_arenas_.emplace_back(device_, arena);
    pinned_ = backend_for(device_)->allocate_pinned(host_.size(), options);
    std::copy(host_.begin(), host_.end(), pinned_->data());
    device_pieces_.clear();
    for (const HostPiece& piece : pieces()) {
      device_pieces_.push_back({device_arenas_[static_cast<std::size_t>(piece.member)].data() +
                                    shape_.layout.region_offset(piece.region, units_per_page()),
                                page_bytes(), piece.bytes, piece.offset});
    }
  }

  [[nodiscard]] ops::GroupMemory memory() const {
    return {device_pieces_,        pinned_->device_data(), row_.unit_bytes,
            shape_.num_host_pages, shape_.num_slots,       units_per_page()};
  }

  // Fails at the first byte of the device that is not the model's.
  void expect_as_modelled() const {
    for (std::size_t member = 0; member < arenas_.size(); ++member) {
      SCOPED_TRACE(::testing::Message() << "member " << member);
      expect_equal("arena", device_arenas_[member].download(), arenas_[member]);
    }
    const auto backend = backend_for(device_);
    backend->synchronize(*backend->record(0));
    const std::vector<std::byte> host(pinned_->data(), pinned_->data() + pinned_->bytes());
    expect_equal("host", host, host_);
  }

 private:
  [[nodiscard]] std::int64_t page_bytes() const {
    return shape_.layout.page_bytes(units_per_page());
  }

  static void write_tags(const HostPiece& piece, std::byte* bytes, std::int64_t unit) {
    for (std::int32_t i = 0; i < piece.bytes; ++i) {
      bytes[i] = tag(unit, piece.member, piece.region, i);
    }
  }

  Device device_;
  GroupShape shape_;
  HostRowLayout row_;
  std::vector<std::vector<std::byte>> arenas_;
  std::vector<std::byte> host_;
  std::vector<DeviceArray<std::byte>> device_arenas_;
  BufferPtr pinned_;
  std::vector<ops::Piece> device_pieces_;
};

// The layouts that models have, and a few page sizes at which division goes wrong first.
inline std::vector<UnitLayout> all_layouts() {
  std::vector<UnitLayout> layouts;
  for (const std::int32_t bytes : {1152, 1024, 656, 576, 512, 352, 4}) {
    layouts.emplace_back(std::vector{bytes});
  }
  layouts.emplace_back(std::vector{288, 36});
  layouts.emplace_back(std::vector{256, 32});
  layouts.emplace_back(std::vector{576, 8}, 576);
  layouts.emplace_back(std::vector{8, 576, 12, 512}, 100);
  return layouts;
}
inline std::vector<std::int32_t> all_page_sizes() { return {1, 2, 61, 64}; }

inline std::string describe(const GroupShape& shape) {
  std::string text = "regions";
  for (const std::int32_t bytes : shape.layout.region_bytes()) text += " " + std::to_string(bytes);
  return text + ", " + std::to_string(shape.num_members) + " members, page of " +
         std::to_string(shape.units_per_page);
}

}  // namespace sparse_kvcm::testing
