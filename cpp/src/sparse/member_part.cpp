#include "sparse/member_part.hpp"

namespace sparse_kvcm {

void MemberPart::add(const ops::Piece& piece) {
  if (pieces_.empty()) begin_ = piece.host_offset;
  pieces_.push_back(piece);
  pieces_.back().host_offset -= begin_;
}

bool MemberPart::ends_at(const ops::Piece& piece) const {
  return begin_ + pieces_.back().host_offset + pieces_.back().bytes == piece.host_offset;
}

ops::GroupMemory MemberPart::memory() const {
  ops::GroupMemory memory = memory_;
  memory.pieces = pieces_;
  memory.host += begin_;
  return memory;
}

std::vector<MemberPart> member_parts(const ops::GroupMemory& whole, const HostRowLayout& row,
                                     const std::vector<bool>& wanted) {
  std::vector<MemberPart> parts;
  for (std::size_t i = 0; i < row.pieces.size(); ++i) {
    if (!wanted[static_cast<std::size_t>(row.pieces[i].member)]) continue;
    const ops::Piece& piece = whole.pieces[i];
    if (parts.empty() || !parts.back().ends_at(piece)) parts.emplace_back(whole);
    parts.back().add(piece);
  }
  return parts;
}

}  // namespace sparse_kvcm
