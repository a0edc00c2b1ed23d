// A kernel that was launched to overlap (cuda/launch.hpp) may begin while work before it in the
// stream still runs. Every thread that touches global memory waits first, and in each block some
// thread does. Code for less than Hopper has no wait, and launch.hpp lets nothing overlap with it.
#pragma once

#include <nv/target>

namespace sparse_kvcm::device {

// Lets the next kernel begin, up to its own wait, once every block of this one has come here.
__device__ inline void let_later_work_begin() {
  NV_IF_TARGET(NV_PROVIDES_SM_90,
               (asm volatile("griddepcontrol.launch_dependents;" :: : "memory");))
}

// Waits until the work before this kernel is done and its writes are visible.
__device__ inline void wait_for_earlier_work() {
  NV_IF_TARGET(NV_PROVIDES_SM_90, (asm volatile("griddepcontrol.wait;" :: : "memory");))
}

}  // namespace sparse_kvcm::device
