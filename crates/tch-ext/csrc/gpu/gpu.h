// Kernels for GPUs that are compiled when they are needed (device.cuh and the .cu files of this folder), from the side of the host:
// which there are, where they are used, and how they are started. The program does not need CUDA's headers for them; nvrtc.cpp, in the
// CUDA library, compiles, loads and starts them.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <initializer_list>
#include <optional>

#include "../kernels.h"

// Source and name of every kernel.
#define TCH_EXT_GPU_KERNELS(X)        \
  X(logits, logits_stats_f32)         \
  X(logits, logits_stats_f32_packed)  \
  X(logits, logits_stats_bf16)        \
  X(logits, logits_stats_bf16_packed) \
  X(logits, logits_gradient_f32)         \
  X(logits, logits_gradient_f32_packed)  \
  X(logits, logits_gradient_bf16)        \
  X(logits, logits_gradient_bf16_packed) \
  X(sample, logits_sample_f32)        \
  X(sample, logits_sample_bf16)       \
  X(rotary, rotate_f32_f32)           \
  X(rotary, rotate_f32_f32_packed)    \
  X(rotary, rotate_f32_bf16)          \
  X(rotary, rotate_f32_bf16_packed)   \
  X(rotary, rotate_bf16_f32)          \
  X(rotary, rotate_bf16_f32_packed)   \
  X(rotary, rotate_bf16_bf16)         \
  X(rotary, rotate_bf16_bf16_packed)  \
  X(rotary, rotate_cached_f32)        \
  X(rotary, rotate_cached_f32_packed) \
  X(rotary, rotate_cached_bf16)       \
  X(rotary, rotate_cached_bf16_packed) \
  X(norm, norm_f32)                   \
  X(norm, norm_bf16)                  \
  X(norm, sum_norm_f32)               \
  X(norm, sum_norm_bf16)              \
  X(norm, sum_norm_bf16_f32)          \
  X(norm, norm_gradient_f32)          \
  X(norm, norm_gradient_bf16)         \
  X(norm, norm_weight_gradient_f32)   \
  X(norm, norm_weight_gradient_bf16)  \
  X(norm, residual_f32)               \
  X(norm, residual_f32_packed)        \
  X(norm, residual_bf16)              \
  X(norm, residual_bf16_packed)       \
  X(gated, gated_f32)                 \
  X(gated, gated_f32_packed)          \
  X(gated, gated_bf16)                \
  X(gated, gated_bf16_packed)         \
  X(gated, gated_gradient_f32)        \
  X(gated, gated_gradient_f32_packed) \
  X(gated, gated_gradient_bf16)       \
  X(gated, gated_gradient_bf16_packed) \
  X(attend, attend_f32)               \
  X(attend, attend_combine_f32)       \
  X(attend, attend_bf16)              \
  X(attend, attend_combine_bf16)      \
  X(quantized, quantized_row_f32)     \
  X(quantized, quantized_rows_f32)    \
  X(quantized, quantized_row_bf16)    \
  X(quantized, quantized_rows_bf16)   \
  X(adam, adamw_rounded)              \
  X(adam, adamw_blocked)

namespace tch_ext::gpu {

#define TCH_EXT_GPU_NAME(source, name) name,
enum class Kernel { TCH_EXT_GPU_KERNELS(TCH_EXT_GPU_NAME) };
#undef TCH_EXT_GPU_NAME

// Blocks in two directions, each of `threads` threads.
struct Grid {
  unsigned x, y, threads;
};

// Blocks for `count` pieces of work of which a block has `per_block` at once; kernels that get fewer blocks go on with the next ones.
Grid grid_over(int64_t count, int64_t per_block);

// Whether the kernels compute tensors on the device of `x`: a GPU for which they are loaded, or, in a test, the processor.
bool takes(const at::Tensor& x);

// Queues a kernel on the stream of `like`'s device. `args` are the addresses of its arguments.
void launch(Kernel kernel, const Grid& grid, const at::Tensor& like, std::initializer_list<const void*> args);

void logits_stats(const at::Tensor& logits, float inv_temperature, const at::Tensor& targets, at::Tensor& logprobs,
                  at::Tensor& lse, const at::Tensor& entropy);
void logits_gradient(const at::Tensor& logits, float inv_temperature, const at::Tensor& targets, const at::Tensor& lse,
                     const at::Tensor& slopes, const at::Tensor& entropy, const at::Tensor& of_entropy);
// `draws` may be undefined. Returns tokens and their log-probabilities.
std::array<at::Tensor, 2> logits_sample(const at::Tensor& logits, float inv_temperature, const at::Tensor& draws);

// Whether `rotated` takes these.
bool rotates(const at::Tensor& x, at::ScalarType dtype);
at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t parts, bool back, at::ScalarType dtype);

// `q` [rows, heads, head_dim], `k` and `v` [rows, kv_heads, head_dim], of which only heads lie without gaps; caches [places, kv_heads *
// head_dim]; `places` [rows] i64. Rotates keys and writes them and values to their places; returns rotated queries. `cos` and `sin`
// [rows, half], or both undefined.
bool rotates_cached(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& keys);
at::Tensor rotate_cached(const std::array<at::Tensor, 3>& qkv, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& places,
                         const at::Tensor& keys, const at::Tensor& values);

struct NormOptions {
  double eps, offset;
  bool center;
};
// Output, means (undefined unless centred) and reciprocals of the deviations.
std::array<at::Tensor, 3> norm(const NormOptions& options, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                               at::ScalarType dtype);
// The residual stream x + a + b, `b` may be undefined, and as `norm` of it, in the dtype of the branches or in f32: the sum first.
std::array<at::Tensor, 4> sum_norm(const NormOptions& options, const at::Tensor& x, const at::Tensor& a, const at::Tensor& b,
                                   const at::Tensor& weight, const at::Tensor& bias, at::ScalarType dtype);
// The gradient of x, to which `of_sums` is added if it is defined; and in the dtype `branch`, f32 or bf16, if there is one.
std::array<at::Tensor, 2> norm_gradient(const NormOptions& options, const at::Tensor& of_out, const at::Tensor& of_sums,
                                        const at::Tensor& x, const at::Tensor& weight, const at::Tensor& means, const at::Tensor& rstds,
                                        std::optional<at::ScalarType> branch);
// The gradients of weight and, if `with_bias`, bias.
std::array<at::Tensor, 2> norm_weight_gradient(const NormOptions& options, const at::Tensor& of_out, const at::Tensor& x,
                                               const at::Tensor& means, const at::Tensor& rstds, bool with_bias);

bool adds(const at::Tensor& x, const at::Tensor& a, const at::Tensor& b);
at::Tensor residual(const at::Tensor& x, const at::Tensor& a, const at::Tensor& b);

at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, int64_t activation);
std::array<at::Tensor, 2> gated_gradient(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& of_out, int64_t activation);
// The same where gate and up are the halves of each row of `both` [rows, 2 * width].
at::Tensor gated_halves(const at::Tensor& both, int64_t activation);
at::Tensor gated_halves_gradient(const at::Tensor& both, const at::Tensor& of_out, int64_t activation);

// One new token per row: `q` [rows, heads, dim] and a cache of which each row has `capacity` places and `lengths` [rows] i64 tokens, the new
// one included, at most `longest`. `window` is 0 for none.
struct AttendOptions {
  int64_t capacity, longest, window;
  double scale;
};
at::Tensor attend(const AttendOptions& options, const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                  const at::Tensor& lengths);

// Whether a kernel computes the product of `rows` rows of `dtype` and a weight [out, in] in four bits, on the device of `like`: few rows, and
// packs of codes.
bool multiplies_quantized(const QuantizedMatrix& weight, const at::Tensor& like, int64_t rows, at::ScalarType dtype);
// `bias` may be undefined.
at::Tensor quantized_product(const QuantizedMatrix& weight, const at::Tensor& x, const at::Tensor& bias);

void adamw_rounded(const AdamWStep& step, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& first,
                   const at::Tensor& second, const uint64_t* keys);
void adamw_blocked(const AdamWStep& step, const at::Tensor& param, const at::Tensor& grad, const BlockedMoment& first,
                   const BlockedMoment& second);

// What the CUDA library does for the above; its variable of this type has the name FUNCTIONS. Each returns an error as `guard` does.
struct Functions {
  // The version of NVRTC, major * 1000 + minor, and the architecture of GPU `device`, such as 90.
  char* (*versions)(int device, int* nvrtc, int* arch);
  // Compiles `source` with `count` options to a binary, to be freed with `free`.
  char* (*compile)(const char* source, const char* name, const char* const* options, int count, char** binary, size_t* size);
  // Loads a binary, which may be freed afterwards, and returns it; for GPU `device` at once, for others when they use it.
  char* (*load)(const void* binary, int device, void** library);
  char* (*find)(void* library, const char* kernel, void** found);
  char* (*launch)(void* kernel, unsigned x, unsigned y, unsigned threads, int device, void** args);
};
// Its number changes with the functions: a library that was built before has another.
constexpr const char* FUNCTIONS = "tch_ext_gpu_functions_2";
// Set when the CUDA library is loaded.
extern const Functions* functions;

namespace emulated {
void run(Kernel kernel, const Grid& grid, void** args);
// An order of emulate.h, by its number.
void set_order(int order);
}

}  // namespace tch_ext::gpu
