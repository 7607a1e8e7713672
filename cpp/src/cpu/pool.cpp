#include "cpu/pool.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "octofuse/cpu.h"

namespace octofuse::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// A decoding step calls again after some microseconds of Python: sleeping in between would cost more than it spares.
constexpr auto kWaitsAwake = std::chrono::microseconds(50);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The indices of one loop, handed out to whoever asks. An exception ends the loop; the caller gets the first one.
class Loop {
 public:
  void open(int64_t count, const std::function<void(int64_t)>& work) {
    count_ = count;
    work_ = &work;
    failure_ = nullptr;
    failed_.store(false, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
  }
  void take_all() noexcept {
    for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
      try {
        (*work_)(i);
      } catch (...) {
        next_.store(count_);
        if (!failed_.exchange(true)) failure_ = std::current_exception();
      }
    }
  }
  // Once nobody works on it any more.
  void rethrow() {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  int64_t count_ = 0;
  const std::function<void(int64_t)>* work_ = nullptr;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
};

// A forked child has none of its parent's threads, and GNU's runtime would wait for them.
std::atomic<bool> forked{false};

// The runtime that torch has loaded, found by the name that GNU's and LLVM's runtimes share.
class OpenMp {
 public:
  bool usable() const { return parallel_ != nullptr && calls_apart_ == 0 && !forked.load(); }

  // Remembers if the other threads kept this one waiting for longer than it worked. A region always has as many threads
  // as torch's own have, most of which may have nothing to do: runtimes make threads anew when the number changes.
  void run(Loop& loop, int helpers) {
    Region region{&loop, std::this_thread::get_id(), {}, {helpers}};
    const auto begin = Clock::now();
    parallel_(&OpenMp::work, &region, static_cast<unsigned>(std::max(max_threads(), 1)), 0);
    const auto waited = Clock::now() - region.done, worked = region.done - begin;
    if (waited < kWaitsAwake + worked) {
      apart_ = kApart;
      return;
    }
    calls_apart_ = apart_;
    apart_ = std::min(2 * apart_, kMostApart);
  }

  // A call that did without. After some of them the runtime gets another chance.
  void stayed_apart() {
    if (calls_apart_ > 0) --calls_apart_;
  }

 private:
  struct Region {
    Loop* loop;
    std::thread::id caller;
    Clock::time_point done;
    std::atomic<int> room;  // how many more may help
  };
  static constexpr int64_t kApart = 64, kMostApart = 8192;  // calls

  static void work(void* data) {
    auto& region = *static_cast<Region*>(data);
    const bool caller = std::this_thread::get_id() == region.caller;
    if (!caller && region.room.fetch_sub(1) <= 0) return;
    region.loop->take_all();
    if (caller) region.done = Clock::now();
  }

  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  Parallel parallel_ = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  int64_t calls_apart_ = 0, apart_ = kApart;
};

// Threads of our own.
class Pool {
 public:
  // crowded: other processes use some of the cores.
  void run(int64_t count, int threads, bool crowded, const std::function<void(int64_t)>& work) {
    const std::unique_lock<std::mutex> owner(busy_, std::try_to_lock);
    if (!owner.owns_lock()) {
      for (int64_t i = 0; i < count; ++i) work(i);
      return;
    }
    loop_.open(count, work);
    const int helpers = static_cast<int>(std::min<int64_t>(threads, count)) - 1;
    if (!crowded && openmp_.usable()) {
      openmp_.run(loop_, helpers);
    } else {
      openmp_.stayed_apart();
      run_apart(helpers);
    }
    loop_.rethrow();
  }

 private:
  // state_: which loop it is, whether one may join it, how many still may, and how many are at work.
  static constexpr uint64_t kOpen = 1U << 31, kRoom = 0x7FFF0000, kWorking = 0xFFFF;
  static constexpr int kRoomShift = 16, kEpochShift = 32;

  void run_apart(int helpers) {
    while (size_ < helpers && start()) {
    }
    state_.store((++epoch_ << kEpochShift) | kOpen | static_cast<uint64_t>(helpers) << kRoomShift);
    if (sleepers_.load() > 0) {
      const std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    loop_.take_all();
    // Closed: nobody joins any more, and those who did are in their last piece of work.
    state_.fetch_and(~(kOpen | kRoom));
    wait_until([this] { return (state_.load(std::memory_order_acquire) & kWorking) == 0; });
  }

  // False where the system gives no more threads: fewer do the work.
  bool start() {
    try {
      std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    ++size_;
    return true;
  }

  // Whether there is a loop that this thread has not joined yet, `last` being the one that it joined last.
  static bool offers(uint64_t state, uint64_t last) {
    return (state & kOpen) != 0 && (state & kRoom) != 0 && state >> kEpochShift != last;
  }

  bool join(uint64_t& last) {
    uint64_t state = state_.load();
    while (offers(state, last)) {
      if (state_.compare_exchange_weak(state, state + 1 - (uint64_t{1} << kRoomShift))) {
        last = state >> kEpochShift;
        return true;
      }
    }
    return false;
  }

  [[noreturn]] void serve() {
    uint64_t last = 0;
    for (;;) {
      if (join(last)) {
        loop_.take_all();
        state_.fetch_sub(1, std::memory_order_release);
      }
      const auto until = Clock::now() + kWaitsAwake;
      while (!offers(state_.load(), last) && Clock::now() < until) {
        for (int i = 0; i < 16; ++i) pause();
      }
      if (offers(state_.load(), last)) continue;
      std::unique_lock<std::mutex> lock(sleep_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [this, last] { return offers(state_.load(), last); });
      sleepers_.fetch_sub(1);
    }
  }

  std::mutex busy_;
  Loop loop_;
  OpenMp openmp_;
  int size_ = 0;
  uint64_t epoch_ = 0;
  std::atomic<uint64_t> state_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
};

// Never deleted: its threads outlive static objects. A forked child gets a new one at its first call.
std::atomic<Pool*> instance{nullptr};

// When the module is loaded: a child may be the first to call, after torch's threads have run in its parent.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  forked.store(true);
  instance.store(nullptr);
});

Pool& pool() {
  Pool* found = instance.load();
  if (found != nullptr) return *found;
  auto made = std::make_unique<Pool>();
  return *(instance.compare_exchange_strong(found, made.get()) ? made.release() : found);
}

}  // namespace

void wait_until(const std::function<bool()>& ready) {
  constexpr int kSpins = 5000;  // about 100 us
  for (int spins = 0; !ready(); ++spins) {
    if (spins < kSpins) {
      pause();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

void parallel_for(int64_t count, int threads, const std::function<void(int64_t)>& work) {
  const int free = threads < 2 ? 1 : free_cores();
  threads = std::min(threads, free);
  if (threads < 2 || count < 2) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  pool().run(count, threads, free < max_threads(), work);
}

}  // namespace octofuse::cpu
