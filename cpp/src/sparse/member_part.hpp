// Some member layers of a selection group, as the copy operations take them.
#pragma once

#include <vector>

#include "sparse_kvcm/ops.hpp"
#include "sparse_kvcm/unit_layout.hpp"

namespace sparse_kvcm {

// Pieces of wanted member layers that lie one behind the other in the host row, which is what one
// copy moves. Owns the list that `memory()` points to.
class MemberPart {
 public:
  explicit MemberPart(const ops::GroupMemory& whole) : memory_(whole) {}

  void add(const ops::Piece& piece);
  // Whether `piece` lies right behind the last one.
  [[nodiscard]] bool ends_at(const ops::Piece& piece) const;
  // The group's memory from the part's first piece on. Valid as long as this.
  [[nodiscard]] ops::GroupMemory memory() const;

 private:
  ops::GroupMemory memory_;
  std::vector<ops::Piece> pieces_;
  std::int32_t begin_ = 0;  // of the part within the host row, in bytes
};

// The parts of `whole` that hold the member layers m with wanted[m], in the order of the host row.
// Layers that lie side by side are one part per run of regions, all layers one part.
// REQUIRES: `row` is the layout of `whole`; wanted has an element for each member layer.
[[nodiscard]] std::vector<MemberPart> member_parts(const ops::GroupMemory& whole,
                                                   const HostRowLayout& row,
                                                   const std::vector<bool>& wanted);

}  // namespace sparse_kvcm
