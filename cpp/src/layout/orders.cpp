// The orders by name. Pure host logic.
#include <algorithm>
#include <cctype>

#include "octofuse/error.h"
#include "octofuse/layout.h"

namespace octofuse {
namespace {

// The k of "interleaved<k>", a power of two; 0 for anything else.
int64_t interleave_of(const std::string& name) {
  const std::string prefix = "interleaved<";
  if (name.compare(0, prefix.size(), prefix) != 0 || name.back() != '>') return 0;
  const std::string digits = name.substr(prefix.size(), name.size() - prefix.size() - 1);
  const bool number = !digits.empty() && digits.size() < 8 &&
                      std::all_of(digits.begin(), digits.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  const int64_t k = number ? std::stoll(digits) : 0;
  return (k & (k - 1)) == 0 ? k : 0;
}

}  // namespace

MatrixOrder order_named(const std::string& name, const char* argument, int64_t cols) {
  using Inner = MatrixOrder::Inner;
  if (name == "ROW") return {name, 1, cols, Inner::kRows};
  if (name == "COL") return {name, 1, 1, Inner::kRows};
  if (name == "COL32") return {name, 1, 32, Inner::kRows};
  if (name == "COL4_4R2_8C") return {name, 8, 32, Inner::kTuring};
  if (name == "COL32_2R_4R4") return {name, 32, 32, Inner::kAmpere};
  if (const int64_t k = interleave_of(name)) return {name, 1, k, Inner::kRows};
  refuse<ValueError>(argument, "ROW, COL, COL32, COL4_4R2_8C, COL32_2R_4R4 or interleaved<k>, k a power of two",
                     "'" + name + "'");
}

}  // namespace octofuse
