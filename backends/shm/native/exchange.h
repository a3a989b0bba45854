// Passes each rank's heap to its peers over a Unix socket that only the same user may use.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

#include "heap.h"

namespace ubep {

struct Peer {
    Fd heap;
    Fd process;  // pidfd, where the kernel can make one
    pid_t pid = 0;
};

class Exchange {
  public:
    // Starts to listen on an abstract address, which leaves nothing on disk.
    explicit Exchange(int backlog);

    // What peers need to reach this rank; to be sent to them over the bootstrap.
    const std::string& address() const { return address_; }
    const std::string& secret() const { return secret_; }

    // Collective: send the own heap to every peer, and take theirs. Raises std::runtime_error.
    std::vector<Peer> swap(int rank, int own_heap, const std::vector<std::string>& addresses,
                           const std::vector<std::string>& secrets, double timeout_s);

  private:
    Fd listener_;
    std::string address_;
    std::string secret_;
};

}  // namespace ubep
