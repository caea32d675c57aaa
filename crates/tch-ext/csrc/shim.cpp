// The C++ half of tch-ext. Every function returns nullptr, or an error message that the caller frees with
// `tch_ext_free`: exceptions must not cross the FFI boundary.

#include <unistd.h>
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <dlfcn.h>
#include <link.h>
#include <malloc.h>

#include <climits>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "common.h"
#include "gpu/gpu.h"
#include "graph.h"

using namespace tch_ext;

namespace {

// Returns the folder of the libtorch_cpu.so in use.
std::string libtorch_folder() {
  std::string folder;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        std::string path = info->dlpi_name;
        auto slash = path.rfind("/libtorch_cpu.so");
        if (slash == std::string::npos) return 0;
        *static_cast<std::string*>(found) = path.substr(0, slash);
        return 1;
      },
      &folder);
  if (folder.empty()) throw std::runtime_error("libtorch_cpu.so is not among the loaded libraries");
  return folder;
}

// The functions of CUDA graphs once their library is loaded, and the linker's message if it cannot be.
const GraphFunctions* graphs = nullptr;
std::string graphs_error;

}  // namespace

extern "C" {

void tch_ext_free(char* message) { free(message); }

// Makes `grad` the tensor in which the gradient of the leaf `param` accumulates.
char* tch_ext_set_grad(const at::Tensor* param, const at::Tensor* grad) {
  return guard([&] { at::Tensor(*param).mutable_grad() = *grad; });
}

// Removes the gradient of the leaf `param`.
char* tch_ext_clear_grad(const at::Tensor* param) {
  return guard([&] { at::Tensor(*param).mutable_grad() = at::Tensor(); });
}

// Frees the memory of `tensor`'s storage, which all its views share, or allocates `bytes` for it, uninitialized. Tensors keep
// their shapes, and what autograd saved of them is valid again once the memory holds its old content.
char* tch_ext_resize_storage(const at::Tensor* tensor, size_t bytes) {
  return guard([&] {
    c10::StorageImpl* storage = tensor->storage().unsafeGetStorageImpl();
    // Allocators take the current device.
    const c10::DeviceGuard of_tensor(tensor->device());
    if (bytes == 0)
      storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor->device()));
    else
      storage->set_data_ptr_noswap(c10::GetAllocator(tensor->device().type())->allocate(bytes));
    storage->set_nbytes(bytes);
  });
}

// Number of bytes of `tensor`'s storage; 0 for a tensor that has none.
size_t tch_ext_storage_bytes(const at::Tensor* tensor) {
  return tensor->defined() && tensor->has_storage() ? tensor->storage().nbytes() : 0;
}

// Marks `param` as changed, where it was changed through another tensor on the same memory.
void tch_ext_bump_version(const at::Tensor* param) { param->unsafeGetTensorImpl()->bump_version(); }

// Returns freed memory that the allocator holds to the operating system.
void tch_ext_release_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// Returns in `out` the folder of the libtorch_cpu.so in use, to be freed with `tch_ext_free`.
char* tch_ext_libtorch_folder(char** out) {
  return guard([&] { *out = strdup(libtorch_folder().c_str()); });
}

// Has the allocator keep up to 2 GiB of freed memory at the end of the heap. By default it keeps twice as much as the largest
// mapped allocation that was freed so far.
void tch_ext_keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that it takes
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
#endif
}

// Has the allocator map allocations of 1 MiB or more one by one. By default the limit grows with what is freed, up to 32 MiB, and
// smaller allocations leave holes in the heap.
void tch_ext_map_large_allocations() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
}

// Loads libtorch_cuda.so from the folder of the libtorch_cpu.so in use, and checks that there is a driver. Symbols are
// loaded globally, as if the program had been linked with them.
char* tch_ext_load_cuda() {
  return guard([] {
    auto load = [](const std::string& library) {
      if (!dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(dlerror());
    };
    load(libtorch_folder() + "/libtorch_cuda.so");
    load("libcuda.so.1");
    // Without the CUDA library, which `make cuda` builds, there are no graphs.
    void* library = dlopen((libtorch_folder() + "/" + CUDA_LIBRARY).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library) graphs = static_cast<const GraphFunctions*>(dlsym(library, GRAPH_FUNCTIONS));
    if (!graphs) graphs_error = dlerror();
    if (library) gpu::functions = static_cast<const gpu::Functions*>(dlsym(library, gpu::FUNCTIONS));
    // cuDNN's attention, libtorch's first choice on newer GPUs, prepares a plan for each length, of which decoding has one per token.
    at::globalContext().setSDPUseCuDNN(false);
  });
}

// Free and all memory of a GPU in bytes.
char* tch_ext_gpu_memory(int number, size_t* free, size_t* total) {
  return guard([&] {
    std::tie(*free, *total) = c10::getDeviceAllocator(at::kCUDA)->getMemoryInfo(static_cast<c10::DeviceIndex>(number));
  });
}

// The linker's message if the CUDA library, with its graphs, could not be loaded; else null.
const char* tch_ext_graphs_error() { return graphs ? nullptr : graphs_error.c_str(); }

char* tch_ext_graph_begin(int device, void** out) { return graphs->begin(device, out); }

char* tch_ext_graph_end(void* graph, bool keep) { return graphs->end(graph, keep); }

char* tch_ext_graph_replay(void* graph) { return graphs->replay(graph); }

void tch_ext_graph_free(void* graph) { graphs->free(graph); }

// Exits without running destructors: libtorch's would free tables that other threads may still be using.
void tch_ext_exit_at_once(int code) { _exit(code); }

}  // extern "C"
