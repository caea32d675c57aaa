// The gated delta rule and short convolutions, as a part of kernels.cpp. Sums are float, and each sequence is computed alone: its numbers do
// not depend on the others.
#pragma once

// --- Short convolutions ---------------------------------------------------------------------------------------------

// Number of channels that a task computes: whole cache lines.
constexpr int64_t CHANNELS = 64;

Vec sigmoid(Vec x) { return Vec(1.f) / (Vec(1.f) + x.neg().exp()); }

// The channels `first` to `first + count` of the tokens of a row, [tokens, CHANNELS] each, after `pad` rows of zeros.
template <typename T>
void load_channels(const T* x, int64_t stride, int64_t tokens, int64_t count, int64_t pad, float* to) {
  clear(to, pad * CHANNELS);
  for (int64_t t = 0; t < tokens; t++) {
    float* row = to + (pad + t) * CHANNELS;
    load_row(x + t * stride, row, count);
    clear(row + count, CHANNELS - count);
  }
}

template <typename T>
void store_channels(const float* from, int64_t tokens, int64_t count, T* x, int64_t stride) {
  for (int64_t t = 0; t < tokens; t++) store_row(from + t * CHANNELS, x + t * stride, count);
}

// The weights of some channels by tap, [kernel, CHANNELS], from [width, kernel].
void load_taps(const float* weight, int64_t kernel, int64_t count, float* to) {
  clear(to, kernel * CHANNELS);
  for (int64_t c = 0; c < count; c++)
    for (int64_t k = 0; k < kernel; k++) to[k * CHANNELS + c] = weight[c * kernel + k];
}

// out[t] = bias + sum over k of taps[k] * x[t + k]; x has kernel - 1 rows before the first token.
void convolve(const float* x, const float* taps, int64_t kernel, const float* bias, int64_t tokens, float* out) {
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t c = 0; c < CHANNELS; c += W) {
      Vec sum = bias ? Vec::loadu(bias + c) : Vec(0.f);
      for (int64_t k = 0; k < kernel; k++)
        sum = at::vec::fmadd(Vec::loadu(x + (t + k) * CHANNELS + c), Vec::loadu(taps + k * CHANNELS + c), sum);
      sum.store(out + t * CHANNELS + c);
    }
}

template <typename F>
void for_channels(int64_t rows, const F& f) {
  for (int64_t i = 0; i < rows * CHANNELS; i += W) f(i);
}

int64_t channel_tasks(const ConvShape& shape) { return (shape.width + CHANNELS - 1) / CHANNELS; }

struct Channels {
  int64_t first, count;
  Channels(const ConvShape& shape, int64_t task)
      : first(task * CHANNELS), count(std::min(CHANNELS, shape.width - first)) {}
};

int64_t longest(const Branches& packed) {
  int64_t most = 0;
  for (int64_t r = 0; r < packed.rows; r++) most = std::max(most, packed.tokens(r));
  return most;
}

// The token `back` tokens before the first of row `r`, in the rows that it continues; -1 if there is none.
int64_t token_before(const Branches& packed, int64_t r, int64_t back) {
  for (int64_t row = packed.parents[r]; row >= 0; row = packed.parents[row]) {
    if (back <= packed.tokens(row)) return packed.starts[row + 1] - back;
    back -= packed.tokens(row);
  }
  return -1;
}

// Fills the `pad` rows before those of row `r`: the channels of the tokens that it continues, whose first is at `x`.
template <typename T>
void load_before(const Branches& packed, int64_t r, const T* x, int64_t stride, int64_t count, int64_t pad, float* to) {
  for (int64_t back = 1; back <= pad; back++) {
    const int64_t token = token_before(packed, r, back);
    if (token < 0) return;
    load_row(x + token * stride, to + (pad - back) * CHANNELS, count);
  }
}

void add_row(const float* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] += from[i];
}
void add_row(const float* from, c10::BFloat16* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = static_cast<c10::BFloat16>(static_cast<float>(to[i]) + from[i]);
}

// Bias of some channels, or null.
const float* load_bias(const float* bias, const Channels& of, float* to) {
  if (!bias) return nullptr;
  clear(to, CHANNELS);
  load_row(bias + of.first, to, of.count);
  return to;
}

// Rounds numbers to T, as a tensor between two operations has them: decoding stores the gated inputs in T.
template <typename T>
void round_to(float* x, int64_t count) {
  if constexpr (!std::is_same_v<T, float>) {
    for (int64_t i = 0; i < count; i++) x[i] = static_cast<float>(static_cast<T>(x[i]));
  }
}

template <typename T>
void conv_gated(const ConvShape& shape, const Branches& packed, const T* x, const float* weight, const float* bias, T* out) {
  const int64_t most = longest(packed), pad = shape.kernel - 1, wide = 3 * shape.width;
  for_each_task(channel_tasks(shape), [&](int64_t task) {
    const Channels of(shape, task);
    const int64_t rows = (most + pad) * CHANNELS;
    Scratch scratch{rows, rows, rows, shape.kernel * CHANNELS, CHANNELS};
    float *u = scratch.take(rows), *other = scratch.take(rows), *sum = scratch.take(rows);
    float *taps = scratch.take(shape.kernel * CHANNELS), *kept = scratch.take(CHANNELS);
    load_taps(weight + of.first * shape.kernel, shape.kernel, of.count, taps);
    const float* own_bias = load_bias(bias, of, kept);
    for (int64_t r = 0; r < packed.rows; r++) {
      const int64_t start = packed.starts[r], tokens = packed.tokens(r);
      const T* from = x + start * wide + of.first;
      load_channels(from, wide, tokens, of.count, pad, u);
      load_before(packed, r, x + of.first, wide, of.count, pad, u);
      load_channels(from + 2 * shape.width, wide, tokens, of.count, pad, other);
      load_before(packed, r, x + of.first + 2 * shape.width, wide, of.count, pad, other);
      for_channels(tokens + pad, [&](int64_t i) { (Vec::loadu(u + i) * Vec::loadu(other + i)).store(u + i); });
      round_to<T>(u, (tokens + pad) * CHANNELS);
      convolve(u, taps, shape.kernel, own_bias, tokens, sum);
      load_channels(from + shape.width, wide, tokens, of.count, 0, other);
      for_channels(tokens, [&](int64_t i) { (Vec::loadu(sum + i) * Vec::loadu(other + i)).store(sum + i); });
      store_channels(sum, tokens, of.count, out + start * shape.width + of.first, shape.width);
    }
  });
}

// The gradient `du` [CHANNELS] of the token `back` tokens before the first: as of the others in `convolve_back`.
void convolve_back_before(const float* ds, const float* taps, int64_t kernel, int64_t tokens, int64_t back, float* du) {
  clear(du, CHANNELS);
  for (int64_t k = back; k < kernel && k - back < tokens; k++)
    for (int64_t c = 0; c < CHANNELS; c += W)
      at::vec::fmadd(Vec::loadu(ds + (k - back) * CHANNELS + c), Vec::loadu(taps + (kernel - 1 - k) * CHANNELS + c),
                     Vec::loadu(du + c))
          .store(du + c);
}

// Calls f(token, back, du) for each token that row `r` continues and that its convolution reads, with its gradient from this row.
template <typename F>
void for_each_before(const Branches& packed, int64_t r, const float* ds, const float* taps, int64_t kernel, const F& f) {
  alignas(64) float du[CHANNELS];
  for (int64_t back = 1; back < kernel; back++) {
    const int64_t token = token_before(packed, r, back);
    if (token < 0) return;
    convolve_back_before(ds, taps, kernel, packed.tokens(r), back, du);
    f(token, back, du);
  }
}

// du[t] = sum over k of taps[kernel - 1 - k] * ds[t + k], where `ds` has kernel - 1 rows of zeros behind it; and the gradients of taps and
// bias, which are added.
void convolve_back(const float* u, float* ds, const float* taps, int64_t kernel, int64_t tokens, float* du,
                   float* d_taps, float* d_bias) {
  clear(ds + tokens * CHANNELS, (kernel - 1) * CHANNELS);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t c = 0; c < CHANNELS; c += W) {
      Vec sum(0.f);
      for (int64_t k = 0; k < kernel; k++)
        sum = at::vec::fmadd(Vec::loadu(ds + (t + k) * CHANNELS + c),
                             Vec::loadu(taps + (kernel - 1 - k) * CHANNELS + c), sum);
      sum.store(du + t * CHANNELS + c);
    }
  for (int64_t c = 0; c < CHANNELS; c += W) {
    for (int64_t k = 0; k < kernel; k++) {
      Vec sum = Vec::loadu(d_taps + k * CHANNELS + c);
      for (int64_t t = 0; t < tokens; t++)
        sum = at::vec::fmadd(Vec::loadu(ds + t * CHANNELS + c), Vec::loadu(u + (t + k) * CHANNELS + c), sum);
      sum.store(d_taps + k * CHANNELS + c);
    }
    Vec sum = Vec::loadu(d_bias + c);
    for (int64_t t = 0; t < tokens; t++) sum = sum + Vec::loadu(ds + t * CHANNELS + c);
    sum.store(d_bias + c);
  }
}

// Adds the gradients of taps, [kernel, CHANNELS], and of the bias to those of the parameters, which may be null.
void add_taps(const Channels& of, int64_t kernel, const float* d_taps, const float* d_bias, float* d_weight,
              float* d_own_bias) {
  for (int64_t c = 0; c < of.count; c++) {
    if (d_weight)
      for (int64_t k = 0; k < kernel; k++) d_weight[(of.first + c) * kernel + k] += d_taps[k * CHANNELS + c];
    if (d_own_bias) d_own_bias[of.first + c] += d_bias[c];
  }
}

template <typename T>
void conv_gated_back(const ConvShape& shape, const Branches& packed, const T* x, const float* weight, const float* bias,
                     const T* d_out, T* dx, float* d_weight, float* d_bias) {
  const int64_t most = longest(packed), pad = shape.kernel - 1, wide = 3 * shape.width, width = shape.width;
  for_each_task(channel_tasks(shape), [&](int64_t task) {
    const Channels of(shape, task);
    const int64_t rows = (most + pad) * CHANNELS, taps_size = shape.kernel * CHANNELS;
    Scratch scratch{rows, rows, rows, rows, rows, rows, taps_size, taps_size, CHANNELS, CHANNELS};
    float *b = scratch.take(rows), *v = scratch.take(rows), *u = scratch.take(rows), *c = scratch.take(rows);
    float *sum = scratch.take(rows), *dy = scratch.take(rows);
    float *taps = scratch.take(taps_size), *d_taps = scratch.take(taps_size);
    float *kept = scratch.take(CHANNELS), *bias_sum = scratch.take(CHANNELS);
    load_taps(weight + of.first * shape.kernel, shape.kernel, of.count, taps);
    clear(d_taps, taps_size);
    clear(bias_sum, CHANNELS);
    const float* own_bias = load_bias(bias, of, kept);
    for (int64_t r = 0; r < packed.rows; r++) {
      const int64_t start = packed.starts[r], tokens = packed.tokens(r);
      const T* from = x + start * wide + of.first;
      T* to = dx + start * wide + of.first;
      load_channels(from, wide, tokens, of.count, pad, b);
      load_before(packed, r, x + of.first, wide, of.count, pad, b);
      load_channels(from + 2 * width, wide, tokens, of.count, pad, v);
      load_before(packed, r, x + of.first + 2 * width, wide, of.count, pad, v);
      for_channels(tokens + pad, [&](int64_t i) { (Vec::loadu(b + i) * Vec::loadu(v + i)).store(u + i); });
      round_to<T>(u, (tokens + pad) * CHANNELS);
      convolve(u, taps, shape.kernel, own_bias, tokens, sum);
      load_channels(from + width, wide, tokens, of.count, 0, c);
      load_channels(d_out + start * width + of.first, width, tokens, of.count, 0, dy);
      for_channels(tokens, [&](int64_t i) {
        const Vec g = Vec::loadu(dy + i);
        (g * Vec::loadu(sum + i)).store(sum + i);
        (g * Vec::loadu(c + i)).store(dy + i);
      });
      store_channels(sum, tokens, of.count, to + width, wide);
      convolve_back(u, dy, taps, shape.kernel, tokens, sum, d_taps, bias_sum);
      // The rows that it continues have their own gradients already.
      for_each_before(packed, r, dy, taps, shape.kernel, [&](int64_t token, int64_t back, const float* du) {
        alignas(64) float of_b[CHANNELS], of_v[CHANNELS];
        for (int64_t i = 0; i < CHANNELS; i++) {
          of_b[i] = du[i] * v[(pad - back) * CHANNELS + i];
          of_v[i] = du[i] * b[(pad - back) * CHANNELS + i];
        }
        add_row(of_b, dx + token * wide + of.first, of.count);
        add_row(of_v, dx + token * wide + of.first + 2 * width, of.count);
      });
      for_channels(tokens, [&](int64_t i) {
        const Vec g = Vec::loadu(sum + i);
        (g * Vec::loadu(v + pad * CHANNELS + i)).store(u + i);
        (g * Vec::loadu(b + pad * CHANNELS + i)).store(c + i);
      });
      store_channels(u, tokens, of.count, to, wide);
      store_channels(c, tokens, of.count, to + 2 * width, wide);
    }
    add_taps(of, shape.kernel, d_taps, bias_sum, d_weight, d_bias);
  });
}

template <typename T>
void conv_silu(const ConvShape& shape, const Branches& packed, const T* x, const float* weight, float* out) {
  const int64_t most = longest(packed), pad = shape.kernel - 1;
  for_each_task(channel_tasks(shape), [&](int64_t task) {
    const Channels of(shape, task);
    const int64_t rows = (most + pad) * CHANNELS;
    Scratch scratch{rows, rows, shape.kernel * CHANNELS};
    float *u = scratch.take(rows), *sum = scratch.take(rows), *taps = scratch.take(shape.kernel * CHANNELS);
    load_taps(weight + of.first * shape.kernel, shape.kernel, of.count, taps);
    for (int64_t r = 0; r < packed.rows; r++) {
      const int64_t start = packed.starts[r], tokens = packed.tokens(r);
      load_channels(x + start * shape.width + of.first, shape.width, tokens, of.count, pad, u);
      load_before(packed, r, x + of.first, shape.width, of.count, pad, u);
      convolve(u, taps, shape.kernel, nullptr, tokens, sum);
      for_channels(tokens, [&](int64_t i) {
        const Vec s = Vec::loadu(sum + i);
        (s * sigmoid(s)).store(sum + i);
      });
      store_channels(sum, tokens, of.count, out + start * shape.width + of.first, shape.width);
    }
  });
}

template <typename T>
void conv_silu_back(const ConvShape& shape, const Branches& packed, const T* x, const float* weight, const float* d_out, T* dx,
                    float* d_weight) {
  const int64_t most = longest(packed), pad = shape.kernel - 1;
  for_each_task(channel_tasks(shape), [&](int64_t task) {
    const Channels of(shape, task);
    const int64_t rows = (most + pad) * CHANNELS, taps_size = shape.kernel * CHANNELS;
    Scratch scratch{rows, rows, rows, taps_size, taps_size, CHANNELS};
    float *u = scratch.take(rows), *sum = scratch.take(rows), *ds = scratch.take(rows);
    float *taps = scratch.take(taps_size), *d_taps = scratch.take(taps_size), *bias_sum = scratch.take(CHANNELS);
    load_taps(weight + of.first * shape.kernel, shape.kernel, of.count, taps);
    clear(d_taps, taps_size);
    clear(bias_sum, CHANNELS);
    for (int64_t r = 0; r < packed.rows; r++) {
      const int64_t start = packed.starts[r], tokens = packed.tokens(r);
      load_channels(x + start * shape.width + of.first, shape.width, tokens, of.count, pad, u);
      load_before(packed, r, x + of.first, shape.width, of.count, pad, u);
      convolve(u, taps, shape.kernel, nullptr, tokens, sum);
      load_channels(d_out + start * shape.width + of.first, shape.width, tokens, of.count, 0, ds);
      for_channels(tokens, [&](int64_t i) {
        const Vec s = Vec::loadu(sum + i), open = sigmoid(s);
        (Vec::loadu(ds + i) * open * (Vec(1.f) + s * (Vec(1.f) - open))).store(ds + i);
      });
      convolve_back(u, ds, taps, shape.kernel, tokens, sum, d_taps, bias_sum);
      for_each_before(packed, r, ds, taps, shape.kernel, [&](int64_t token, int64_t, const float* du) {
        add_row(du, dx + token * shape.width + of.first, of.count);
      });
      store_channels(sum, tokens, of.count, dx + start * shape.width + of.first, shape.width);
    }
    add_taps(of, shape.kernel, d_taps, bias_sum, d_weight, nullptr);
  });
}

// --- The gated delta rule -------------------------------------------------------------------------------------------
// A chunk of tokens with the keys K, values V and queries Q, the decays e_i from its start to token i and D_ij from token j to i, the strengths
// b_i, and the state S before it:
//   (I + A) U = R, with A_ij = b_i (K K^T)_ij D_ij below the diagonal and R_i = b_i (V_i - e_i (K S)_i)
//   output = diag(e) Q S + M U, with M_ij = (Q K^T)_ij D_ij up to the diagonal
//   state after it = e_last S + (diag(e_last / e) K)^T U

// Number of tokens of a chunk, and of rows that a step of the substitution computes.
constexpr int64_t DELTA_CHUNK = 64, DELTA_BLOCK = 16;

// Normalized queries and keys of a chunk that a key head has, and their products.
struct ChunkKeys {
  int64_t tokens = 0, width, padded_width;
  float *q, *k, *transposed, *q_scale, *k_scale, *kk, *qk;

  static int64_t size(int64_t width) {
    return 2 * DELTA_CHUNK * padded(width) + width * DELTA_CHUNK + 2 * DELTA_CHUNK + 2 * DELTA_CHUNK * DELTA_CHUNK;
  }

  ChunkKeys(float* memory, int64_t width) : width(width), padded_width(padded(width)) {
    auto take = [&](int64_t size) {
      float* piece = memory;
      memory += size;
      return piece;
    };
    q = take(DELTA_CHUNK * padded_width);
    k = take(DELTA_CHUNK * padded_width);
    transposed = take(width * DELTA_CHUNK);
    kk = take(DELTA_CHUNK * DELTA_CHUNK);
    qk = take(DELTA_CHUNK * DELTA_CHUNK);
    q_scale = take(DELTA_CHUNK);
    k_scale = take(DELTA_CHUNK);
  }

  // Loads `tokens` rows with `stride` of queries and keys, and divides each by its length; queries also by the root of the width.
  void load(const float* queries, const float* keys, int64_t stride, int64_t count) {
    tokens = count;
    const float root = 1.f / std::sqrt(static_cast<float>(width));
    unit_rows(queries, stride, q, q_scale, root);
    unit_rows(keys, stride, k, k_scale, 1.f);
    for (int64_t c = 0; c < width; c++) {
      for (int64_t t = 0; t < tokens; t++) transposed[c * DELTA_CHUNK + t] = k[t * padded_width + c];
      clear(transposed + c * DELTA_CHUNK + tokens, DELTA_CHUNK - tokens);
    }
  }

  void multiply_keys() {
    multiply(tokens, DELTA_CHUNK, width, {k, padded_width, 1}, transposed, DELTA_CHUNK, kk, DELTA_CHUNK, false);
    multiply(tokens, DELTA_CHUNK, width, {q, padded_width, 1}, transposed, DELTA_CHUNK, qk, DELTA_CHUNK, false);
  }

  void unit_rows(const float* from, int64_t stride, float* to, float* scales, float factor) {
    for (int64_t t = 0; t < tokens; t++) {
      float* row = to + t * padded_width;
      load_row(from + t * stride, row, width);
      clear(row + width, padded_width - width);
      Vec squares(0.f);
      for (int64_t c = 0; c < padded_width; c += W) squares = at::vec::fmadd(Vec::loadu(row + c), Vec::loadu(row + c), squares);
      scales[t] = 1.f / std::sqrt(sum_of(squares) + 1e-6f);
      const Vec scale(scales[t] * factor);
      for (int64_t c = 0; c < padded_width; c += W) (Vec::loadu(row + c) * scale).store(row + c);
    }
  }
};

// Decays and matrices of a chunk that a value head has.
struct ChunkHead {
  float *sums, *since, *to_end, *beta, *system, *within, *v, *of_state, *u;
  float last = 1.f;
  int64_t width;

  static int64_t size(int64_t width) { return 4 * DELTA_CHUNK + 2 * DELTA_CHUNK * DELTA_CHUNK + 3 * DELTA_CHUNK * padded(width); }

  ChunkHead(float* memory, int64_t width) : width(padded(width)) {
    auto take = [&](int64_t size) {
      float* piece = memory;
      memory += size;
      return piece;
    };
    system = take(DELTA_CHUNK * DELTA_CHUNK);
    within = take(DELTA_CHUNK * DELTA_CHUNK);
    v = take(DELTA_CHUNK * this->width);
    of_state = take(DELTA_CHUNK * this->width);
    u = take(DELTA_CHUNK * this->width);
    sums = take(DELTA_CHUNK);
    since = take(DELTA_CHUNK);
    to_end = take(DELTA_CHUNK);
    beta = take(DELTA_CHUNK);
  }

  // The decays from the logarithms `g` and the strengths, with `stride` between tokens.
  void load(const float* g, const float* strengths, int64_t stride, int64_t tokens) {
    float sum = 0.f;
    for (int64_t t = 0; t < DELTA_CHUNK; t++) {
      if (t < tokens) sum += g[t * stride];
      sums[t] = sum;
      beta[t] = t < tokens ? strengths[t * stride] : 0.f;
    }
    for (int64_t t = 0; t < DELTA_CHUNK; t += W) {
      Vec::loadu(sums + t).exp().store(since + t);
      (Vec(sum) - Vec::loadu(sums + t)).exp().store(to_end + t);
    }
    last = std::exp(sum);
  }

  // The rows of decays between tokens i and j: row i of D up to `end`.
  void decays(int64_t i, float* row) const {
    const Vec own(sums[i]);
    for (int64_t j = 0; j < DELTA_CHUNK; j += W)
      at::vec::minimum(own - Vec::loadu(sums + j), Vec(0.f)).exp().store(row + j);
  }

  // -A, and M.
  void matrices(const ChunkKeys& keys) {
    float row[DELTA_CHUNK];
    for (int64_t i = 0; i < keys.tokens; i++) {
      decays(i, row);
      for (int64_t j = 0; j < DELTA_CHUNK; j++) {
        system[i * DELTA_CHUNK + j] = j < i ? -beta[i] * keys.kk[i * DELTA_CHUNK + j] * row[j] : 0.f;
        within[i * DELTA_CHUNK + j] = j <= i ? keys.qk[i * DELTA_CHUNK + j] * row[j] : 0.f;
      }
    }
  }

  // R, and then U: `u` = (I + A)^-1 diag(b) (V - diag(e) K S).
  void corrections(const ChunkKeys& keys, const float* values, int64_t stride, int64_t value_width, const float* state) {
    const int64_t tokens = keys.tokens;
    multiply(tokens, width, keys.width, {keys.k, keys.padded_width, 1}, state, width, of_state, width, false);
    for (int64_t t = 0; t < tokens; t++) {
      float* row = v + t * width;
      load_row(values + t * stride, row, value_width);
      clear(row + value_width, width - value_width);
      const Vec b(beta[t]), e(since[t]);
      for (int64_t c = 0; c < width; c += W)
        (b * (Vec::loadu(row + c) - e * Vec::loadu(of_state + t * width + c))).store(u + t * width + c);
    }
    for (int64_t first = 0; first < tokens; first += DELTA_BLOCK) {
      const int64_t end = std::min(first + DELTA_BLOCK, tokens);
      if (first > 0)
        multiply(end - first, width, first, {system + first * DELTA_CHUNK, DELTA_CHUNK, 1}, u, width, u + first * width, width, true);
      for (int64_t i = first + 1; i < end; i++)
        for (int64_t j = first; j < i; j++) add_scaled(u + i * width, u + j * width, system[i * DELTA_CHUNK + j], width);
    }
  }

  static void add_scaled(float* to, const float* from, float factor, int64_t width) {
    const Vec x(factor);
    for (int64_t c = 0; c < width; c += W) at::vec::fmadd(x, Vec::loadu(from + c), Vec::loadu(to + c)).store(to + c);
  }

  // The state after the chunk; `scaled` is scratch of [DELTA_CHUNK, width].
  void advance(const ChunkKeys& keys, float* state, float* scaled) const {
    for (int64_t t = 0; t < keys.tokens; t++) scale_row(u + t * width, to_end[t], scaled + t * width, width);
    scale_row(state, last, state, keys.width * width);
    multiply(keys.width, width, keys.tokens, {keys.k, 1, keys.padded_width}, scaled, width, state, width, true);
  }

  static void scale_row(const float* from, float factor, float* to, int64_t width) {
    const Vec x(factor);
    for (int64_t c = 0; c < width; c += W) (x * Vec::loadu(from + c)).store(to + c);
  }
};

void load_state(const float* from, int64_t rows, int64_t width, float* to) {
  const int64_t wide = padded(width);
  if (!from) return clear(to, rows * wide);
  for (int64_t r = 0; r < rows; r++) {
    load_row(from + r * width, to + r * wide, width);
    clear(to + r * wide + width, wide - width);
  }
}

void store_state(const float* from, int64_t rows, int64_t width, float* to) {
  for (int64_t r = 0; r < rows; r++) store_row(from + r * padded(width), to + r * width, width);
}

// The places of a key head's numbers in the rows of queries, keys and values.
struct DeltaPlaces {
  int64_t row, query, key, group;
  const DeltaShape& shape;

  DeltaPlaces(const DeltaShape& shape, int64_t head)
      : row(2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim),
        query(head * shape.key_dim),
        key((shape.key_heads + head) * shape.key_dim),
        group(shape.value_heads / shape.key_heads),
        shape(shape) {}

  int64_t value(int64_t value_head) const { return 2 * shape.key_heads * shape.key_dim + value_head * shape.value_dim; }
};

void delta_forward(const DeltaShape& shape, const Branches& packed, const float* x, const float* g, const float* beta,
                   const float* start, float* out, float* end) {
  const int64_t heads = shape.value_heads, wide = padded(shape.value_dim), memory = shape.key_dim * shape.value_dim;
  for_each_task(packed.num_trees * shape.key_heads, [&](int64_t task) {
    const int64_t tree = task / shape.key_heads, key_head = task % shape.key_heads, root = packed.trees[tree];
    const DeltaPlaces at(shape, key_head);
    const int64_t of_state = shape.key_dim * wide, of_row = at.group * of_state;
    const int64_t of_ends = packed.slots_of(tree) * of_row;
    Scratch scratch{ChunkKeys::size(shape.key_dim), ChunkHead::size(shape.value_dim), of_row, of_ends, DELTA_CHUNK * wide};
    ChunkKeys keys(scratch.take(ChunkKeys::size(shape.key_dim)), shape.key_dim);
    ChunkHead head(scratch.take(ChunkHead::size(shape.value_dim)), shape.value_dim);
    float* states = scratch.take(of_row);
    // States after the rows that others continue.
    float *ends = scratch.take(of_ends), *result = scratch.take(DELTA_CHUNK * wide);
    for (int64_t r = root; r < packed.trees[tree + 1]; r++) {
      auto place_of = [&](int64_t i) { return (r * heads + key_head * at.group + i) * memory; };
      if (packed.parents[r] >= 0)
        std::memcpy(states, ends + packed.slots[packed.parents[r]] * of_row, of_row * sizeof(float));
      else
        for (int64_t i = 0; i < at.group; i++)
          load_state(start ? start + place_of(i) : nullptr, shape.key_dim, shape.value_dim, states + i * of_state);
      for (int64_t token = packed.starts[r]; token < packed.starts[r + 1]; token += DELTA_CHUNK) {
        const float* rows = x + token * at.row;
        keys.load(rows + at.query, rows + at.key, at.row, std::min(DELTA_CHUNK, packed.starts[r + 1] - token));
        keys.multiply_keys();
        for (int64_t i = 0; i < at.group; i++) {
          const int64_t value_head = key_head * at.group + i;
          float* state = states + i * of_state;
          head.load(g + token * heads + value_head, beta + token * heads + value_head, heads, keys.tokens);
          head.matrices(keys);
          head.corrections(keys, rows + at.value(value_head), at.row, shape.value_dim, state);
          multiply(keys.tokens, wide, shape.key_dim, {keys.q, keys.padded_width, 1}, state, wide, result, wide, false);
          for (int64_t t = 0; t < keys.tokens; t++)
            ChunkHead::scale_row(result + t * wide, head.since[t], result + t * wide, wide);
          multiply(keys.tokens, wide, keys.tokens, {head.within, DELTA_CHUNK, 1}, head.u, wide, result, wide, true);
          for (int64_t t = 0; t < keys.tokens; t++)
            store_row(result + t * wide, out + ((token + t) * heads + value_head) * shape.value_dim, shape.value_dim);
          head.advance(keys, state, result);
        }
      }
      if (packed.slots[r] >= 0) std::memcpy(ends + packed.slots[r] * of_row, states, of_row * sizeof(float));
      if (end)
        for (int64_t i = 0; i < at.group; i++)
          store_state(states + i * of_state, shape.key_dim, shape.value_dim, end + place_of(i));
    }
  });
}

// [rows, cols] with `stride` to [cols, stride_to]. A few rows at a time: their cache lines stay, which more rows at a stride that is a power of two
// would not.
void transpose_rows(const float* from, int64_t rows, int64_t cols, int64_t stride, float* to, int64_t stride_to) {
  constexpr int64_t FEW = 16;
  for (int64_t first = 0; first < rows; first += FEW) {
    const int64_t end = std::min(first + FEW, rows);
    for (int64_t c = 0; c < cols; c++)
      for (int64_t r = first; r < end; r++) to[c * stride_to + r] = from[r * stride + c];
  }
  for (int64_t c = 0; c < cols; c++) clear(to + c * stride_to + rows, stride_to - rows);
}

float dot_rows(const float* a, const float* b, int64_t width) {
  Vec sum(0.f);
  for (int64_t c = 0; c < width; c += W) sum = at::vec::fmadd(Vec::loadu(a + c), Vec::loadu(b + c), sum);
  return sum_of(sum);
}

// The backward pass of a chunk for one value head.
struct ChunkBack {
  int64_t key_dim, keys_wide, value_dim, wide;
  float *dq, *dk, *d_out, *du, *other, *narrow, *of_within, *of_system, *u_transposed, *transposed, *d_sums;

  static int64_t size(int64_t key_dim, int64_t value_dim) {
    return 3 * DELTA_CHUNK * padded(key_dim) + 3 * DELTA_CHUNK * padded(value_dim) + 2 * DELTA_CHUNK * DELTA_CHUNK + value_dim * DELTA_CHUNK +
           value_dim * padded(key_dim) + DELTA_CHUNK;
  }

  ChunkBack(float* memory, int64_t key_dim, int64_t value_dim)
      : key_dim(key_dim), keys_wide(padded(key_dim)), value_dim(value_dim), wide(padded(value_dim)) {
    auto take = [&](int64_t size) {
      float* piece = memory;
      memory += size;
      return piece;
    };
    dq = take(DELTA_CHUNK * keys_wide);
    dk = take(DELTA_CHUNK * keys_wide);
    narrow = take(DELTA_CHUNK * keys_wide);
    d_out = take(DELTA_CHUNK * wide);
    du = take(DELTA_CHUNK * wide);
    other = take(DELTA_CHUNK * wide);
    of_within = take(DELTA_CHUNK * DELTA_CHUNK);
    of_system = take(DELTA_CHUNK * DELTA_CHUNK);
    u_transposed = take(value_dim * DELTA_CHUNK);
    transposed = take(value_dim * keys_wide);
    d_sums = take(DELTA_CHUNK);
  }

  // Adds the gradients of the normalized queries and keys to `dq` and `dk`, and replaces that of the state after the chunk, `d_state`, by that of
  // the state before it. `d_values` [tokens] with `stride`; `d_g` and `d_beta` with `heads` between tokens.
  void run(const ChunkKeys& keys, const ChunkHead& head, const float* state, float* d_state, float* d_values,
           int64_t stride, float* d_g, float* d_beta, int64_t heads) {
    const int64_t tokens = keys.tokens;
    clear(d_sums, DELTA_CHUNK);
    float d_last = head.last * dot_rows(d_state, state, key_dim * wide);
    transpose_rows(head.u, tokens, value_dim, wide, u_transposed, DELTA_CHUNK);
    // The state after the chunk: U and keys.
    multiply(tokens, wide, key_dim, {keys.k, keys_wide, 1}, d_state, wide, du, wide, false);
    transpose_rows(d_state, key_dim, value_dim, wide, transposed, keys_wide);
    multiply(tokens, keys_wide, value_dim, {head.u, wide, 1}, transposed, keys_wide, narrow, keys_wide, false);
    for (int64_t t = 0; t < tokens; t++) {
      const float c = head.to_end[t], of_decay = c * dot_rows(keys.k + t * keys_wide, narrow + t * keys_wide, keys_wide);
      d_last += of_decay;
      d_sums[t] -= of_decay;
      ChunkHead::scale_row(du + t * wide, c, du + t * wide, wide);
      ChunkHead::add_scaled(dk + t * keys_wide, narrow + t * keys_wide, c, keys_wide);
    }
    // The outputs: U and M, queries and the state.
    multiply(tokens, wide, tokens, {head.within, 1, DELTA_CHUNK}, d_out, wide, du, wide, true);
    multiply(tokens, DELTA_CHUNK, value_dim, {d_out, wide, 1}, u_transposed, DELTA_CHUNK, of_within, DELTA_CHUNK, false);
    transpose_rows(state, key_dim, value_dim, wide, transposed, keys_wide);
    multiply(tokens, keys_wide, value_dim, {d_out, wide, 1}, transposed, keys_wide, narrow, keys_wide, false);
    for (int64_t t = 0; t < tokens; t++) {
      const float e = head.since[t];
      d_sums[t] += e * dot_rows(keys.q + t * keys_wide, narrow + t * keys_wide, keys_wide);
      ChunkHead::add_scaled(dq + t * keys_wide, narrow + t * keys_wide, e, keys_wide);
      ChunkHead::scale_row(d_out + t * wide, e, other + t * wide, wide);
    }
    ChunkHead::scale_row(d_state, head.last, d_state, key_dim * wide);
    multiply(key_dim, wide, tokens, {keys.q, 1, keys_wide}, other, wide, d_state, wide, true);
    solve_transposed(head, tokens);
    // The right side: values, strengths, keys and the state.
    multiply(tokens, DELTA_CHUNK, value_dim, {du, wide, 1}, u_transposed, DELTA_CHUNK, of_system, DELTA_CHUNK, false);
    for (int64_t t = 0; t < tokens; t++) {
      const float b = head.beta[t], e = head.since[t];
      const float *w = du + t * wide, *before = head.of_state + t * wide;
      const float of_state = dot_rows(w, before, wide);
      d_beta[t * heads] = dot_rows(w, head.v + t * wide, wide) - e * of_state;
      d_sums[t] -= b * e * of_state;
      ChunkHead::scale_row(w, -b * e, other + t * wide, wide);
      for (int64_t c = 0; c < value_dim; c++) d_values[t * stride + c] = b * w[c];
    }
    multiply(tokens, keys_wide, value_dim, {other, wide, 1}, transposed, keys_wide, dk, keys_wide, true);
    multiply(key_dim, wide, tokens, {keys.k, 1, keys_wide}, other, wide, d_state, wide, true);
    of_matrices(keys, head, d_beta, heads);
    d_sums[tokens - 1] += d_last;
    float sum = 0.f;
    for (int64_t t = tokens - 1; t >= 0; t--) d_g[t * heads] = sum += d_sums[t];
  }

  // du = (I + A)^-T du.
  void solve_transposed(const ChunkHead& head, int64_t tokens) {
    for (int64_t first = (tokens - 1) / DELTA_BLOCK * DELTA_BLOCK; first >= 0; first -= DELTA_BLOCK) {
      const int64_t end = std::min(first + DELTA_BLOCK, tokens);
      if (end < tokens)
        multiply(end - first, wide, tokens - end, {head.system + end * DELTA_CHUNK + first, 1, DELTA_CHUNK}, du + end * wide, wide,
                 du + first * wide, wide, true);
      for (int64_t i = end - 2; i >= first; i--)
        for (int64_t j = i + 1; j < end; j++)
          ChunkHead::add_scaled(du + i * wide, du + j * wide, head.system[j * DELTA_CHUNK + i], wide);
    }
  }

  // The gradients of A and M, [tokens, DELTA_CHUNK] in `of_system` (with the other sign) and `of_within`, in those of their factors.
  void of_matrices(const ChunkKeys& keys, const ChunkHead& head, float* d_beta, int64_t heads) {
    const int64_t tokens = keys.tokens;
    float row[DELTA_CHUNK];
    for (int64_t i = 0; i < tokens; i++) {
      head.decays(i, row);
      float of_beta = 0.f, of_sum = 0.f;
      for (int64_t j = 0; j < DELTA_CHUNK; j++) {
        float &a = of_system[i * DELTA_CHUNK + j], &m = of_within[i * DELTA_CHUNK + j];
        const float d_system = j < i ? -a * row[j] : 0.f, d_within = j <= i ? m * row[j] : 0.f;
        const float by_keys = d_system * keys.kk[i * DELTA_CHUNK + j], by_both = head.beta[i] * by_keys + d_within * keys.qk[i * DELTA_CHUNK + j];
        of_beta += by_keys;
        of_sum += by_both;
        d_sums[j] -= by_both;
        a = head.beta[i] * d_system;
        m = d_within;
      }
      d_beta[i * heads] += of_beta;
      d_sums[i] += of_sum;
    }
    multiply(tokens, keys_wide, tokens, {of_within, DELTA_CHUNK, 1}, keys.k, keys_wide, dq, keys_wide, true);
    multiply(tokens, keys_wide, tokens, {of_within, 1, DELTA_CHUNK}, keys.q, keys_wide, dk, keys_wide, true);
    multiply(tokens, keys_wide, tokens, {of_system, DELTA_CHUNK, 1}, keys.k, keys_wide, dk, keys_wide, true);
    multiply(tokens, keys_wide, tokens, {of_system, 1, DELTA_CHUNK}, keys.k, keys_wide, dk, keys_wide, true);
  }
};

// The gradients of rows from those of the rows divided by their lengths, times `factor`.
void unit_rows_back(const ChunkKeys& keys, const float* unit, const float* scales, float factor, float* d_unit, float* to,
                    int64_t stride) {
  for (int64_t t = 0; t < keys.tokens; t++) {
    const float *row = unit + t * keys.padded_width, *d = d_unit + t * keys.padded_width;
    // `unit` has the factor already.
    const float along = dot_rows(row, d, keys.padded_width) / factor;
    for (int64_t c = 0; c < keys.width; c++)
      to[t * stride + c] = scales[t] * (factor * d[c] - along * row[c]);
  }
}

// The backward pass of the delta rule in the rows of a tree, for the value heads of one key head.
struct TreeBack {
  const DeltaShape& shape;
  const Branches& packed;
  const DeltaPlaces& at;
  const float *x, *g, *beta, *d_out;
  float *dx, *d_g, *d_beta;
  ChunkKeys& keys;
  ChunkHead& head;
  ChunkBack& back;
  int64_t key_head, wide, of_state, group;

  int64_t chunks(int64_t r) const { return (packed.tokens(r) + DELTA_CHUNK - 1) / DELTA_CHUNK; }

  void load_keys(int64_t r, int64_t chunk) {
    const int64_t token = packed.starts[r] + chunk * DELTA_CHUNK;
    const float* rows = x + token * at.row;
    keys.load(rows + at.query, rows + at.key, at.row, std::min(DELTA_CHUNK, packed.starts[r + 1] - token));
    keys.multiply_keys();
  }

  void load_head(int64_t r, int64_t chunk, int64_t i, const float* state) {
    const int64_t token = packed.starts[r] + chunk * DELTA_CHUNK, value_head = key_head * group + i;
    const int64_t place = token * shape.value_heads + value_head;
    head.load(g + place, beta + place, shape.value_heads, keys.tokens);
    head.matrices(keys);
    head.corrections(keys, x + token * at.row + at.value(value_head), at.row, shape.value_dim, state);
  }

  // Computes the states before the chunks of row `r` after the first, and that after chunk `last` - 1, in `states`, whose first are those before the
  // first.
  void states_of(int64_t r, int64_t last, float* states) {
    for (int64_t chunk = 0; chunk < last; chunk++) {
      load_keys(r, chunk);
      for (int64_t i = 0; i < group; i++) {
        const float* state = states + (chunk * group + i) * of_state;
        float* next = states + ((chunk + 1) * group + i) * of_state;
        load_head(r, chunk, i, state);
        std::memcpy(next, state, of_state * sizeof(float));
        head.advance(keys, next, back.other);
      }
    }
  }

  // The backward pass of row `r`, whose states before its chunks are `states`; replaces the gradients of the states after it by those of the states
  // before it.
  void row(int64_t r, const float* states, float* d_states) {
    const int64_t heads = shape.value_heads;
    for (int64_t chunk = chunks(r) - 1; chunk >= 0; chunk--) {
      const int64_t token = packed.starts[r] + chunk * DELTA_CHUNK;
      load_keys(r, chunk);
      clear(back.dq, DELTA_CHUNK * keys.padded_width);
      clear(back.dk, DELTA_CHUNK * keys.padded_width);
      for (int64_t i = 0; i < group; i++) {
        const int64_t value_head = key_head * group + i, place = token * heads + value_head;
        const float* state = states + (chunk * group + i) * of_state;
        load_head(r, chunk, i, state);
        for (int64_t t = 0; t < keys.tokens; t++) {
          float* row = back.d_out + t * wide;
          load_row(d_out + ((token + t) * heads + value_head) * shape.value_dim, row, shape.value_dim);
          clear(row + shape.value_dim, wide - shape.value_dim);
        }
        back.run(keys, head, state, d_states + i * of_state, dx + token * at.row + at.value(value_head), at.row, d_g + place,
                 d_beta + place, heads);
      }
      float* rows = dx + token * at.row;
      const float root = 1.f / std::sqrt(static_cast<float>(shape.key_dim));
      unit_rows_back(keys, keys.q, keys.q_scale, root, back.dq, rows + at.query, at.row);
      unit_rows_back(keys, keys.k, keys.k_scale, 1.f, back.dk, rows + at.key, at.row);
    }
  }
};

void delta_backward(const DeltaShape& shape, const Branches& packed, const float* x, const float* g, const float* beta,
                    const float* d_out, float* dx, float* d_g, float* d_beta) {
  const int64_t wide = padded(shape.value_dim), of_state = shape.key_dim * wide;
  const int64_t most_chunks = (longest(packed) + DELTA_CHUNK - 1) / DELTA_CHUNK;
  for_each_task(packed.num_trees * shape.key_heads, [&](int64_t task) {
    const int64_t tree = task / shape.key_heads, key_head = task % shape.key_heads;
    const int64_t root = packed.trees[tree], last = packed.trees[tree + 1];
    const DeltaPlaces at(shape, key_head);
    const int64_t of_row = at.group * of_state, back_size = ChunkBack::size(shape.key_dim, shape.value_dim);
    const int64_t slots = packed.slots_of(tree);
    Scratch scratch{ChunkKeys::size(shape.key_dim), ChunkHead::size(shape.value_dim), back_size,
                    (most_chunks + 1) * of_row, of_row, slots * of_row, slots * of_row};
    ChunkKeys keys(scratch.take(ChunkKeys::size(shape.key_dim)), shape.key_dim);
    ChunkHead head(scratch.take(ChunkHead::size(shape.value_dim)), shape.value_dim);
    ChunkBack back(scratch.take(back_size), shape.key_dim, shape.value_dim);
    float *states = scratch.take((most_chunks + 1) * of_row), *d_states = scratch.take(of_row);
    // States after the rows that others continue, and their gradients.
    float *ends = scratch.take(slots * of_row), *d_ends = scratch.take(slots * of_row);
    TreeBack pass{shape, packed, at, x, g, beta, d_out, dx, d_g, d_beta, keys, head, back, key_head, wide, of_state, at.group};
    auto start = [&](int64_t r) {
      const int64_t parent = packed.parents[r];
      if (parent < 0) return clear(states, of_row);
      std::memcpy(states, ends + packed.slots[parent] * of_row, of_row * sizeof(float));
    };
    for (int64_t r = root; r < last; r++) {
      if (packed.slots[r] < 0) continue;
      start(r);
      pass.states_of(r, pass.chunks(r), states);
      std::memcpy(ends + packed.slots[r] * of_row, states + pass.chunks(r) * of_row, of_row * sizeof(float));
    }
    clear(d_ends, slots * of_row);
    for (int64_t r = last - 1; r >= root; r--) {
      // The states before each chunk are computed again.
      start(r);
      pass.states_of(r, pass.chunks(r) - 1, states);
      if (packed.slots[r] < 0)
        clear(d_states, of_row);
      else
        std::memcpy(d_states, d_ends + packed.slots[r] * of_row, of_row * sizeof(float));
      pass.row(r, states, d_states);
      if (const int64_t parent = packed.parents[r]; parent >= 0) {
        float* sums = d_ends + packed.slots[parent] * of_row;
        for (int64_t i = 0; i < of_row; i += W) (Vec::loadu(sums + i) + Vec::loadu(d_states + i)).store(sums + i);
      }
    }
  });
}

// One more token in each row, whose state is changed in place; a row that is not active has its last token's output again.
void delta_step(const DeltaShape& shape, int64_t rows, const float* x, const float* g, const float* beta,
                const float* active, float* states, float* out) {
  const int64_t heads = shape.value_heads, value_dim = shape.value_dim;
  for_each_task(rows * shape.key_heads, [&](int64_t task) {
    const int64_t r = task / shape.key_heads, key_head = task % shape.key_heads;
    const DeltaPlaces at(shape, key_head);
    const int64_t wide = padded(value_dim);
    Scratch scratch{ChunkKeys::size(shape.key_dim), wide, wide};
    ChunkKeys keys(scratch.take(ChunkKeys::size(shape.key_dim)), shape.key_dim);
    float *known = scratch.take(wide), *result = scratch.take(wide);
    const float* row = x + r * at.row;
    keys.tokens = 1;
    keys.unit_rows(row + at.query, at.row, keys.q, keys.q_scale, 1.f / std::sqrt(static_cast<float>(shape.key_dim)));
    keys.unit_rows(row + at.key, at.row, keys.k, keys.k_scale, 1.f);
    const bool changes = !active || active[r] > 0.5f;
    for (int64_t i = 0; i < at.group; i++) {
      const int64_t value_head = key_head * at.group + i;
      float* state = states + (r * heads + value_head) * shape.key_dim * value_dim;
      const float decay = std::exp(g[r * heads + value_head]), strength = beta[r * heads + value_head];
      const float* value = row + at.value(value_head);
      auto for_values = [&](auto f) { for_vectors(value_dim, f); };
      clear(result, wide);
      if (changes) {
        clear(known, wide);
        for (int64_t k = 0; k < shape.key_dim; k++) {
          const Vec factor(decay * keys.k[k]);
          for_values([&](int64_t c, int64_t lanes) {
            at::vec::fmadd(factor, some(state + k * value_dim + c, lanes), Vec::loadu(known + c)).store(known + c);
          });
        }
        // The correction.
        for_values([&](int64_t c, int64_t lanes) {
          (Vec(strength) * (some(value + c, lanes) - Vec::loadu(known + c))).store(known + c);
        });
      }
      for (int64_t k = 0; k < shape.key_dim; k++) {
        const Vec key(keys.k[k]), query(keys.q[k]);
        for_values([&](int64_t c, int64_t lanes) {
          Vec now = some(state + k * value_dim + c, lanes);
          if (changes) {
            now = at::vec::fmadd(key, Vec::loadu(known + c), Vec(decay) * now);
            now.store(state + k * value_dim + c, lanes);
          }
          at::vec::fmadd(query, now, Vec::loadu(result + c)).store(result + c);
        });
      }
      store_row(result, out + (r * heads + value_head) * value_dim, value_dim);
    }
  });
}
