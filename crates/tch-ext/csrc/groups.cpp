// Process groups: torch's c10d from C++. The store is torch's TCPStore; collectives are Gloo's, or NCCL's through a library
// that is loaded on request (nccl.cpp).
#include <chrono>
#include <memory>
#include <string>
#include <vector>

// The wheel has c10d's headers but not gloo's, which they include. c10d's header uses only pointers to gloo's classes, except
// for two: build.rs puts empty files in the place of gloo's headers, and these declarations replace what is used of them.
namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport
namespace rendezvous {
class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) = 0;
};
}  // namespace rendezvous
}  // namespace gloo

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#undef USE_C10D_GLOO

#include <c10/util/Logging.h>
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "common.h"
#include "groups.h"

using namespace tch_ext;

namespace {

struct Group {
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Backend> backend;
};

// A collective in progress.
struct Pending {
  c10::intrusive_ptr<c10d::Work> work;
};

std::chrono::milliseconds millis(int64_t count) { return std::chrono::milliseconds(count); }

template <typename F>
char* start(Group* group, Pending** out, F&& collective) {
  return guard([&] {
    if (!group->backend) throw std::runtime_error("the group is disconnected");
    at::NoGradGuard no_grad;
    *out = new Pending{collective()};
  });
}

// libtorch logs a trace of twenty lines where a peer or the store goes away; the error itself is returned to the caller. The user's
// TORCH_CPP_LOG_LEVEL holds. It is not set here: other threads may read the environment meanwhile.
void silence_traces() {
  c10::initLogging();
  if (!std::getenv("TORCH_CPP_LOG_LEVEL")) FLAGS_caffe2_log_level = c10::GLOG_FATAL;
}

// Returns a socket that listens on the loopback interface alone, if `host` is its address: the store answers everyone who reaches it, and
// listens on every interface by itself. None for another host, or where the port is taken, which the store finds out.
std::optional<int> loopback_listener(const std::string& host, uint16_t port) {
  sockaddr_storage address{};
  socklen_t size;
  if (host == "127.0.0.1" || host == "localhost") {
    auto& v4 = reinterpret_cast<sockaddr_in&>(address);
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    size = sizeof(v4);
  } else if (host == "::1") {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    v6.sin6_addr = in6addr_loopback;
    size = sizeof(v6);
  } else {
    return std::nullopt;
  }
  const int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return std::nullopt;
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
  close(fd);
  return std::nullopt;
}

}  // namespace

extern "C" {

// Connects to the store, or serves it, and makes a Gloo group of all ranks.
char* tch_ext_group_new(const GroupSettings* settings, Group** out) {
  return guard([&] {
    silence_traces();
    c10d::TCPStoreOptions options;
    options.port = settings->port;
    options.isServer = settings->serves;
    options.numWorkers = settings->size;
    options.waitWorkers = false;
    options.multiTenant = true;
    options.timeout = millis(settings->rendezvous_ms);
    if (options.isServer) options.masterListenFd = loopback_listener(settings->host, settings->port);
    auto tcp = c10::make_intrusive<c10d::TCPStore>(settings->host, options);
    auto group = std::make_unique<Group>();
    group->store = c10::make_intrusive<c10d::PrefixStore>(settings->prefix, tcp);
    *out = group.release();
  });
}

// Makes the Gloo backend of a group whose ranks have all reached the store.
char* tch_ext_group_connect(Group* group, int rank, int size, int64_t timeout_ms) {
  return guard([&] {
    auto options = c10d::ProcessGroupGloo::Options::create_default(millis(timeout_ms));
    auto store = c10::make_intrusive<c10d::PrefixStore>("gloo", group->store);
    group->backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
  });
}

// Closes the connections to the other ranks, whose collectives then fail; the store stays open.
void tch_ext_group_disconnect(Group* group) { group->backend.reset(); }

// Makes a second group of the same ranks for tensors on GPU `device`, by the CUDA library at `path`.
char* tch_ext_group_nccl(Group* group, const char* path, int rank, int size, int device, int64_t timeout_ms, Group** out) {
  return guard([&] {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(dlerror());
    auto make = reinterpret_cast<NcclFactory>(dlsym(library, NCCL_FACTORY));
    if (!make) throw std::runtime_error(dlerror());
    auto store = c10::make_intrusive<c10d::PrefixStore>("nccl", group->store);
    auto nccl = std::make_unique<Group>();
    nccl->store = store;
    nccl->backend = make(store, rank, size, device, timeout_ms);
    *out = nccl.release();
  });
}

void tch_ext_group_free(Group* group) { delete group; }

char* tch_ext_group_all_reduce(Group* group, const at::Tensor* tensor, bool max, Pending** out) {
  return start(group, out, [&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    return group->backend->allreduce(tensors, options);
  });
}

char* tch_ext_group_broadcast(Group* group, const at::Tensor* tensor, int64_t root, Pending** out) {
  return start(group, out, [&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return group->backend->broadcast(tensors, options);
  });
}

char* tch_ext_group_all_gather(Group* group, const at::Tensor* whole, const at::Tensor* part, Pending** out) {
  return start(group, out, [&] {
    at::Tensor to = *whole, from = *part;
    return group->backend->_allgather_base(to, from);
  });
}

char* tch_ext_group_reduce_scatter(Group* group, const at::Tensor* part, const at::Tensor* whole, Pending** out) {
  return start(group, out, [&] {
    at::Tensor to = *part, from = *whole;
    return group->backend->_reduce_scatter_base(to, from);
  });
}

char* tch_ext_group_barrier(Group* group, Pending** out) {
  return start(group, out, [&] { return group->backend->barrier(); });
}

// Waits for a collective: Gloo's until its result is there, NCCL's until the current stream waits for it. Frees `pending`.
char* tch_ext_pending_wait(Pending* pending) {
  std::unique_ptr<Pending> owned(pending);
  return guard([&] { owned->work->wait(); });
}

char* tch_ext_group_set(Group* group, const char* key, const uint8_t* value, size_t len) {
  return guard([&] { group->store->set(key, std::vector<uint8_t>(value, value + len)); });
}

// Sets `key` unless it has a value; `out` is the value that it has now, to be freed with `tch_ext_free`.
char* tch_ext_group_set_first(Group* group, const char* key, const char* value, char** out) {
  return guard([&] {
    std::string text = value;
    auto now = group->store->compareSet(key, std::vector<uint8_t>(), std::vector<uint8_t>(text.begin(), text.end()));
    *out = strndup(reinterpret_cast<const char*>(now.data()), now.size());
  });
}

// Waits for the key; `out` is to be freed with `tch_ext_free`.
char* tch_ext_group_get(Group* group, const char* key, int64_t timeout_ms, char** out) {
  return guard([&] {
    group->store->wait({key}, millis(timeout_ms));
    auto value = group->store->get(key);
    *out = strndup(reinterpret_cast<const char*>(value.data()), value.size());
  });
}

// Whether the key has a value.
char* tch_ext_group_has(Group* group, const char* key, bool* out) {
  return guard([&] { *out = group->store->check({key}); });
}

}  // extern "C"
