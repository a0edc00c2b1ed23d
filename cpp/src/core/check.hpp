// Builds "[function] message" errors. Used as
//   if (k < 1) fail_argument("resolve", "k must be >= 1, got ", k);
#pragma once

#include <array>
#include <charconv>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm {

// Without streams: they read the process's locale, which is not ours. It may group digits, and a
// host program with a C++ runtime of its own can have left it unusable.
inline void append_part(std::string& text, std::string_view part) { text += part; }
template <std::integral T>
void append_part(std::string& text, T part) {
  text += std::to_string(part);
}

template <std::floating_point T>
void append_part(std::string& text, T part) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), part).ptr;
  text.append(digits.data(), static_cast<std::size_t>(end - digits.data()));
}

template <std::same_as<const void*> T>
void append_part(std::string& text, T address) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string digits;
  for (auto left = reinterpret_cast<std::uintptr_t>(address); left != 0; left /= 16) {
    digits.insert(digits.begin(), kDigits[left % 16]);
  }
  text.append("0x").append(digits.empty() ? "0" : digits);
}

template <class... Parts>
std::string message(const char* function, const Parts&... parts) {
  std::string text;
  text.append("[").append(function).append("] ");
  (append_part(text, parts), ...);
  return text;
}

template <class... Parts>
[[noreturn]] void fail_argument(const char* function, const Parts&... parts) {
  throw InvalidArgument(message(function, parts...));
}

template <class... Parts>
[[noreturn]] void fail_state(const char* function, const Parts&... parts) {
  throw InvalidState(message(function, parts...));
}

}  // namespace sparse_kvcm
