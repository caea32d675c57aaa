// The kernels that libtorch has no equal of on the CPU: raw memory in, raw memory out. `kernels.cpp` is compiled once
// for each instruction set and `kernels()` chooses, as libtorch does for its own.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace tch_ext {

// Several sequences packed one after another: row r has the tokens starts[r] to starts[r + 1].
struct Packed {
  const int64_t* starts;
  int64_t rows;
};

// Where heads lie: that of token n and head h begins at data + n * token + h * head, in elements.
template <typename T>
struct Heads {
  T* data;
  int64_t token;
  int64_t head;

  T* at(int64_t n, int64_t h) const { return data + n * token + h * head; }
};

// Rotary angles, [tokens, half] each: dimension i turns with i + half. Null: nothing turns.
struct Rotation {
  const float* cos;
  const float* sin;
  int64_t half;
};

struct AttentionShape {
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  float scale;
  float softcap;   // 0: none
  int64_t window;  // how many tokens, itself included, a token sees; 0: all
  bool causal;
};

// Keys (turned) and values of the tokens before, [rows, capacity, kv_heads * head_dim] each.
template <typename T>
struct Cache {
  T* keys;
  T* values;
  int64_t capacity;
};

// T is float or c10::BFloat16; sums are float.
template <typename T>
struct AttentionKernels {
  // Gives `out` [tokens, heads * head_dim] and the logarithms of the softmax's sums, `lse` [tokens, heads]; stores keys
  // and values at the beginning of the cache's rows where there is one.
  void (*forward)(const AttentionShape&, Packed, Heads<const T> q, Heads<const T> k, Heads<const T> v, Rotation, T* out,
                  float* lse, Cache<T>);
  void (*backward)(const AttentionShape&, Packed, Heads<const T> q, Heads<const T> k, Heads<const T> v, Rotation,
                   const T* out, const float* lse, const T* d_out, Heads<T> dq, Heads<T> dk, Heads<T> dv);
  // One more token per row, behind the `lens[r]` that the cache holds; it is stored there.
  void (*step)(const AttentionShape&, int64_t rows, const int64_t* lens, Heads<const T> q, Heads<const T> k,
               Heads<const T> v, Rotation, T* out, Cache<T>);
};

// Norms over rows of `width` floats; with `center` a layer norm, without an RMS norm. Weights are `weight + offset`.
struct NormShape {
  int64_t rows;
  int64_t width;
  double eps;
  bool center;
  float offset;
};

template <typename T>
struct NormKernels {
  // `bias` may be null. `stats` [rows, 2]: mean and 1 / deviation; null where no gradient is wanted.
  void (*forward)(const NormShape&, const float* x, const float* weight, const float* bias, T* out, float* stats);
  // `d_weight`, `d_bias` [width] are added to; each may be null.
  void (*backward)(const NormShape&, const float* x, const float* weight, const float* stats, const T* d_out, float* dx,
                   float* d_weight, float* d_bias);
};

template <typename T>
struct LogitsKernels {
  // Of each row of `logits` [rows, vocab], times `inv_temperature`: log-probability of the target, logarithm of the
  // softmax's sum, entropy (which may be null).
  void (*stats)(int64_t rows, int64_t vocab, const T* logits, float inv_temperature, const int64_t* targets,
                float* logprobs, float* lse, float* entropy);
  // Turns logits into the gradient of sum(coefficients * logprobs) + sum(of_entropy * entropy). The last two may be null,
  // both of them.
  void (*gradient)(int64_t rows, int64_t vocab, T* logits, float inv_temperature, const int64_t* targets,
                   const float* lse, const float* coefficients, const float* entropy, const float* of_entropy);
  // Draws one token per row by the inverse of the cumulative distribution at `draws` (0 to 1); `draws` null: the
  // likeliest. A row whose logits are not finite gives a log-probability that is not.
  void (*sample)(int64_t rows, int64_t vocab, const T* logits, float inv_temperature, const double* draws,
                 int64_t* tokens, float* logprobs);
};

// All kernels for activations of one dtype.
template <typename T>
struct KernelsOf {
  AttentionKernels<T> attention;
  NormKernels<T> norm;
  LogitsKernels<T> logits;
  // A linear layer's `out` [rows, width] of `x` [rows, depth], `weight` [width, depth] and `bias` [width], which may be
  // null; for rows so few that reading the weights is what takes time. Null where vectors are plain loops: they would
  // take longer.
  void (*few_rows)(int64_t rows, int64_t depth, int64_t width, const T* x, const T* weight, const T* bias, T* out);
  // out = x + a + b, of `n` numbers each; `b` may be null, and `out` be `x`.
  void (*sum)(int64_t n, const float* x, const T* a, const T* b, float* out);
};

struct Kernels {
  KernelsOf<float> f32;
  KernelsOf<c10::BFloat16> bf16;

  template <typename T>
  const KernelsOf<T>& of() const;
};

template <>
inline const KernelsOf<float>& Kernels::of<float>() const {
  return f32;
}
template <>
inline const KernelsOf<c10::BFloat16>& Kernels::of<c10::BFloat16>() const {
  return bf16;
}

// Those for the instruction set that libtorch itself has chosen (ATEN_CPU_CAPABILITY overrides it).
const Kernels& kernels();

}  // namespace tch_ext
