// CPU kernels that libtorch lacks, on raw memory. `kernels.cpp` is compiled once per instruction set, and `kernels()`
// selects one at run time, as libtorch does for its own kernels.
#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>

namespace tch_ext {

// Packed sequences: row r has the tokens starts[r] to starts[r + 1].
struct Packed {
  const int64_t* starts;
  int64_t rows;
};

// Strided heads: head h of token n starts at data + n * token + h * head, in elements.
template <typename T>
struct Heads {
  T* data;
  int64_t token;
  int64_t head;

  T* at(int64_t n, int64_t h) const { return data + n * token + h * head; }
};

// Rotary embedding, [tokens, half] each: dimension i is rotated with dimension i + half. Null: no rotation.
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
  int64_t window;  // number of tokens that a token attends to, itself included; 0: all
  bool causal;
};

// Rotated keys and values of earlier tokens, [rows, capacity, kv_heads * head_dim] each.
template <typename T>
struct Cache {
  T* keys;
  T* values;
  int64_t capacity;
};

// T is float or c10::BFloat16; sums are float.
template <typename T>
struct AttentionKernels {
  // Computes `out` [tokens, heads * head_dim] and the log-sum-exp of the scores, `lse` [tokens, heads]. Stores keys and
  // values at the start of the cache's rows if there is a cache.
  void (*forward)(const AttentionShape&, Packed, Heads<const T> q, Heads<const T> k, Heads<const T> v, Rotation, T* out,
                  float* lse, Cache<T>);
  void (*backward)(const AttentionShape&, Packed, Heads<const T> q, Heads<const T> k, Heads<const T> v, Rotation,
                   const T* out, const float* lse, const T* d_out, Heads<T> dq, Heads<T> dk, Heads<T> dv);
  // One new token per row, after the `lens[r]` tokens in the cache; its key and value are stored there.
  void (*step)(const AttentionShape&, int64_t rows, const int64_t* lens, Heads<const T> q, Heads<const T> k,
               Heads<const T> v, Rotation, T* out, Cache<T>);
};

// Normalization of rows of `width` floats: layer norm with `center`, else RMS norm. The scale is `weight + offset`.
struct NormShape {
  int64_t rows;
  int64_t width;
  double eps;
  bool center;
  float offset;
};

template <typename T>
struct NormKernels {
  // `bias` may be null. `stats` [rows, 2]: mean and 1 / standard deviation; null if no gradient is needed.
  void (*forward)(const NormShape&, const float* x, const float* weight, const float* bias, T* out, float* stats);
  // Gradients are added to `d_weight` and `d_bias` [width]; each may be null.
  void (*backward)(const NormShape&, const float* x, const float* weight, const float* stats, const T* d_out, float* dx,
                   float* d_weight, float* d_bias);
};

template <typename T>
struct LogitsKernels {
  // For each row of `logits` [rows, vocab] times `inv_temperature`: log-probability of the target, log-sum-exp, and
  // entropy, which may be null.
  void (*stats)(int64_t rows, int64_t vocab, const T* logits, float inv_temperature, const int64_t* targets,
                float* logprobs, float* lse, float* entropy);
  // Replaces logits by the gradient of sum(coefficients * logprobs) + sum(of_entropy * entropy). The last two arguments
  // may both be null.
  void (*gradient)(int64_t rows, int64_t vocab, T* logits, float inv_temperature, const int64_t* targets,
                   const float* lse, const float* coefficients, const float* entropy, const float* of_entropy);
  // Samples one token per row by the inverse of the cumulative distribution at `draws`, in [0, 1); the most likely
  // token if `draws` is null. The log-probability is not finite if the row's logits are not.
  void (*sample)(int64_t rows, int64_t vocab, const T* logits, float inv_temperature, const double* draws,
                 int64_t* tokens, float* logprobs);
};

// A quantized matrix [out, in], row after row. Four bits: two codes to a byte, the first in the high bits; the value of a code is
// its entry in `map` times the scale of its block. Eight bits: the code times the scale of its row.
struct QuantizedMatrix {
  int64_t out;
  int64_t in;
  const uint8_t* codes;
  const float* map;        // [16]; null: eight bits
  const float* scales;     // of each block of `block` values, or of each row; null if they are quantized too:
  const uint8_t* nested;   // codes of the scales, in `nested_map` [256]
  const float* nested_map;
  const float* nested_scales;  // of each block of `nested_block` scales
  float offset;                // added to the scales
  int64_t block;
  int64_t nested_block;

  bool four_bits() const { return map != nullptr; }
};

// A part of a matrix: some columns of some rows.
struct Part {
  int64_t row, rows;
  int64_t col, cols;
};

// Packed rows that may continue others: row r has the tokens starts[r] to starts[r + 1], after all those of row parents[r], which comes before it; of
// a row that starts from nothing it is -1. Tree t has the rows trees[t] to trees[t + 1]: one that starts from nothing, and those that continue it.
struct Branches {
  const int64_t* starts;
  const int64_t* parents;
  const int64_t* slots;  // [rows]: number of a row, in its tree, among those that others continue, or -1
  int64_t rows;
  const int64_t* trees;
  int64_t num_trees;

  int64_t tokens(int64_t row) const { return starts[row + 1] - starts[row]; }

  // The number of rows of a tree that others continue.
  int64_t slots_of(int64_t tree) const {
    int64_t count = 0;
    for (int64_t r = trees[tree]; r < trees[tree + 1]; r++) count = std::max(count, slots[r] + 1);
    return count;
  }
};

// Convolutions of each channel over the last `kernel` tokens; weights are [width, kernel].
struct ConvShape {
  int64_t width;
  int64_t kernel;
};

// Sizes of a layer with the gated delta rule. A row of queries, keys and values has the heads of each in turn.
struct DeltaShape {
  int64_t key_heads;
  int64_t value_heads;
  int64_t key_dim;
  int64_t value_dim;
};

template <typename T>
struct ConvKernels {
  // out = c * (bias + convolution of b * v), for x = [b, c, v] of `width` channels each; `bias` may be null.
  void (*gated)(const ConvShape&, const Branches&, const T* x, const float* weight, const float* bias, T* out);
  // Gradients are added to `d_weight` and `d_bias`; each may be null.
  void (*gated_back)(const ConvShape&, const Branches&, const T* x, const float* weight, const float* bias, const T* d_out,
                     T* dx, float* d_weight, float* d_bias);
  // out = s * sigmoid(s) of the convolution s of x.
  void (*silu)(const ConvShape&, const Branches&, const T* x, const float* weight, float* out);
  void (*silu_back)(const ConvShape&, const Branches&, const T* x, const float* weight, const float* d_out, T* dx,
                    float* d_weight);
};

// Queries and keys are divided by their lengths, queries also by the root of their width; `g` are the logarithms of decays, and `beta` the
// strengths, [tokens, value heads] each.
struct DeltaKernels {
  // `start` and `end`, which may be null, are the states [rows, value heads, key width, value width] before and after. Rows that continue others
  // have no `start`.
  void (*forward)(const DeltaShape&, const Branches&, const float* x, const float* g, const float* beta, const float* start,
                  float* out, float* end);
  // From states of zeros.
  void (*backward)(const DeltaShape&, const Branches&, const float* x, const float* g, const float* beta,
                   const float* d_out, float* dx, float* d_g, float* d_beta);
  // One token per row; `active` [rows], which may be null, is 1 for rows whose state changes.
  void (*step)(const DeltaShape&, int64_t rows, const float* x, const float* g, const float* beta, const float* active,
               float* states, float* out);
};

// Rows of two matrices, whose numbers lie next to each other: activation(gate) * up. Row r of the gates starts at gate + r * gate_row.
struct GatedShape {
  int64_t rows, width;
  int64_t gate_row, up_row;
  int64_t activation;
};

template <typename T>
struct GatedKernels {
  // `out` is [rows, width].
  void (*forward)(const GatedShape&, const T* gate, const T* up, T* out);
  // The gradients of both are [rows, width] too.
  void (*backward)(const GatedShape&, const T* gate, const T* up, const T* d_out, T* d_gate, T* d_up);
};

// All kernels for activations of one dtype.
template <typename T>
struct KernelsOf {
  AttentionKernels<T> attention;
  NormKernels<T> norm;
  LogitsKernels<T> logits;
  // Linear layer for few rows, where the time is that of reading the weights: `out` [rows, width] of `x` [rows, depth],
  // `weight` [width, depth] and `bias` [width], which may be null. Null without vector instructions, where it would be
  // slower.
  void (*few_rows)(int64_t rows, int64_t depth, int64_t width, const T* x, const T* weight, const T* bias, T* out);
  // The values of a part, [rows, cols], rounded once.
  void (*dequantize)(const QuantizedMatrix&, Part, T* out);
  // As `few_rows`, from the codes; with the same sums as of the rounded values. `in` is a multiple of 16. Null as there.
  void (*few_rows_quantized)(const QuantizedMatrix&, int64_t rows, const T* x, const T* bias, T* out);
  // out = x + a + b, of `n` elements each; `b` may be null, and `out` may be `x`.
  void (*sum)(int64_t n, const float* x, const T* a, const T* b, float* out);
  ConvKernels<T> conv;
  GatedKernels<T> gated;
};

// A step of AdamW.
struct AdamWStep {
  float decay;  // factor of the weight
  float beta1, first_weight;   // of the first moment, and of the gradient in it: 1 - beta1
  float beta2, second_weight;  // likewise
  float size;  // lr over the first moment's bias correction
  float root;  // square root of the second moment's bias correction
  float eps;
};

// A moment in 8 bits: the value of a code is its entry in `map` times the greatest magnitude of its block of BLOCK values.
struct BlockedMoment {
  static constexpr int64_t BLOCK = 256;
  uint8_t* codes;
  float* absmax;
  const float* map;             // [256], ascending
  const float* middles;         // [256], between neighbours of the map; the last is infinite
  const uint8_t* least_codes;   // [65536], of the least number with the same upper 16 bits
};

struct OptimizerKernels {
  void (*blocked)(const AdamWStep&, int64_t n, float* param, const float* grad, const BlockedMoment& first,
                  const BlockedMoment& second);
  // Computed in f32; parameter and moments are rounded stochastically by the words of three generators with these keys.
  void (*rounded)(const AdamWStep&, int64_t n, c10::BFloat16* param, const c10::BFloat16* grad, c10::BFloat16* first,
                  c10::BFloat16* second, const uint64_t* keys);
};

struct Kernels {
  KernelsOf<float> f32;
  KernelsOf<c10::BFloat16> bf16;
  OptimizerKernels adamw;
  DeltaKernels delta;

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

// The kernels for the instruction set that libtorch uses (ATEN_CPU_CAPABILITY overrides it).
const Kernels& kernels();

}  // namespace tch_ext
