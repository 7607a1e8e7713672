// How much of this machine's cores other processes use.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>

#include "octofuse/cpu.h"

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <fstream>
#include <string>
#endif

namespace octofuse::cpu {
namespace {

using Clock = std::chrono::steady_clock;

struct Use {
  int cores = 0;     // that this process may run on
  double all = 0.0;  // seconds that they have worked for anybody, or for another virtual machine
  double own = 0.0;  // seconds that this process has used
};

#if defined(__linux__)
Use use_now() {
  Use use;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return use;
  timespec own{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own);
  use.own = static_cast<double>(own.tv_sec) + static_cast<double>(own.tv_nsec) * 1e-9;
  std::ifstream file("/proc/stat");
  double ticks = 0.0;
  for (std::string line; std::getline(file, line) && line.compare(0, 3, "cpu") == 0;) {
    int core = 0;
    double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, irq = 0, soft = 0, stolen = 0;
    if (std::sscanf(line.c_str(), "cpu%d %lf %lf %lf %lf %lf %lf %lf %lf", &core, &user, &nice, &system, &idle,
                    &waiting, &irq, &soft, &stolen) < 9) {
      continue;  // the sum of all
    }
    if (core < 0 || core >= CPU_SETSIZE || CPU_ISSET(core, &allowed) == 0) continue;
    ++use.cores;
    ticks += user + nice + system + irq + soft + stolen;
  }
  use.all = ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
  return use;
}
#else
Use use_now() { return {}; }
#endif

class Load {
 public:
  int free_cores() {
    const auto now = Clock::now().time_since_epoch().count();
    if (now >= next_.load(std::memory_order_relaxed)) look(now);
    return free_.load(std::memory_order_relaxed);
  }

 private:
  // /proc/stat counts in hundredths of a second.
  static constexpr Clock::duration kEvery = std::chrono::milliseconds(250);

  void look(Clock::rep now) {
    const std::unique_lock<std::mutex> owner(looks_, std::try_to_lock);
    if (!owner.owns_lock()) return;
    const Use use = use_now();
    const double seconds = std::chrono::duration<double>(Clock::duration(now - at_)).count();
    // A forked child's clock starts anew.
    if (at_ != 0 && use.cores > 0 && use.cores == last_.cores && use.own >= last_.own) {
      const double others = std::max(0.0, (use.all - last_.all - (use.own - last_.own)) / seconds);
      const int rest = static_cast<int>(std::lround(std::max(0.0, use.cores - others)));
      free_.store(std::max(rest, (use.cores + 1) / 2));
    } else {
      free_.store(use.cores > 0 ? use.cores : kAll);
    }
    last_ = use;
    at_ = now;
    next_.store(now + kEvery.count());
  }

  static constexpr int kAll = 1 << 20;

  std::mutex looks_;
  Use last_;
  Clock::rep at_ = 0;
  std::atomic<Clock::rep> next_{0};
  std::atomic<int> free_{kAll};
};

}  // namespace

int free_cores() {
  static Load load;
  return load.free_cores();
}

}  // namespace octofuse::cpu
