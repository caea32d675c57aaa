// Runs the kernels of this folder on the processor, by fibers; for tests.
#include "emulate.h"

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../common.h"
#include "gpu.h"

namespace tch_ext::gpu::emulated {

Index threadIdx, blockIdx, blockDim, gridDim;

namespace {

#include "device.cuh"
#include "logits.cu"
#include "sample.cu"
#include "rotary.cu"
#include "norm.cu"
#include "gated.cu"
#include "attend.cu"
#include "quantized.cu"
#include "adam.cu"

constexpr size_t STACK = 128 << 10, MOST_THREADS = 1024, PLACE = 16;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool done;
};

// Of `run`, and of all kernels' shared memory.
std::atomic<Order> order{Order::UP_AND_DOWN};

std::vector<std::pair<void*, size_t>>& shared_memory() {
  static auto& all = *new std::vector<std::pair<void*, size_t>>;
  return all;
}

struct Block {
  std::vector<Fiber> fibers{MOST_THREADS};
  ucontext_t scheduler;
  unsigned current;
  // The turns of the threads until the next barrier.
  std::vector<unsigned> turns;
  std::mt19937 random{1};
  std::exception_ptr error;
  void (*call)(void**);
  void** args;
  alignas(16) char places[MOST_THREADS * PLACE];
};

Block& block() {
  static auto& one = *new Block;
  return one;
}

void body() {
  Block& b = block();
  // Nothing is above a fiber that could catch it.
  try {
    b.call(b.args);
  } catch (...) {
    b.error = std::current_exception();
  }
  b.fibers[b.current].done = true;
}

// Orders the turns of the threads; `segment` counts the barriers before them.
void take_turns(Block& b, unsigned segment) {
  const Order chosen = order;
  if (chosen == Order::SHUFFLED) {
    std::shuffle(b.turns.begin(), b.turns.end(), b.random);
    return;
  }
  std::iota(b.turns.begin(), b.turns.end(), 0);
  // Up and down in turn: a value that is read without a barrier after it was written is then an old one for some thread.
  if (chosen == Order::DOWN || segment % 2 == 1) std::reverse(b.turns.begin(), b.turns.end());
}

// Runs the threads of one block to their ends.
void run_block(unsigned threads) {
  Block& b = block();
  for (unsigned t = 0; t < threads; t++) {
    Fiber& fiber = b.fibers[t];
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = &b.scheduler;
    makecontext(&fiber.context, body, 0);
  }
  for (auto [start, bytes] : shared_memory()) std::memset(start, 0xff, bytes);
  b.error = nullptr;
  b.turns.resize(threads);
  std::iota(b.turns.begin(), b.turns.end(), 0);
  unsigned segment = 0;
  for (unsigned left = threads; left != 0; segment++) {
    take_turns(b, segment);
    unsigned ended = 0;
    for (const unsigned t : b.turns) {
      b.current = t;
      threadIdx = {t, 0, 0};
      swapcontext(&b.scheduler, &b.fibers[t].context);
      ended += b.fibers[t].done;
      // The other fibers stay where they are; they own nothing.
      if (b.error) std::rethrow_exception(b.error);
    }
    if (ended != 0 && ended != left) throw std::runtime_error("threads of a block have passed other numbers of barriers");
    left -= ended;
  }
}

template <typename... Args, size_t... I>
void call_with(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<Args*>(args[I])...);
}

template <auto KERNEL_FUNCTION, typename... Args>
void call_of(void (*)(Args...), void** args) {
  call_with(KERNEL_FUNCTION, args, std::index_sequence_for<Args...>{});
}

template <auto KERNEL_FUNCTION>
void call(void** args) {
  call_of<KERNEL_FUNCTION>(KERNEL_FUNCTION, args);
}

// Kernels with a mistake each, by which a test sees that the emulation finds it.
void without_barrier(int* out) {
  SHARED(int, values, 64);
  values[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = values[63 - threadIdx.x];
}

void with_pack_apart(int* out) { store(out + 1, Pack<int, 4>{}); }

void with_barrier_of_half(int* out) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = 0;
}

#define ENTRY(source, name) call<&name>,
void (*const calls[])(void**) = {TCH_EXT_GPU_KERNELS(ENTRY)};
#undef ENTRY

}  // namespace

void __syncthreads() {
  Block& b = block();
  const unsigned own = b.current;
  swapcontext(&b.fibers[own].context, &b.scheduler);
  threadIdx = {own, 0, 0};
}

SharedMemory::SharedMemory(void* start, size_t bytes) {
  std::memset(start, 0xff, bytes);
  shared_memory().emplace_back(start, bytes);
}

void check_aligned(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
    throw std::runtime_error("a pack of " + std::to_string(bytes) + " bytes lies between multiples of them");
}

void set_order(int chosen) { order = static_cast<Order>(chosen); }

void* place_of(unsigned thread) { return block().places + thread * PLACE; }

void run_call(void (*call)(void**), const Grid& grid, void** args) {
  static std::mutex lock;
  const std::lock_guard<std::mutex> held(lock);
  if (grid.threads > MOST_THREADS) throw std::runtime_error("a block of too many threads");
  Block& b = block();
  b.call = call;
  b.args = args;
  blockDim = {grid.threads, 1, 1};
  gridDim = {grid.x, grid.y, 1};
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = 0; x < grid.x; x++) {
      blockIdx = {x, y, 0};
      run_block(grid.threads);
    }
}

void run(Kernel kernel, const Grid& grid, void** args) { run_call(calls[static_cast<size_t>(kernel)], grid, args); }

}  // namespace tch_ext::gpu::emulated

// Runs one of the kernels with a mistake, whose 64 threads run in this order: 0, without a barrier; 1, with a pack between multiples of its
// size; 2, with a barrier for a half of the threads. `out` has 64 numbers.
extern "C" char* tch_ext_gpu_mistake(int which, int order, int* out) {
  using namespace tch_ext::gpu::emulated;
  return tch_ext::guard([&] {
    set_order(order);
    void (*const mistakes[])(void**) = {call<&without_barrier>, call<&with_pack_apart>, call<&with_barrier_of_half>};
    void* args[] = {&out};
    run_call(mistakes[which], {1, 1, 64}, args);
  });
}
