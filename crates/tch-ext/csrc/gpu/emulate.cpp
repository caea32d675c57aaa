// Runs the kernels of this folder on the processor, by fibers; for tests.
#include "emulate.h"

#include <ucontext.h>

#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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
#include "adam.cu"

constexpr size_t STACK = 128 << 10, MOST_THREADS = 1024, PLACE = 16;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool done;
};

struct Block {
  std::vector<Fiber> fibers{MOST_THREADS};
  ucontext_t scheduler;
  unsigned current;
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
  b.call(b.args);
  b.fibers[b.current].done = true;
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
  // Up and down in turn: a value that is read without a barrier after it was written is then an old one for some thread.
  bool up = true;
  for (unsigned left = threads; left != 0; up = !up) {
    unsigned ended = 0;
    for (unsigned i = 0; i < threads; i++) {
      const unsigned t = up ? i : threads - 1 - i;
      if (b.fibers[t].done) continue;
      b.current = t;
      threadIdx = {t, 0, 0};
      swapcontext(&b.scheduler, &b.fibers[t].context);
      ended += b.fibers[t].done;
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

void* place_of(unsigned thread) { return block().places + thread * PLACE; }

void run(Kernel kernel, const Grid& grid, void** args) {
  static std::mutex lock;
  const std::lock_guard<std::mutex> held(lock);
  if (grid.threads > MOST_THREADS) throw std::runtime_error("a block of too many threads");
  Block& b = block();
  b.call = calls[static_cast<size_t>(kernel)];
  b.args = args;
  blockDim = {grid.threads, 1, 1};
  gridDim = {grid.x, grid.y, 1};
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = 0; x < grid.x; x++) {
      blockIdx = {x, y, 0};
      run_block(grid.threads);
    }
}

}  // namespace tch_ext::gpu::emulated
