// The threads of a step. Every member runs the same code, from phase to phase:
//
//   team.run(2, [&](Member& me) {
//     me.each(heads, [&](int head) { … });   // shared out; nobody goes on before all are done
//     me.each(blocks, [&](int block) { … });
//   });
//
// A phase's tasks are cut into one run a member, so that each reads a contiguous part of memory;
// who is done with his own takes over from the others. A phase is over when its tasks are done, not
// when everybody has come: a member that is off its core, because the server's other processes need
// it, is not waited for unless it holds a task, and catches up when it is back. Who has to wait
// spins for a moment, then sleeps.
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
  // Runs `job`, of at most `phases` phases, on every member, the calling thread being one; returns
  // when everybody has left it.
  void run(int phases, const std::function<void(Member&)>& job) {
    start(phases, job);
    settle();
  }
  // The same, but returns when all phases are over. A late member may be in the job still, though
  // without a task: the job and what it reads must not change before `settle`.
  void start(int phases, const std::function<void(Member&)>& job);
  void settle() const;

 private:
  friend class Member;
  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };
  // A number that only grows, to wait on.
  class alignas(64) Gate {
   public:
    void open();
    void wait_beyond(uint32_t seen);  // asleep
    uint32_t value() const { return value_.load(); }

   private:
    std::atomic<uint32_t> value_{0};
    std::atomic<int> asleep_{0};
  };

  void serve(int id);
  void wait_until_done(int phase, int count);
  // Of a phase: tasks taken of each member's run, and behind them the tasks that are done.
  std::atomic<int>& taken(int phase, int member) {
    return counters_[static_cast<size_t>(phase) * (size_ + 1) + member].value;
  }
  std::atomic<int>& done(int phase) { return taken(phase, size_); }

  const int size_;
  std::unique_ptr<Counter[]> counters_;
  int capacity_ = 0, used_ = 0;  // phases
  Gate over_, jobs_;
  const std::function<void(Member&)>* job_ = nullptr;
  std::atomic<bool> open_{false};             // the job may be entered
  alignas(64) std::atomic<int> inside_{0};    // members other than the caller that are in it
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

class Member {
 public:
  Member(Team& team, int id) : team_(team), id_(id) {}
  int id() const { return id_; }

  // Runs task(0) … task(count - 1), each once, over all members; then waits until all are done.
  template <class Task>
  void each(int count, Task&& task) {
    if (count == 0) return;
    const int size = team_.size_;
    if (size == 1) {
      for (int i = 0; i < count; i++) task(i);
      return;
    }
    const int phase = phase_++;
    int own = 0;
    for (int k = 0; k < size; k++) {
      const int owner = (id_ + k) % size;
      const int begin = first_task(count, owner), end = first_task(count, owner + 1);
      std::atomic<int>& taken = team_.taken(phase, owner);
      while (begin + taken.load(std::memory_order_relaxed) < end) {
        const int i = begin + taken.fetch_add(1);
        if (i >= end) break;
        task(i);
        own++;
      }
    }
    if (own && team_.done(phase).fetch_add(own) + own == count)
      team_.over_.open();
    else
      team_.wait_until_done(phase, count);
  }

  // Whether all of the `count` tasks of the next phase are taken already, by others: then what this
  // member would prepare for them, it need not.
  bool late(int count) const {
    if (team_.size_ == 1) return false;
    for (int owner = 0; owner < team_.size_; owner++) {
      const int taken = team_.taken(phase_, owner).load();
      if (first_task(count, owner) + taken < first_task(count, owner + 1)) return false;
    }
    return true;
  }

 private:
  friend class Team;
  // Of the run of `count` tasks that is a member's; the next member's begins where it ends.
  int first_task(int count, int member) const {
    return static_cast<int>(static_cast<int64_t>(count) * member / team_.size_);
  }
  Team& team_;
  const int id_;
  int phase_ = 0;
};

}  // namespace phloem
