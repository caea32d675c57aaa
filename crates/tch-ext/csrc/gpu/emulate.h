// What CUDA gives to kernels, for one processor: the same sources compile as plain C++, and their numbers can be tested without a GPU.
//
// The threads of a block are fibers of one thread, which run one after another from barrier to barrier; blocks run one after another. Every
// call that exchanges values is a barrier of the whole block, so a kernel in which some threads of a block make another number of them
// than others is found: it throws. So does a pack that lies between multiples of its size. A missing barrier shows in the numbers: the
// threads run in orders that a test chooses (Order), and the memory of a block begins with numbers that are none.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define TCH_EXT_EMULATED 1
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define KERNEL(threads) static void
#define SHARED(type, name, count) \
  static type name[count];        \
  static const SharedMemory of_##name(name, sizeof name)
#define CHECK_ALIGNED(address, bytes) check_aligned(address, bytes)

namespace tch_ext::gpu::emulated {

typedef long long int64;
typedef unsigned long long uint64;

struct Index {
  unsigned x, y, z;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;

// The order in which the threads of a block run from one barrier to the next.
enum class Order {
  // Upwards, then downwards, in turn.
  UP_AND_DOWN = 1,
  DOWN = 2,
  // Another one each time, from a fixed seed.
  SHUFFLED = 3,
};

// Memory of a block, which is filled with ones before each block: as floating-point numbers these are none.
struct SharedMemory {
  SharedMemory(void* start, size_t bytes);
};

// Throws if a pack of `bytes` does not lie at a multiple of them.
void check_aligned(const void* address, size_t bytes);

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
