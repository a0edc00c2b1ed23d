#include "launch.hpp"

#include <string>

#include "args.hpp"

namespace sparse_kvcm::bindings {
namespace {

using Shape = std::vector<std::string_view>;

// Field `name` of a ResolveOutputs, or of anything with the same attributes.
nb::object field(const ArrayChecker& checker, nb::handle out, const char* name) {
  nb::object value = nb::steal(PyObject_GetAttrString(out.ptr(), name));
  if (!value.is_valid()) {
    drop_error();
    fail_argument(checker.function(), "out must be a ResolveOutputs, got ", describe(out),
                  " without ", name);
  }
  return value;
}

Array take_field(ArrayChecker& checker, nb::handle out, const char* name, const Shape& shape,
                 Access access = Access::kWrite, Elements elements = Elements::kInt32) {
  return checker.take(std::string("out.") + name, field(checker, out, name),
                      {.elements = elements, .shape = shape, .access = access});
}

// The field that may be None or missing.
Array take_cursor(ArrayChecker& checker, nb::handle out) {
  return checker.take_optional(
      "out.cursor", nb::getattr(out, "cursor", nb::none()),
      {.elements = Elements::kWord, .shape = {"2"}, .access = Access::kWrite});
}

}  // namespace

ResolveOutputs OutputArrays::pointers() const {
  return {slots.data<std::int32_t>(),         write_slots.data<std::int32_t>(),
          miss_ordinals.data<std::int32_t>(), miss_slots.data<std::int32_t>(),
          miss_counts.data<std::int32_t>(),   hit_counts.data<std::int32_t>(),
          errors.data<std::uint32_t>(),       cursor.data<std::uint32_t>()};
}

Array take_selection(ArrayChecker& checker, nb::handle selection) {
  return checker.take("selection", selection, {.shape = {"b", "k"}, .strides = Strides::kRows});
}

Array take_rows(ArrayChecker& checker, nb::handle rows) {
  return checker.take("rows", rows, {.shape = {"b"}});
}

OutputArrays take_outputs(ArrayChecker& checker, nb::handle out) {
  const Shape per_row = {"b"};
  const Shape per_unit = {"b", "k"};
  return {.slots = take_field(checker, out, "slots", per_unit),
          .write_slots = take_field(checker, out, "write_slots", {"b", "max_new_units"}),
          .miss_ordinals = take_field(checker, out, "miss_ordinals", per_unit),
          .miss_slots = take_field(checker, out, "miss_slots", per_unit),
          .miss_counts = take_field(checker, out, "miss_counts", per_row),
          .hit_counts = take_field(checker, out, "hit_counts", per_row),
          .errors = take_field(checker, out, "errors", per_row, Access::kWrite, Elements::kWord),
          .cursor = take_cursor(checker, out)};
}

OutputArrays take_misses(ArrayChecker& checker, nb::handle out) {
  const Shape per_row = {"b"};
  const Shape per_unit = {"b", "k"};
  OutputArrays arrays;
  arrays.miss_ordinals = take_field(checker, out, "miss_ordinals", per_unit, Access::kRead);
  arrays.miss_slots = take_field(checker, out, "miss_slots", per_unit, Access::kRead);
  arrays.miss_counts = take_field(checker, out, "miss_counts", per_row, Access::kRead);
  arrays.errors = take_field(checker, out, "errors", per_row, Access::kWrite, Elements::kWord);
  arrays.cursor = take_cursor(checker, out);
  return arrays;
}

}  // namespace sparse_kvcm::bindings
