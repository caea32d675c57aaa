// Shared by the kernels of this folder. NVRTC compiles this text and that of one .cu file together, without CUDA's headers; the C++
// compiler compiles all of them after emulate.h, for tests on the CPU.
//
// Rules for kernels, which the emulation needs and checks: every thread of a block makes the same calls of `__syncthreads`, `of_lane` and
// `over_block`; a block's memory is fixed, and declared by SHARED; packs lie at multiples of their size. Results do not depend on the order
// in which threads run: no atomics.

#ifndef TCH_EXT_EMULATED
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
// `count` values that the threads of a block share, of no value at its start.
#define SHARED(type, name, count) __shared__ type name[count]
#define CHECK_ALIGNED(address, bytes)
typedef long long int64;
typedef unsigned long long uint64;
#endif

struct bf16 {
  unsigned short bits;
};

DEVICE float infinity() { return __uint_as_float(0x7f800000u); }

DEVICE float wide(float x) { return x; }
DEVICE float wide(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

// Rounds to the nearest, to even in the middle, as libtorch does.
DEVICE void round_to(float x, float& out) { out = x; }
DEVICE void round_to(float x, bf16& out) {
  const unsigned bits = __float_as_uint(x);
  out.bits = x != x ? 0x7fc0 : static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// N numbers that are read and written at once, of at most 16 bytes in one access.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T of[N];
};

template <typename T, int N>
DEVICE Pack<T, N> load(const T* from) {
  CHECK_ALIGNED(from, alignof(Pack<T, N>));
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <typename T, int N>
DEVICE void store(T* to, const Pack<T, N>& pack) {
  CHECK_ALIGNED(to, alignof(Pack<T, N>));
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// `x` of another lane of the warp.
template <typename T>
DEVICE T of_lane(T x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

DEVICE int own_lane() { return threadIdx.x % 32; }

struct Add {
  template <typename T>
  DEVICE_MEMBER T operator()(T a, T b) const {
    return a + b;
  }
  template <typename T>
  DEVICE_MEMBER T other(T x, int lane) const {
    return of_lane(x, lane);
  }
};

struct Largest {
  DEVICE_MEMBER float operator()(float a, float b) const { return fmaxf(a, b); }
  DEVICE_MEMBER float other(float x, int lane) const { return of_lane(x, lane); }
};

// The combination of all threads' values, the same in each of them, in a fixed order.
template <int THREADS, typename V, typename Combine>
DEVICE V over_block(V value, Combine combine) {
  SHARED(V, parts, THREADS / 32);
  for (int step = 16; step > 0; step /= 2) value = combine(value, combine.other(value, own_lane() ^ step));
  if (own_lane() == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  V all = parts[0];
  for (int warp = 1; warp < THREADS / 32; warp++) all = combine(all, parts[warp]);
  __syncthreads();
  return all;
}
