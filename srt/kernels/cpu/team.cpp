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

// Members of a phase end within a few microseconds of each other, unless one is off its core.
constexpr auto PATIENCE = std::chrono::microseconds(20);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
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

void Team::Gate::spin_beyond(uint32_t seen) const {
  const auto end = Clock::now() + PATIENCE;
  do {
    for (int i = 0; i < 8; i++) {
      if (value() != seen) return;
      relax();
    }
  } while (Clock::now() < end);
}

void Team::Gate::wait_beyond(uint32_t seen) {
  if (value() != seen) return;
  asleep_.fetch_add(1);
  while (value() == seen) sleep_on(value_, seen);
  asleep_.fetch_sub(1);
}

Team::Team(int size)
    : size_(size), counters_(std::make_unique<Counter[]>(static_cast<size_t>(2 * size))) {
  for (int id = 1; id < size; id++) threads_.emplace_back([this, id] { serve(id); });
}

Team::~Team() {
  stop_ = true;
  jobs_.open();
  for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(Member&)>& job) {
  job_ = &job;
  for (int i = 0; i < 2 * size_; i++) counters_[static_cast<size_t>(i)].taken = 0;
  jobs_.open();
  Member me(*this, 0);
  job(me);
  me.each(0, [](int) {});  // everybody has left the job
}

void Team::serve(int id) {
  uint32_t seen = 0;
  for (;;) {
    jobs_.wait_beyond(seen);
    seen++;
    if (stop_) return;
    Member me(*this, id);
    (*job_)(me);
    me.each(0, [](int) {});
  }
}

void Member::finish(int parity) {
  const uint32_t seen = team_.phases_.value();
  if (team_.arrived_.fetch_add(1) + 1 == team_.size_) {
    // Nobody uses the other counters: they were of the phase before.
    for (int k = 0; k < team_.size_; k++)
      team_.taken(parity ^ 1, k).store(0, std::memory_order_relaxed);
    team_.arrived_.store(0);
    team_.phases_.open();
  } else {
    team_.phases_.spin_beyond(seen);
    team_.phases_.wait_beyond(seen);
  }
}

}  // namespace phloem
