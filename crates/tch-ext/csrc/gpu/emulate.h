// What CUDA gives to kernels, for one processor: the same sources compile as plain C++, and their numbers can be tested without a GPU.
//
// The threads of a block are fibers of one thread, which run one after another from barrier to barrier; blocks run one after another. Every
// call that exchanges values is a barrier of the whole block, so a kernel in which some threads of a block make another number of them
// than others is found: it throws.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define TCH_EXT_EMULATED 1
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define KERNEL(threads) static void
#define __shared__ static

namespace tch_ext::gpu::emulated {

typedef long long int64;
typedef unsigned long long uint64;

struct Index {
  unsigned x, y, z;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;

// Ends when all threads of the block have called it.
void __syncthreads();

// Memory for one value of each thread of the block.
void* place_of(unsigned thread);

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  static_assert(sizeof(T) <= 16);
  const unsigned own = threadIdx.x;
  std::memcpy(place_of(own), &value, sizeof value);
  __syncthreads();
  std::memcpy(&value, place_of(own / 32 * 32 + lane % 32), sizeof value);
  __syncthreads();
  return value;
}

inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

}  // namespace tch_ext::gpu::emulated
