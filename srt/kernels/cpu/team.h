// The threads of a step. Every member runs the same code, from phase to phase:
//
//   team.run([&](Member& me) {
//     me.each(heads, [&](int head) { … });   // shared out; nobody goes on before all are done
//     me.each(blocks, [&](int block) { … });
//   });
//
// A phase's tasks are cut into one run a member, so that each reads a contiguous part of memory;
// who is done with his own takes over from the others. That matters where a member is off its core
// for a while, because the server's other processes need it. At the end of a phase a member spins
// for a moment, then sleeps: on a busy machine a spinning one would hold up the one it waits for.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace phloem {

class Member;

class Team {
 public:
  explicit Team(int size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  // Runs `job` on every member, the calling thread being one; returns when all are done.
  void run(const std::function<void(Member&)>& job);

 private:
  friend class Member;
  struct alignas(64) Counter {
    std::atomic<int> taken{0};
  };
  // A number that only grows, to wait on.
  class alignas(64) Gate {
   public:
    void open();
    void spin_beyond(uint32_t seen) const;  // for a moment
    void wait_beyond(uint32_t seen);        // asleep
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

   private:
    std::atomic<uint32_t> value_{0};
    std::atomic<int> asleep_{0};
  };

  void serve(int id);
  std::atomic<int>& taken(int parity, int member) {
    return counters_[static_cast<size_t>(parity * size_ + member)].taken;
  }

  const int size_;
  std::unique_ptr<Counter[]> counters_;  // of the phase and of the next one
  alignas(64) std::atomic<int> arrived_{0};
  Gate phases_, jobs_;
  const std::function<void(Member&)>* job_ = nullptr;
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

class Member {
 public:
  Member(Team& team, int id) : team_(team), id_(id) {}
  int id() const { return id_; }

  // Runs task(0) … task(count - 1), each once, over all members; then waits for all of them.
  template <class Task>
  void each(int count, Task&& task) {
    const int size = team_.size_;
    if (size == 1) {
      for (int i = 0; i < count; i++) task(i);
      return;
    }
    const int parity = phase_++ & 1;
    for (int k = 0; k < size; k++) {
      const int owner = (id_ + k) % size;
      const int begin = static_cast<int>(static_cast<int64_t>(count) * owner / size);
      const int end = static_cast<int>(static_cast<int64_t>(count) * (owner + 1) / size);
      std::atomic<int>& taken = team_.taken(parity, owner);
      for (;;) {
        if (k > 0 && begin + taken.load(std::memory_order_relaxed) >= end) break;
        const int i = begin + taken.fetch_add(1, std::memory_order_relaxed);
        if (i >= end) break;
        task(i);
      }
    }
    finish(parity);
  }

 private:
  void finish(int parity);
  Team& team_;
  const int id_;
  uint32_t phase_ = 0;
};

}  // namespace phloem
