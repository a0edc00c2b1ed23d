// sparse_kvcm_bench [--device NAME] [--list] [--tune] [BENCH ...]
//
// Runs the named benchmarks, or all, and prints one JSON object per case and line; a case that the
// device does not have is named on stderr. scripts/bench makes a table of it. --tune runs the sweep
// of fetch's rows in flight instead.
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "backend/backend.hpp"
#include "core/check.hpp"
#include "registry.hpp"
#include "sparse_kvcm/device.hpp"

namespace sparse_kvcm::bench {
namespace {

struct Arguments {
  Device device;
  bool list = false;
  bool tune = false;
  std::vector<std::string> wanted;  // BENCH or BENCH/CASE; empty = all
};

bool is_named(const Case& known, const std::string& name) {
  return name == known.bench || name == known.bench + "/" + known.name;
}

bool has_case(const std::string& name) {
  return std::any_of(registry().begin(), registry().end(),
                     [&](const Case& known) { return is_named(known, name); });
}

bool is_wanted(const Case& known, const std::vector<std::string>& wanted) {
  return wanted.empty() || std::any_of(wanted.begin(), wanted.end(), [&](const std::string& name) {
           return is_named(known, name);
         });
}

Arguments parse(const std::vector<std::string>& words) {
  Arguments arguments;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--list") {
      arguments.list = true;
    } else if (words[i] == "--tune") {
      arguments.tune = true;
    } else if (words[i] == "--device") {
      if (++i == words.size()) fail_argument("bench", "--device needs a name");
      arguments.device = parse_device(words[i]);
    } else if (has_case(words[i])) {
      arguments.wanted.push_back(words[i]);
    } else {
      fail_argument("bench", "there is no benchmark \"", words[i], "\"; --list shows all");
    }
  }
  return arguments;
}

std::string number(std::optional<double> value) {
  if (!value) return "null";
  std::ostringstream out;
  out << *value;
  return out.str();
}

void print(const Case& done, const Measurement& result) {
  std::cout << "{\"bench\": \"" << done.bench << "\", \"case\": \"" << done.name
            << "\", \"value\": " << number(result.value) << ", \"unit\": \"" << result.unit
            << "\", \"limit\": " << number(result.limit) << ", \"share\": " << number(result.share)
            << "}" << std::endl;
}

void tune(Context& context) {
  context.require(DeviceKind::kCuda);
  fetch_sweep()(context);
}

// False if it failed. A case that the device does not have did not fail.
bool run_case(const Case& known, Context& context) {
  try {
    print(known, known.run(context));
    return true;
  } catch (const NotAvailable& error) {
    std::cerr << known.bench << " " << known.name << ": " << error.what() << "\n";
    return true;
  } catch (const std::exception& error) {
    std::cerr << known.bench << " " << known.name << " failed: " << error.what() << "\n";
    return false;
  }
}

void list(const Arguments& arguments) {
  for (const Case& known : registry()) {
    if (is_wanted(known, arguments.wanted)) std::cout << known.bench << " " << known.name << "\n";
  }
}

// False if a case failed; the others have run.
bool run(const Arguments& arguments) {
  static_cast<void>(backend_for(arguments.device));  // throws if it is not there
  Context context(arguments.device);
  if (arguments.tune) {
    tune(context);
    return true;
  }
  bool good = true;
  for (const Case& known : registry()) {
    if (is_wanted(known, arguments.wanted)) good &= run_case(known, context);
  }
  return good;
}

}  // namespace
}  // namespace sparse_kvcm::bench

int main(int argc, char** argv) {
  using namespace sparse_kvcm::bench;
  auto& cases = registry();
  std::sort(cases.begin(), cases.end(), [](const Case& a, const Case& b) {
    return std::tie(a.bench, a.name) < std::tie(b.bench, b.name);
  });
  try {
    const Arguments arguments = parse({argv + 1, argv + argc});
    if (!arguments.list) return run(arguments) ? EXIT_SUCCESS : EXIT_FAILURE;
    list(arguments);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return EXIT_FAILURE;
  }
}
