// The worker threads of one rank. A team of one runs everything in the caller's thread.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ubep {

class Team {
  public:
    explicit Team(int workers);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return static_cast<int>(threads_.size()) + 1; }

    // job(worker) on every worker, the caller being worker 0; returns when all have returned.
    template <class Job>
    void run(Job&& job) {
        if (threads_.empty()) {
            job(0);
        } else {
            run_all(std::forward<Job>(job));
        }
    }

  private:
    void run_all(std::function<void(int)> job);
    void serve(int worker);

    std::mutex mutex_;
    std::condition_variable start_, finished_;
    std::function<void(int)> job_;
    unsigned round_ = 0;
    int running_ = 0;
    bool ending_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace ubep
