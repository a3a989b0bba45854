#include "team.h"

#include <signal.h>

namespace ubep {

Team::Team(int workers) {
    // Signals are for the interpreter's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int worker = 1; worker < workers; worker++) threads_.emplace_back([this, worker] { serve(worker); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Team::~Team() {
    {
        std::lock_guard lock(mutex_);
        ending_ = true;
    }
    start_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Team::run_all(std::function<void(int)> job) {
    {
        std::lock_guard lock(mutex_);
        job_ = std::move(job);
        running_ = static_cast<int>(threads_.size());
        round_++;
    }
    start_.notify_all();
    job_(0);
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return running_ == 0; });
}

void Team::serve(int worker) {
    unsigned seen = 0;
    for (;;) {
        {
            std::unique_lock lock(mutex_);
            start_.wait(lock, [&] { return ending_ || round_ != seen; });
            if (ending_) return;
            seen = round_;
        }
        job_(worker);
        {
            std::lock_guard lock(mutex_);
            running_--;
        }
        finished_.notify_one();
    }
}

}  // namespace ubep
