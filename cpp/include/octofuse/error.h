// Errors that cross the host API. The binding maps them to Python's TypeError, ValueError and RuntimeError.
// No iostreams: with a statically linked libstdc++ their locales crash beside torch's.
#pragma once

#include <stdexcept>
#include <string>

namespace octofuse {

// An argument has the wrong type (not a tensor, wrong dtype).
struct TypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An argument has the right type and a value that cannot be served (shape, stride, device, range).
struct ValueError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The machine, the driver or a library refused: not the caller's argument.
struct RuntimeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// "argument: expected ..., got ...": the one form of every refusal.
template <class Error>
[[noreturn]] void refuse(const char* argument, const std::string& expected, const std::string& got) {
  throw Error(std::string(argument) + ": expected " + expected + ", got " + got);
}

}  // namespace octofuse
