// Page ranges and the conversion of page indices.
#include "sparse_kvcm/page_index.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <new>
#include <utility>
#include <vector>

#include "args.hpp"
#include "array.hpp"
#include "bindings.hpp"
#include "int32_array.hpp"
#include "record.hpp"

namespace sparse_kvcm::bindings {
namespace {

void make_range(PageRange* self, nb::handle begin, nb::handle end) {
  new (self) PageRange{to_int<std::int32_t>("PageRange", "begin", begin),
                       to_int<std::int32_t>("PageRange", "end", end)};
}

std::int32_t to_tokens(const char* function, const char* name, nb::handle value, std::int32_t min) {
  return static_cast<std::int32_t>(
      to_int64(function, name, value, min, std::numeric_limits<std::int32_t>::max()));
}

void make_life_cycle(LifeCycle* self, nb::handle window, nb::handle sinks, nb::handle is_sparse) {
  constexpr const char* kFunction = "LifeCycle";
  new (self) LifeCycle{
      to_optional(window,
                  [](nb::handle v) { return to_tokens(kFunction, "sliding_window_size", v, 1); }),
      to_tokens(kFunction, "num_sink_tokens", sinks, 0),
      to_bool(kFunction, "is_sparse", is_sparse)};
}

const LifeCycle& to_life_cycle(const char* function, nb::handle value) {
  return to_instance<LifeCycle>(function, "life_cycle", value);
}

void bind_ranges(nb::module_& m) {
  Record<PageRange>(m, "PageRange", "Pages [begin, end) of a request.")
      .init(&make_range, arg("begin"), arg("end"),
            nb::sig("def __init__(self, begin: int, end: int) -> None"))
      .field("begin", &PageRange::begin, "The first.")
      .field("end", &PageRange::end, "One more than the last.")
      .done();
  Record<LifeCycle>(m, "LifeCycle", "What decides when pages of a layer group are needed.")
      .init(&make_life_cycle, arg("sliding_window_size") = nb::none(), arg("num_sink_tokens") = 0,
            arg("is_sparse") = false,
            nb::sig("def __init__(self, sliding_window_size: int | None = None, "
                    "num_sink_tokens: int = 0, is_sparse: bool = False) -> None"))
      .field("sliding_window_size", &LifeCycle::sliding_window_size, "Tokens; None = all.")
      .field("num_sink_tokens", &LifeCycle::num_sink_tokens, "First tokens that are kept.")
      .field("is_sparse", &LifeCycle::is_sparse, "Its history is on the host.")
      .done();
  m.def(
      "stale_pages",
      [](nb::handle life_cycle, nb::handle tokens_per_block, nb::handle history) {
        constexpr const char* kFunction = "stale_pages";
        return stale_pages(to_life_cycle(kFunction, life_cycle),
                           to_tokens(kFunction, "tokens_per_block", tokens_per_block, 1),
                           to_tokens(kFunction, "history", history, 0));
      },
      arg("life_cycle"), arg("tokens_per_block"), arg("history"),
      nb::sig("def stale_pages(life_cycle: LifeCycle, tokens_per_block: int, history: int) -> "
              "PageRange"),
      "Pages that no query at position `history` or later reads.");
  m.def(
      "scratch_pages",
      [](nb::handle life_cycle, nb::handle tokens_per_block, nb::handle history,
         nb::handle capacity, nb::handle max_rewind_len) {
        constexpr const char* kFunction = "scratch_pages";
        const std::int32_t from = to_tokens(kFunction, "history", history, 0);
        return scratch_pages(to_life_cycle(kFunction, life_cycle),
                             to_tokens(kFunction, "tokens_per_block", tokens_per_block, 1), from,
                             to_tokens(kFunction, "capacity", capacity, from),
                             to_tokens(kFunction, "max_rewind_len", max_rewind_len, 0));
      },
      arg("life_cycle"), arg("tokens_per_block"), arg("history"), arg("capacity"),
      arg("max_rewind_len") = 0,
      nb::sig("def scratch_pages(life_cycle: LifeCycle, tokens_per_block: int, history: int, "
              "capacity: int, max_rewind_len: int = 0) -> PageRange"),
      "Pages that the step [history, capacity) writes first and that are stale when it ends.");
  m.def(
      "most_pages",
      [](nb::handle life_cycle, nb::handle tokens_per_block, nb::handle length) {
        constexpr const char* kFunction = "most_pages";
        return most_pages(to_life_cycle(kFunction, life_cycle),
                          to_tokens(kFunction, "tokens_per_block", tokens_per_block, 1),
                          to_tokens(kFunction, "length", length, 0));
      },
      arg("life_cycle"), arg("tokens_per_block"), arg("length"),
      nb::sig("def most_pages(life_cycle: LifeCycle, tokens_per_block: int, length: int) -> int"),
      "Most pages that a request holds at once while it decodes up to `length` tokens.");
}

void make_converter(PageIndexConverter* self, nb::handle scale, nb::handle expansion,
                    nb::handle position, nb::handle scratch_pages_per_page, nb::handle mode) {
  constexpr const char* kFunction = "PageIndexConverter";
  const std::int32_t pages = to_tokens(kFunction, "scale", scale, 1);
  new (self) PageIndexConverter{
      pages, to_tokens(kFunction, "expansion", expansion, 1),
      static_cast<std::int32_t>(to_int64(kFunction, "position", position, 0, pages - 1)),
      static_cast<std::int32_t>(
          to_int64(kFunction, "scratch_pages_per_page", scratch_pages_per_page, 1, pages)),
      to_enum<PageIndexMode>(kFunction, "mode", mode)};
}

nb::object convert(const PageIndexConverter& self, nb::handle base, nb::handle scratch_range,
                   nb::handle scratch_slots) {
  constexpr const char* kFunction = "PageIndexConverter.convert";
  ArrayChecker checker(kFunction);
  const Array pages = checker.take("base", base, {.shape = {"n"}, .place = Place::kHost});
  ScratchPages scratch;
  if (!scratch_range.is_none()) {
    scratch.pages = to_instance<PageRange>(kFunction, "scratch_range", scratch_range);
  }
  const Array slots = checker.take_optional("scratch_slots", scratch_slots,
                                            {.shape = {"s"}, .place = Place::kHost});
  if (slots.given()) {
    const auto* const first = slots.data<const std::int32_t>();
    scratch.slots.assign(first, first + slots.extent(0));
  }
  const auto n = static_cast<std::size_t>(pages.extent(0));
  std::vector<std::int32_t> indices(n * static_cast<std::size_t>(self.expansion));
  self.convert({pages.data<const std::int32_t>(), n}, scratch, indices);
  return to_int32_array(std::move(indices));
}

constexpr const char* kConverterDoc = R"(From slots of a page table to page indices of kernels.

A slot holds `scale` pages of this size, this buffer's at `position`, each cut into `expansion`
pages as kernels see them. SHARED indices leave the position to the address, PER_LAYER ones have it
in them. Immutable.)";

constexpr const char* kConvertDoc = R"(Convert a page table.

Parameters
----------
base : ndarray, int32, shape (n,)
    Slots; -1 = no page.
scratch_range : PageRange, optional
    Pages that are looked up in `scratch_slots` instead. Needs mode PER_LAYER.
scratch_slots : ndarray, int32, shape (s,), optional
    What they share.

Returns
-------
ndarray, int32, shape (n * expansion,)
    -1 wherever the page is not there.)";

void bind_converter(nb::module_& m) {
  nb::enum_<PageIndexMode>(m, "PageIndexMode", "What page indices count from.")
      .value("SHARED", PageIndexMode::kShared, "an address with the buffer's position in it")
      .value("PER_LAYER", PageIndexMode::kPerLayer, "the beginning of the pool");
  Record<ScratchEntry>(m, "ScratchEntry", "Where a scratch page of one buffer lies.")
      .field("slot_index", &ScratchEntry::slot_index, "Index into the scratch slots.")
      .field("position", &ScratchEntry::position, "Of the page within the slot.")
      .done();
  using Converter = PageIndexConverter;
  Record<Converter> record(m, "PageIndexConverter", kConverterDoc);
  record
      .init(&make_converter, nb::kw_only(), arg("scale"), arg("expansion") = 1, arg("position") = 0,
            arg("scratch_pages_per_page") = 1, arg("mode") = PageIndexMode::kPerLayer,
            nb::sig("def __init__(self, *, scale: int, expansion: int = 1, position: int = 0, "
                    "scratch_pages_per_page: int = 1, mode: PageIndexMode = ...) -> None"))
      .field("scale", &Converter::scale, "Pages of this size per slot.")
      .field("expansion", &Converter::expansion, "Kernel pages per page.")
      .field("position", &Converter::position, "Of this buffer within its slot.")
      .field("scratch_pages_per_page", &Converter::scratch_pages_per_page,
             "Pages that one layer may need at once per scratch page.")
      .field("mode", &Converter::mode, "What indices count from.")
      .done();
  record.type()
      .def("convert", &convert, arg("base"), arg("scratch_range") = nb::none(),
           arg("scratch_slots") = nb::none(),
           nb::sig("def convert(self, base: typing.Any, scratch_range: PageRange | None = None, "
                   "scratch_slots: typing.Any | None = None) -> typing.Any"),
           kConvertDoc)
      .def(
          "base_index_of",
          [](const Converter& self, nb::handle index) {
            return self.base_index_of(
                to_tokens("PageIndexConverter.base_index_of", "index", index, kBadPageIndex));
          },
          arg("index"), nb::sig("def base_index_of(self, index: int) -> int"),
          "The slot of a kernel page index; -1 for -1.")
      .def(
          "get_scratch_entry",
          [](const Converter& self, nb::handle page) {
            return self.get_scratch_entry(
                to_tokens("PageIndexConverter.get_scratch_entry", "scratch_page", page, 0));
          },
          arg("scratch_page"),
          nb::sig("def get_scratch_entry(self, scratch_page: int) -> "
                  "ScratchEntry"),
          "Where the n-th scratch page of this buffer lies.")
      .def(
          "scratch_slots",
          [](const Converter& self, nb::handle num_pages) {
            return self.scratch_slots(
                to_tokens("PageIndexConverter.scratch_slots", "num_pages", num_pages, 0));
          },
          arg("num_pages"), nb::sig("def scratch_slots(self, num_pages: int) -> int"),
          "Slots that so many scratch pages share.");
}

}  // namespace

void bind_page_index(nb::module_& m) {
  bind_ranges(m);
  bind_converter(m);
}

}  // namespace sparse_kvcm::bindings
