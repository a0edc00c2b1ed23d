// NUMA nodes: which one a GPU is attached to, and putting memory there. Through system calls, since
// libnuma would be a dependency for two of them.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace sparse_kvcm {

inline constexpr int kAnyNode = -1;

// The node of the PCI device ("0000:3B:00.0"), or kAnyNode if it has none or there is one node
// only.
// `root` stands for "/" in tests.
[[nodiscard]] int numa_node_of(std::string pci_bus_id, const std::string& root = "");

// Makes [data, data + bytes), not yet touched, prefer a node: a full node sends it elsewhere.
// Returns 0 or errno: containers often forbid it.
[[nodiscard]] int prefer_node(std::byte* data, std::size_t bytes, int node);

// Whether a sample of the pages of touched memory is on `node`; empty if the kernel does not tell.
[[nodiscard]] std::optional<bool> is_on_node(std::byte* data, std::size_t bytes, int node);

}  // namespace sparse_kvcm
