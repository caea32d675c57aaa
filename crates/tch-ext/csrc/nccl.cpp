// The part of the process groups that needs CUDA's and NCCL's headers. With graph.cpp it is a library of its own, which
// scripts/cuda.sh compiles and which is loaded after libtorch_cuda.
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "groups.h"

// Identifies the library's sources and the libtorch that it was compiled for: scripts/cuda.sh looks for it in the library.
extern "C" {
extern const char tch_ext_cuda_key[];
const char tch_ext_cuda_key[] = TCH_EXT_CUDA_KEY;
}

extern "C" c10::intrusive_ptr<c10d::Backend> tch_ext_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                                   int size, int device, int64_t timeout_ms) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = std::chrono::milliseconds(timeout_ms);
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, std::move(options));
  backend->setBoundDeviceId(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device)));
  return backend;
}
