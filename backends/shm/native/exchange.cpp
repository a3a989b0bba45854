#include "exchange.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>

#include "doorbell.h"

namespace ubep {

namespace {

constexpr size_t kSecretBytes = 16;

struct Hello {
    char secret[2 * kSecretBytes];
    int32_t rank;
};

[[noreturn]] void fail(const std::string& what) {
    throw std::runtime_error(what + ": " + std::strerror(errno));
}

std::string random_hex() {
    unsigned char bytes[kSecretBytes];
    if (getrandom(bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes)) fail("getrandom");
    std::string hex;
    for (unsigned char byte : bytes) {
        hex += "0123456789abcdef"[byte >> 4];
        hex += "0123456789abcdef"[byte & 15];
    }
    return hex;
}

socklen_t fill_address(sockaddr_un& where, const std::string& name) {
    where = {};
    where.sun_family = AF_UNIX;  // a leading zero byte makes the address abstract
    std::memcpy(where.sun_path + 1, name.data(), name.size());
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

ucred credentials(int socket) {
    ucred who{};
    socklen_t size = sizeof who;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) fail("SO_PEERCRED");
    return who;
}

void send_heap(int socket, const Hello& hello, int heap) {
    Hello copy = hello;
    iovec data{&copy, sizeof copy};
    alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &heap, sizeof heap);
    if (sendmsg(socket, &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof copy)) fail("sendmsg");
}

// The heap that came with a hello; none when the message isn't one.
Fd receive_heap(int socket, Hello& hello) {
    iovec data{&hello, sizeof hello};
    alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof hello)) return Fd();
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    if (head == nullptr || head->cmsg_type != SCM_RIGHTS) return Fd();
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(head), sizeof fd);
    return Fd(fd);
}

Fd open_process(pid_t pid) {
#ifdef SYS_pidfd_open
    return Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#else
    return Fd();
#endif
}

Fd connect_to(const std::string& name, int rank) {
    Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (!socket) fail("socket");
    sockaddr_un where;
    const socklen_t size = fill_address(where, name);
    if (connect(socket.get(), reinterpret_cast<sockaddr*>(&where), size) != 0) {
        fail("cannot reach rank " + std::to_string(rank) +
             " over its Unix socket (ranks must share one host and one network namespace)");
    }
    if (credentials(socket.get()).uid != geteuid()) {
        throw std::runtime_error("rank " + std::to_string(rank) + " belongs to another user");
    }
    return socket;
}

}  // namespace

Exchange::Exchange(int backlog)
    : listener_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)),
      address_("ubep-" + random_hex()),
      secret_(random_hex()) {
    if (!listener_) fail("socket");
    sockaddr_un where;
    const socklen_t size = fill_address(where, address_);
    if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&where), size) != 0) fail("bind");
    if (listen(listener_.get(), backlog) != 0) fail("listen");
}

std::vector<Peer> Exchange::swap(int rank, int own_heap, const std::vector<std::string>& addresses,
                                 const std::vector<std::string>& secrets, double timeout_s) {
    const int world = static_cast<int>(addresses.size());
    std::vector<Fd> sockets;  // open until every peer has had time to read
    for (int peer = 0; peer < world; peer++) {
        if (peer == rank) continue;
        Fd socket = connect_to(addresses[peer], peer);
        Hello hello{};
        std::memcpy(hello.secret, secrets[peer].data(), sizeof hello.secret);
        hello.rank = rank;
        send_heap(socket.get(), hello, own_heap);
        sockets.push_back(std::move(socket));
    }
    std::vector<Peer> peers(world);
    const int64_t end = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
    for (int missing = world - 1; missing > 0;) {
        pollfd ready{listener_.get(), POLLIN, 0};
        const int64_t left_ms = (end - now_ns()) / 1000000;
        if (left_ms <= 0 || poll(&ready, 1, static_cast<int>(left_ms)) == 0) {
            throw std::runtime_error(std::to_string(missing) + " ranks did not connect in time");
        }
        Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!socket) continue;
        const ucred who = credentials(socket.get());
        if (who.uid != geteuid()) continue;  // another user: not one of us
        const timeval patience{1, 0};  // nor may a stranger that says nothing hold us up
        setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        Hello hello{};
        Fd heap = receive_heap(socket.get(), hello);
        const bool known = heap && std::memcmp(hello.secret, secret_.data(), sizeof hello.secret) == 0;
        if (!known || hello.rank < 0 || hello.rank >= world || peers[hello.rank].heap) continue;
        peers[hello.rank].heap = std::move(heap);
        peers[hello.rank].pid = who.pid;
        if (who.pid > 0) peers[hello.rank].process = open_process(who.pid);
        missing--;
    }
    return peers;
}

}  // namespace ubep
