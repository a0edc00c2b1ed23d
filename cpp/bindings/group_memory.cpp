#include "group_memory.hpp"

#include "args.hpp"

namespace sparse_kvcm::bindings {
namespace {

constexpr const char* kFunction = "GroupMemory";

}  // namespace

GroupMemoryArrays::GroupMemoryArrays(nb::handle arenas, nb::handle host, nb::handle layout,
                                     nb::handle units_per_page)
    : layout_(to_instance<UnitLayout>(kFunction, "layout", layout)),
      units_per_page_(to_int<std::int32_t>(kFunction, "units_per_page", units_per_page)) {
  const auto members = to_items(kFunction, "arenas", arenas, "arrays");
  const HostRowLayout row = pack_host_row(layout_, static_cast<std::int32_t>(members.size()));
  host_unit_bytes_ = row.unit_bytes;

  ArrayChecker checker(kFunction);
  checker.fix("page_bytes", layout_.page_bytes(units_per_page_), "layout");
  checker.fix("units_per_page", units_per_page_, "the call");
  checker.fix("host_unit_bytes", host_unit_bytes_, "layout");
  for (const nb::object& member : members) {
    arenas_.push_back(checker.take(item_name("arenas", arenas_.size()), member,
                                   {.elements = Elements::kByte,
                                    .shape = {"pages", "page_bytes"},
                                    .access = Access::kWrite,
                                    .strides = Strides::kRows}));
  }
  host_ = checker.take("host", host,
                       {.elements = Elements::kByte,
                        .shape = {"host_pages", "units_per_page", "host_unit_bytes"},
                        .access = Access::kWrite,
                        .place = Place::kHost});
  device_ = checker.device();
  num_slots_ = checker.extent("pages") * units_per_page_;

  for (const HostPiece& piece : row.pieces) {
    const Array& arena = arenas_[static_cast<std::size_t>(piece.member)];
    std::byte* const first = arena.data<std::byte>();
    const std::int64_t offset = layout_.region_offset(piece.region, units_per_page_);
    pieces_.push_back({.arena = first == nullptr ? nullptr : first + offset,
                       .page_bytes = arena.row_stride(),
                       .bytes = piece.bytes,
                       .host_offset = piece.offset});
  }
}

ops::GroupMemory GroupMemoryArrays::memory() const {
  return {.pieces = pieces_,
          .host = host_.data<std::byte>(),
          .host_unit_bytes = host_unit_bytes_,
          .num_host_pages = num_host_pages(),
          .num_slots = num_slots_,
          .units_per_page = units_per_page_};
}

void bind_group_memory(nb::module_& m) {
  using Memory = GroupMemoryArrays;
  nb::class_<Memory>(
      m, "GroupMemory",
      R"(The bytes of one selection group, arena and host history, in arrays of the caller.

The arrays are checked here once, are not copied and stay alive with this object.

Parameters
----------
arenas : sequence of ndarray, uint8, shape (pages, page_bytes)
    One per member layer, on one device; pages at any stride, each contiguous. ``page_bytes`` is
    ``layout.page_bytes(units_per_page)``.
host : ndarray, uint8, shape (host_pages, units_per_page, host_unit_bytes)
    In host memory, pinned if the device is a GPU. ``host_unit_bytes`` is
    ``host_row(layout, len(arenas)).unit_bytes``.
layout : UnitLayout
    Bytes of a unit in each member layer.
units_per_page : int
    Units of a page, the same on both sides.

Raises
------
InvalidArgument
    If an array has another dtype, shape, device or stride, or is read-only.)")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle>(), arg("arenas"), arg("host"),
           arg("layout"), arg("units_per_page"),
           nb::sig("def __init__(self, arenas: "
                   "collections.abc.Sequence[sparse_kvcm._typing.Array], "
                   "host: sparse_kvcm._typing.Array, layout: UnitLayout, units_per_page: int) "
                   "-> None"))
      .def_prop_ro("layout", &Memory::layout, nb::rv_policy::copy,
                   "Bytes of a unit in each member layer.")
      .def_prop_ro("num_members", &Memory::num_members, "Member layers.")
      .def_prop_ro("units_per_page", &Memory::units_per_page, "Page size in units.")
      .def_prop_ro("num_slots", &Memory::num_slots, "Slots of each member's arena.")
      .def_prop_ro("num_host_pages", &Memory::num_host_pages, "Pages of the host history.");
}

}  // namespace sparse_kvcm::bindings
