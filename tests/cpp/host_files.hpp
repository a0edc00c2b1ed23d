// What tests of host memory ask the system, and a made-up system for those that must not ask it.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
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

// The flags of the mapping that holds `data`.
inline std::string vm_flags(const std::byte* data) {
  std::ifstream smaps("/proc/self/smaps");
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    std::istringstream words(line);
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      inside = begin <= address && address < end;
    } else if (inside && line.starts_with("VmFlags:")) {
      return line + " ";
    }
  }
  return "";
}

// Sets SPARSE_KVCM_THP, or unsets it, for as long as it lives.
class Environment {
 public:
  explicit Environment(const char* value) {
    const char* const before = std::getenv(kName);
    if (before != nullptr) before_ = before;
    set(value);
  }
  ~Environment() { set(before_ ? before_->c_str() : nullptr); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  static constexpr const char* kName = "SPARSE_KVCM_THP";
  static void set(const char* value) {
    if (value == nullptr) {
      unsetenv(kName);
    } else {
      setenv(kName, value, 1);
    }
  }
  std::optional<std::string> before_;
};

}  // namespace sparse_kvcm::testing
