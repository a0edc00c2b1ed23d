// Hands out the slots of a pool group, first those whose last use is over.
//
// A slot comes back with the event behind its last use. Order of allocation: the slot that came
// back longest ago if its event is done, else one that was never used, else that slot all the same,
// and the caller waits for its event.
//
// The number of slots has a target. Free slots at or beyond it are not handed out; those in use
// *drain*: they stay where they are, and are gone when they come back. Thread-compatible.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "backend/backend.hpp"

namespace sparse_kvcm {

struct Slot {
  std::int32_t id = -1;
  EventPtr ready;  // its contents may be overwritten behind it; null = now
};

class SlotAllocator {
 public:
  SlotAllocator(std::shared_ptr<Backend> backend, std::int32_t num_slots);

  // Appends `count` slots. Returns false and none if fewer are free.
  [[nodiscard]] bool allocate(std::int32_t count, std::vector<Slot>& slots);
  // Throws InvalidState, and changes nothing, if the slot is not in use.
  void release(Slot slot);

  // Changes the number of slots. Slots in use keep their ids.
  void set_target(std::int32_t num_slots);
  [[nodiscard]] std::int32_t target() const { return target_; }
  [[nodiscard]] std::int32_t num_free() const;
  // Slots in use at or beyond the target.
  [[nodiscard]] std::int32_t num_draining() const { return num_draining_; }
  // One more than the last slot that is in use or below the target.
  [[nodiscard]] std::int32_t extent() const;

 private:
  [[nodiscard]] Slot take();
  [[nodiscard]] bool is_over(const EventPtr& use);

  std::shared_ptr<Backend> backend_;
  std::vector<bool> in_use_;    // by id; ids at or beyond its size were never below a target
  std::deque<Slot> returned_;   // free, below the target, longest ago first
  std::vector<Slot> overflow_;  // free, at or beyond it
  std::int32_t target_ = 0;
  std::int32_t num_touched_ = 0;  // ids below it have been in use
  std::int32_t num_draining_ = 0;
  EventPtr last_over_;  // known to be done
};

}  // namespace sparse_kvcm
