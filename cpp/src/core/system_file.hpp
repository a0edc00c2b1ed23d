// Reads what the kernel says in small files, without streams, which depend on the process's locale.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sparse_kvcm {

// The contents; empty if the file cannot be read.
[[nodiscard]] std::string read_system_file(const std::string& path);

// Takes the first line off `text`.
[[nodiscard]] std::string_view take_line(std::string_view& text);

// What follows `key` on the first line that begins with it; empty if none does.
[[nodiscard]] std::string_view find_value(std::string_view text, std::string_view key);

// The decimal number that `text` begins with, blanks apart; none if it begins otherwise ("max").
[[nodiscard]] std::optional<std::int64_t> parse_number(std::string_view text);

}  // namespace sparse_kvcm
