#include "core/numa.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <climits>

#include "core/system_file.hpp"

namespace sparse_kvcm {
namespace {

constexpr int kMaxNodes = 1024;
constexpr int kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h
constexpr std::size_t kSamples = 64;

}  // namespace

int numa_node_of(std::string pci_bus_id, const std::string& root) {
  // "0" or "0-1" or "0,2".
  const std::string nodes = read_system_file(root + "/sys/devices/system/node/has_memory");
  if (nodes.find_first_of("-,") == std::string::npos) return kAnyNode;
  // CUDA writes capitals, the kernel does not.
  std::transform(pci_bus_id.begin(), pci_bus_id.end(), pci_bus_id.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto node =
      parse_number(read_system_file(root + "/sys/bus/pci/devices/" + pci_bus_id + "/numa_node"));
  return node && *node >= 0 && *node < kMaxNodes ? static_cast<int>(*node) : kAnyNode;
}

int prefer_node(std::byte* data, std::size_t bytes, int node) {
  constexpr int kBits = CHAR_BIT * sizeof(unsigned long);
  std::array<unsigned long, kMaxNodes / kBits> mask{};
  mask[static_cast<std::size_t>(node / kBits)] = 1UL << (node % kBits);
  // The kernel takes the number of bits plus one.
  return syscall(SYS_mbind, data, bytes, kPreferred, mask.data(), kMaxNodes + 1, 0) == 0 ? 0
                                                                                         : errno;
}

std::optional<bool> is_on_node(std::byte* data, std::size_t bytes, int node) {
  std::array<void*, kSamples> pages{};
  std::array<int, kSamples> nodes{};
  for (std::size_t s = 0; s < kSamples; ++s) pages[s] = data + bytes / kSamples * s;
  if (syscall(SYS_move_pages, 0, kSamples, pages.data(), nullptr, nodes.data(), 0) != 0) return {};
  return std::all_of(nodes.begin(), nodes.end(), [=](int n) { return n == node; });
}

}  // namespace sparse_kvcm
