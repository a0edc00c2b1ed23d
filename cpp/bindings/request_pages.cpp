// RequestPages: the pages of one request.
#include "sparse_kvcm/request_pages.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "args.hpp"
#include "array.hpp"
#include "bindings.hpp"
#include "gil.hpp"
#include "int32_array.hpp"

namespace sparse_kvcm::bindings {
namespace {

using Pages = RequestPages;

std::int32_t to_group(const char* function, nb::handle value) {
  return to_int<std::int32_t>(function, "layer_group", value);
}

bool resize(Pages& self, nb::handle capacity, nb::handle history_length, nb::handle stream) {
  constexpr const char* kFunction = "RequestPages.resize";
  const auto room = to_int<std::int32_t>(kFunction, "capacity", capacity);
  const auto history = to_int<std::int32_t>(kFunction, "history_length", history_length);
  const Stream on = to_stream(kFunction, stream);
  return without_gil([&] { return self.resize(room, history, on); });
}

void copy_indices(const Pages& self, nb::handle layer_group, nb::handle out) {
  constexpr const char* kFunction = "RequestPages.copy_base_page_indices";
  ArrayChecker checker(kFunction);
  const Array array =
      checker.take("out", out, {.shape = {"n"}, .access = Access::kWrite, .place = Place::kHost});
  const std::int32_t group = to_group(kFunction, layer_group);
  without_gil([&] {
    self.copy_base_page_indices(
        group, {array.data<std::int32_t>(), static_cast<std::size_t>(array.extent(0))});
  });
}

constexpr const char* kClassDoc = R"(The pages of one request, in all layer groups.

Made by `Storage.create_request_pages`, which it keeps alive. Entry p of a layer group's table is
the slot of page p; -1 if it is not there yet, stale, or in scratch. Garbage collection closes it.
Any thread may call it.)";

constexpr const char* kResizeDoc =
    R"(Move on: `history_length` tokens are computed, the next step writes up to `capacity`.

Parameters
----------
capacity : int
    Tokens that there is room for.
history_length : int
    Tokens that are computed: never less than before, and while pages are in scratch in
    [capacity - max_rewind_len, capacity] of the step at hand.
stream : int
    Pages that are given up are reused behind the work that it has now.

Returns
-------
bool
    False, without a change, if a pool group has too few free slots.)";

}  // namespace

void bind_request_pages(nb::module_& m) {
  nb::class_<Pages>(m, "RequestPages", kClassDoc)
      .def("resize", &resize, arg("capacity"), arg("history_length"), arg("stream") = 0,
           nb::sig("def resize(self, capacity: int, history_length: int, stream: int = 0) -> bool"),
           kResizeDoc)
      .def(
          "drop_step",
          [](Pages& self, nb::handle stream) {
            const Stream on = to_stream("RequestPages.drop_step", stream);
            without_gil([&] { self.drop_step(on); });
          },
          arg("stream") = 0, nb::sig("def drop_step(self, stream: int = 0) -> None"),
          "The step at hand did not happen: its pages and scratch go back.")
      .def(
          "suspend",
          [](Pages& self, nb::handle stream) {
            const Stream on = to_stream("RequestPages.suspend", stream);
            return without_gil([&] { return self.suspend(on); });
          },
          arg("stream") = 0, nb::sig("def suspend(self, stream: int = 0) -> bool"),
          "Drop the step at hand and move dense pages that are still read to host pages.\n\n"
          "False, and nothing changed, if the host has too few.")
      .def(
          "resume",
          [](Pages& self, nb::handle stream) {
            const Stream on = to_stream("RequestPages.resume", stream);
            return without_gil([&] { return self.resume(on); });
          },
          arg("stream") = 0, nb::sig("def resume(self, stream: int = 0) -> bool"),
          "Bring them back. False, and nothing changed, if a pool group on the GPU has too few, or "
          "would be used beyond max_util_for_resume.")
      .def_prop_ro("is_suspended", &Pages::is_suspended, nb::call_guard<nb::gil_scoped_release>(),
                   "Whether its dense pages are on the host.")
      .def(
          "close",
          [](Pages& self, nb::handle stream) {
            const Stream on = to_stream("RequestPages.close", stream);
            without_gil([&] { self.close(on); });
          },
          arg("stream") = 0, nb::sig("def close(self, stream: int = 0) -> None"),
          "Gives everything back. No-op if closed.")
      .def_prop_ro("capacity", &Pages::capacity, nb::call_guard<nb::gil_scoped_release>(),
                   "Tokens that there is room for.")
      .def_prop_ro("history_length", &Pages::history_length,
                   nb::call_guard<nb::gil_scoped_release>(), "Tokens that are computed.")
      .def(
          "get_base_page_indices",
          [](const Pages& self, nb::handle layer_group) {
            const std::int32_t group = to_group("RequestPages.get_base_page_indices", layer_group);
            return to_int32_array(
                without_gil([&] { return self.copy_of_base_page_indices(group); }));
          },
          arg("layer_group"),
          nb::sig("def get_base_page_indices(self, layer_group: int) -> typing.Any"),
          "A copy of the page table of a layer group, int32 (pages,).")
      .def("copy_base_page_indices", &copy_indices, arg("layer_group"), arg("out"),
           nb::sig("def copy_base_page_indices(self, layer_group: int, out: typing.Any) -> None"),
           "Write the page table to the front of `out`, int32 (n,), and -1 behind it.")
      .def(
          "get_swa_scratch_range",
          [](const Pages& self, nb::handle layer_group) {
            const std::int32_t group = to_group("RequestPages.get_swa_scratch_range", layer_group);
            return without_gil([&] { return self.get_swa_scratch_range(group); });
          },
          arg("layer_group"),
          nb::sig("def get_swa_scratch_range(self, layer_group: int) -> PageRange"),
          "Pages of the step at hand that are in scratch.")
      .def(
          "get_scratch_slots",
          [](const Pages& self, nb::handle layer_group) {
            const std::int32_t group = to_group("RequestPages.get_scratch_slots", layer_group);
            return to_int32_array(without_gil([&] { return self.copy_of_scratch_slots(group); }));
          },
          arg("layer_group"),
          nb::sig("def get_scratch_slots(self, layer_group: int) -> typing.Any"),
          "A copy of the slots that they share, int32 (s,).")
      .def_prop_ro("has_scratch_slots", &Pages::has_scratch_slots,
                   nb::call_guard<nb::gil_scoped_release>(), "Whether any page is in scratch.")
      .def_prop_rw(
          "enable_swa_scratch_reuse",
          [](const Pages& self) {
            return without_gil([&] { return self.enable_swa_scratch_reuse(); });
          },
          [](Pages& self, nb::handle enable) {
            const bool on = to_bool("RequestPages.enable_swa_scratch_reuse", "value", enable);
            without_gil([&] { self.set_enable_swa_scratch_reuse(on); });
          },
          nb::for_setter(nb::sig("def enable_swa_scratch_reuse(self, value: bool, /) -> None")),
          "Whether later steps put pages in scratch.");
}

}  // namespace sparse_kvcm::bindings
