// What tests of host memory ask the system, and a made-up system for those that must not ask it.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace sparse_kvcm::testing {

// A folder that stands for "/".
class FakeRoot {
 public:
  FakeRoot() : path_(std::filesystem::temp_directory_path() / "sparse_kvcm_XXXXXX") {
    std::string name = path_.string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder " + name);
    path_ = name;
  }
  ~FakeRoot() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;

  void write(const std::string& file, const std::string& text) {
    const std::filesystem::path target = path_.string() + file;
    std::filesystem::create_directories(target.parent_path());
    std::ofstream(target) << text;
  }
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

inline std::size_t system_page() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

inline std::size_t whole_pages(std::size_t bytes) {
  return (bytes + system_page() - 1) / system_page() * system_page();
}

// Bytes of address space that the process has mapped.
inline std::size_t mapped_bytes() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * system_page();
}

// Bytes of [data, data + bytes) that are in memory, in whole pages.
inline std::size_t resident_bytes(std::byte* data, std::size_t bytes) {
  std::vector<unsigned char> pages(whole_pages(bytes) / system_page());
  if (pages.empty()) return 0;
  EXPECT_EQ(mincore(data, bytes, pages.data()), 0);
  const auto count = std::count_if(pages.begin(), pages.end(), [](auto p) { return p & 1; });
  return static_cast<std::size_t>(count) * system_page();
}

}  // namespace sparse_kvcm::testing
