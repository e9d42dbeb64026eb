#include "team.h"

#include <chrono>
#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace phloem {
namespace {

using Clock = std::chrono::steady_clock;

// The tasks of a phase end within a few microseconds of each other, unless one is off its core.
constexpr auto PATIENCE = std::chrono::microseconds(20);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `condition` holds; false if that took too long.
template <class Condition>
bool holds_soon(Condition&& condition) {
  const auto end = Clock::now() + PATIENCE;
  do {
    for (int i = 0; i < 8; i++) {
      if (condition()) return true;
      relax();
    }
  } while (Clock::now() < end);
  return false;
}

#if defined(__linux__)
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
void sleep_on(std::atomic<uint32_t>&, uint32_t) {
  std::this_thread::sleep_for(std::chrono::microseconds(50));
}
void wake_all(std::atomic<uint32_t>&) {}
#endif

}  // namespace

void Team::Gate::open() {
  value_.fetch_add(1);
  if (asleep_.load() > 0) wake_all(value_);
}

void Team::Gate::wait_beyond(uint32_t seen) {
  asleep_.fetch_add(1);
  while (value() == seen) sleep_on(value_, seen);
  asleep_.fetch_sub(1);
}

Team::Team(int size) : size_(size) {
  for (int id = 1; id < size; id++) threads_.emplace_back([this, id] { serve(id); });
}

Team::~Team() {
  stop_ = true;
  jobs_.open();
  for (auto& thread : threads_) thread.join();
}

void Team::settle() const {
  while (!holds_soon([this] { return inside_.load() == 0; })) std::this_thread::yield();
}

void Team::start(int phases, const std::function<void(Member&)>& job) {
  Member me(*this, 0);
  if (size_ == 1) {
    job(me);
    return;
  }
  settle();
  const size_t width = static_cast<size_t>(size_ + 1);
  if (phases + 1 > capacity_) {  // one more: `late` looks at the phase after the last
    capacity_ = phases + 1;
    counters_ = std::make_unique<Counter[]>(static_cast<size_t>(capacity_) * width);
  }
  for (size_t i = 0; i < static_cast<size_t>(used_) * width; i++) counters_[i].value = 0;
  job_ = &job;
  open_ = true;
  jobs_.open();
  job(me);
  used_ = me.phase_;
  open_ = false;
}

void Team::serve(int id) {
  uint32_t seen = 0;
  for (;;) {
    jobs_.wait_beyond(seen);
    seen = jobs_.value();
    if (stop_) return;
    inside_.fetch_add(1);
    if (open_.load()) {
      Member me(*this, id);
      (*job_)(me);
    }
    inside_.fetch_sub(1);
  }
}

void Team::wait_until_done(int phase, int count) {
  const auto over = [&] { return done(phase).load() == count; };
  if (holds_soon(over)) return;
  for (;;) {
    const uint32_t seen = over_.value();
    if (over()) return;
    over_.wait_beyond(seen);
  }
}

}  // namespace phloem
