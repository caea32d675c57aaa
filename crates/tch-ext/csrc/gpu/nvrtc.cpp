// Compiles, loads and starts kernels; a part of the CUDA library. NVRTC, which torch for CUDA has, is loaded when it is needed.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common.h"
#include "gpu.h"

namespace {

using tch_ext::guard;

// The part of NVRTC's interface that is used; its header is not among those of the runtime.
struct Nvrtc {
  using Program = void*;
  int (*version)(int*, int*);
  int (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*destroy)(Program*);
  int (*compile)(Program, int, const char* const*);
  int (*binary_size)(Program, size_t*);
  int (*binary)(Program, char*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  const char* (*text)(int);
};

template <typename F>
void find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function) throw std::runtime_error(dlerror());
}

const Nvrtc& nvrtc() {
  static const Nvrtc loaded = [] {
    const std::string name = "libnvrtc.so." + std::to_string(CUDART_VERSION / 1000);
    // It lies beside the runtime, which is loaded, whether or not the linker looks there.
    Dl_info runtime{};
    dladdr(reinterpret_cast<void*>(&cudaRuntimeGetVersion), &runtime);
    const std::string path = runtime.dli_fname ? runtime.dli_fname : "";
    void* library = dlopen((path.substr(0, path.rfind('/') + 1) + name).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(dlerror());
    Nvrtc n{};
    find(library, "nvrtcVersion", n.version);
    find(library, "nvrtcCreateProgram", n.create);
    find(library, "nvrtcDestroyProgram", n.destroy);
    find(library, "nvrtcCompileProgram", n.compile);
    find(library, "nvrtcGetCUBINSize", n.binary_size);
    find(library, "nvrtcGetCUBIN", n.binary);
    find(library, "nvrtcGetProgramLogSize", n.log_size);
    find(library, "nvrtcGetProgramLog", n.log);
    find(library, "nvrtcGetErrorString", n.text);
    return n;
  }();
  return loaded;
}

void check(int result) {
  if (result != 0) throw std::runtime_error(std::string("NVRTC: ") + nvrtc().text(result));
}

void check(cudaError_t result) {
  if (result == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(cudaGetErrorString(result));
}

char* versions(int device, int* version, int* arch) {
  return guard([&] {
    int major = 0, minor = 0;
    check(nvrtc().version(&major, &minor));
    *version = major * 1000 + minor;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    *arch = major * 10 + minor;
  });
}

char* compile(const char* source, const char* name, const char* const* options, int count, char** binary, size_t* size) {
  return guard([&] {
    Nvrtc::Program program = nullptr;
    check(nvrtc().create(&program, source, name, 0, nullptr, nullptr));
    const int result = nvrtc().compile(program, count, options);
    std::string log;
    if (result != 0) {
      size_t length = 0;
      nvrtc().log_size(program, &length);
      log.resize(length);
      nvrtc().log(program, log.data());
    } else {
      check(nvrtc().binary_size(program, size));
      *binary = static_cast<char*>(malloc(*size));
      check(nvrtc().binary(program, *binary));
    }
    nvrtc().destroy(&program);
    if (result != 0) throw std::runtime_error(std::string(nvrtc().text(result)) + ": " + log.substr(0, 2000));
  });
}

char* load(const void* binary, int device, void** library) {
  return guard([&] {
    // The context of another GPU would take memory there.
    const c10::cuda::CUDAGuard on(static_cast<c10::DeviceIndex>(device));
    cudaLibrary_t loaded = nullptr;
    check(cudaLibraryLoadData(&loaded, binary, nullptr, nullptr, 0, nullptr, nullptr, 0));
    *library = loaded;
  });
}

char* find_kernel(void* library, const char* name, void** found) {
  return guard([&] {
    cudaKernel_t kernel = nullptr;
    check(cudaLibraryGetKernel(&kernel, static_cast<cudaLibrary_t>(library), name));
    *found = kernel;
  });
}

char* launch(void* kernel, unsigned x, unsigned y, unsigned threads, int device, void** args) {
  return guard([&] {
    const auto number = static_cast<c10::DeviceIndex>(device);
    const c10::cuda::CUDAGuard on(number);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(x, y, 1);
    config.blockDim = dim3(threads, 1, 1);
    config.stream = c10::cuda::getCurrentCUDAStream(number).stream();
    check(cudaLaunchKernelExC(&config, kernel, args));
  });
}

}  // namespace

extern "C" {
extern const tch_ext::gpu::Functions tch_ext_gpu_functions_2;
const tch_ext::gpu::Functions tch_ext_gpu_functions_2{versions, compile, load, find_kernel, launch};
}
