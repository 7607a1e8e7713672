// Which instruction sets this machine has, and which one is in use.
#include "cpu/isa.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "octofuse/cpu.h"
#include "octofuse/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace octofuse::cpu {
namespace {

struct Entry {
  const Kernels* kernels;
  const char* needs;
  bool (*runs)();
};

#if defined(__x86_64__)
bool has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;  // no name of older compilers' own
  return f16c && __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}
bool has_avx512_vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vnni") != 0;
}
#if defined(OCTOFUSE_CPU_AVX_VNNI)
bool has_avx_vnni() {  // older compilers' __builtin_cpu_supports does not know the name
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}
#endif
#elif defined(__aarch64__)
#if defined(__linux__)
bool has_dotprod() { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }
#else
bool has_dotprod() { return false; }
#endif
#endif

// The best first.
const Entry kEntries[] = {
#if defined(__x86_64__)
    {&kAvx512Vnni, "a CPU with AVX-512 VNNI", has_avx512_vnni},
#if defined(OCTOFUSE_CPU_AVX_VNNI)
    {&kAvxVnni, "a CPU with AVX-VNNI", has_avx_vnni},
#endif
    {&kAvx2, "a CPU with AVX2 and FMA", has_avx2},
#elif defined(__aarch64__)
    {&kNeonDotprod, "a CPU with the NEON dot product", has_dotprod},
#endif
    {&kPortable, "", [] { return true; }},
};

// argument: what the caller calls the name.
const Kernels& named(const char* argument, const std::string& name) {
  std::string known;
  for (const Entry& entry : kEntries) {
    if (name == entry.kernels->name) {
      if (entry.runs()) return *entry.kernels;
      refuse<ValueError>(argument, "an instruction set of this machine", "'" + name + "', which needs " + entry.needs);
    }
    known += (known.empty() ? "" : ", ") + std::string(entry.kernels->name);
  }
  refuse<ValueError>(argument, "one of " + known, "'" + name + "'");
}

const Kernels& best() {
  const char* wish = std::getenv("OCTOFUSE_CPU_ISA");
  if (wish != nullptr && *wish != '\0') return named("OCTOFUSE_CPU_ISA", wish);
  for (const Entry& entry : kEntries) {
    if (entry.runs()) return *entry.kernels;
  }
  return kPortable;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{&best()};
  return kernels;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

std::vector<Isa> isas() {
  std::vector<Isa> found;
  for (const Entry& entry : kEntries) {
    found.push_back({entry.kernels->name, entry.runs() ? "" : std::string("needs ") + entry.needs});
  }
  return found;
}

const char* isa() { return kernels().name; }

void use_isa(const std::string& name) { chosen().store(&named("name", name)); }

int max_threads() {
  // torch keeps its number in its OpenMP runtime, whose functions are visible to all of the process.
  static const auto ask = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  static const int without = static_cast<int>(std::thread::hardware_concurrency());
  const int count = ask != nullptr ? ask() : without;
  return count < 1 ? 1 : count > 1024 ? 1024 : count;
}

}  // namespace octofuse::cpu
