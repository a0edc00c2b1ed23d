// Builds "[function] message" errors. Used as
//   if (k < 1) fail_argument("resolve", "k must be >= 1, got ", k);
#pragma once

#include <sstream>
#include <string>

#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm {

template <class... Parts>
std::string message(const char* function, const Parts&... parts) {
  std::ostringstream out;
  out << '[' << function << "] ";
  (out << ... << parts);
  return out.str();
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
