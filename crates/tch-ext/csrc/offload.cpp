// Files without a name that hold the memory of tensors, mapped into the process.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "common.h"

using namespace tch_ext;

namespace {

// Bytes that are compared with zeros at once; no page of any system is smaller.
constexpr size_t CHUNK = 4096;

// Bytes of a page: what is advised and written begins at one.
size_t page() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

[[noreturn]] void fail(const char* action, int error) {
  throw std::runtime_error(std::string(action) + ": " + std::strerror(error));
}

// A file that no folder lists, so that the operating system removes it with its last user, however that one ends.
struct File {
  int fd = -1;
  char* data = nullptr;
  size_t bytes = 0;

  File(const char* folder, size_t bytes) : bytes(bytes) {
    fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) {
      // The file system cannot make a file without a name.
      std::string name = std::string(folder) + "/.rlhf-offload-XXXXXX";
      fd = mkostemp(name.data(), O_CLOEXEC);
      if (fd < 0) fail("creating it", errno);
      unlink(name.c_str());
    }
    // The blocks are taken now: a store to a page of a sparse file on a full disk would end the process by SIGBUS.
    int error;
    do error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    while (error == EINTR);
    if (error != 0) {
      close(fd);
      fail("reserving its blocks", error);
    }
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) {
      error = errno;
      close(fd);
      fail("mapping it", error);
    }
    data = static_cast<char*>(mapped);
  }

  ~File() {
    munmap(data, bytes);
    close(fd);
  }

  File(const File&) = delete;
  File& operator=(const File&) = delete;
};

using Handle = std::shared_ptr<File>;

// Copies what is not zero: the pages of a new file are zeros, and stay free of memory until they are written.
void copy_to_zeros(char* to, const char* from, size_t bytes) {
  static const char zeros[CHUNK] = {};
  for (size_t at = 0; at < bytes; at += CHUNK) {
    size_t len = std::min(CHUNK, bytes - at);
    if (memcmp(from + at, zeros, len) != 0) memcpy(to + at, from + at, len);
  }
}

}  // namespace

extern "C" {

// Creates a file of `bytes` zeros in `folder`, to be freed with `tch_ext_file_free`.
char* tch_ext_file_new(Handle** out, const char* folder, size_t bytes) {
  return guard([&] { *out = new Handle(std::make_shared<File>(folder, bytes)); });
}

// Frees the handle; the file stays while a tensor has its memory there.
void tch_ext_file_free(Handle* file) { delete file; }

// Moves the memory of `tensor`, on the CPU, to the zeros at `offset`; every tensor on the same memory follows.
char* tch_ext_file_take(const Handle* file, const at::Tensor* tensor, size_t offset) {
  return guard([&] {
    c10::StorageImpl* storage = tensor->storage().unsafeGetStorageImpl();
    size_t bytes = storage->nbytes();
    if (!tensor->device().is_cpu()) throw std::runtime_error("offload: expected a tensor on the CPU");
    if (offset + bytes > (*file)->bytes) throw std::runtime_error("offload: the file is too small");
    char* to = (*file)->data + offset;
    copy_to_zeros(to, static_cast<const char*>(storage->data()), bytes);
    auto owner = new Handle(*file);
    auto free = [](void* owner) { delete static_cast<Handle*>(owner); };
    storage->set_data_ptr_noswap(c10::DataPtr(to, owner, free, c10::Device(c10::kCPU)));
  });
}

// Writes the pages of a range to the disk and drops them from memory.
char* tch_ext_file_leave(const Handle* file, size_t from, size_t bytes) {
  return guard([&] {
    size_t start = from / page() * page();
    size_t len = std::min(from + bytes, (*file)->bytes) - start;
    char* data = (*file)->data + start;
    if (msync(data, len, MS_SYNC) != 0) fail("offload: writing to the disk", errno);
    // Of the process, and of the page cache; either may be refused, which costs memory only.
    madvise(data, len, MADV_DONTNEED);
    posix_fadvise((*file)->fd, static_cast<off_t>(start), static_cast<off_t>(len), POSIX_FADV_DONTNEED);
  });
}

// Starts to read a range.
void tch_ext_file_enter(const Handle* file, size_t from, size_t bytes) {
  size_t start = from / page() * page();
  madvise((*file)->data + start, std::min(from + bytes, (*file)->bytes) - start, MADV_WILLNEED);
}

// Returns a number that tensors on the same memory have in common.
size_t tch_ext_memory_id(const at::Tensor* tensor) {
  const bool stored = tensor->defined() && tensor->has_storage();
  return stored ? reinterpret_cast<size_t>(tensor->storage().unsafeGetStorageImpl()) : 0;
}

// Returns the whole memory of `tensor` as bytes.
char* tch_ext_memory_of(at::Tensor** out, const at::Tensor* tensor) {
  return guard([&] {
    c10::NoGradGuard no_grad;
    at::Tensor bytes = at::empty({0}, tensor->options().dtype(at::kByte).requires_grad(false));
    bytes.set_(tensor->storage(), 0, {static_cast<int64_t>(tensor->storage().nbytes())}, {1});
    *out = new at::Tensor(bytes);
  });
}

}  // extern "C"
