// activation(gate) * up and its gradients, as a part of kernels.cpp: one pass over memory, in f32, rounded once.
#pragma once

// As in gpu.rs.
enum Activation : int64_t { GELU = 0, GELU_TANH = 1, SILU = 2, RELU = 3, SIGMOID = 4 };

// The value of an activation and, if it is asked for, its slope.
struct Curve {
  Vec value, slope;
};

template <int64_t ACTIVATION, bool SLOPE>
inline Curve curve(Vec x) {
  const Vec one(1.f), half(0.5f);
  Curve found{x, one};
  if constexpr (ACTIVATION == SILU || ACTIVATION == SIGMOID) {
    const Vec s = one / (one + x.neg().exp());
    found.value = ACTIVATION == SILU ? x * s : s;
    if constexpr (SLOPE) found.slope = ACTIVATION == SILU ? s * (one + x * (one - s)) : s * (one - s);
  } else if constexpr (ACTIVATION == GELU) {
    const Vec below = half * (one + (x * Vec(0.70710678118654752f)).erf());
    found.value = x * below;
    if constexpr (SLOPE) found.slope = below + x * Vec(0.39894228040143268f) * (Vec(-0.5f) * x * x).exp();
  } else if constexpr (ACTIVATION == GELU_TANH) {
    const Vec root(0.79788456080286536f), cube(0.044715f);
    const Vec t = (root * (x + cube * x * x * x)).tanh();
    found.value = half * x * (one + t);
    if constexpr (SLOPE)
      found.slope = half * (one + t) + half * x * (one - t * t) * root * (one + Vec(3.f) * cube * x * x);
  } else {
    // A number that is none stays so.
    found.value = at::vec::maximum(x, Vec(0.f));
    if constexpr (SLOPE) found.slope = Vec::blendv(Vec(0.f), one, x > Vec(0.f));
  }
  return found;
}

// Calls `f` with the activation as a constant.
template <typename F>
void for_activation(int64_t activation, const F& f) {
  switch (activation) {
    case GELU:
      return f(std::integral_constant<int64_t, GELU>{});
    case GELU_TANH:
      return f(std::integral_constant<int64_t, GELU_TANH>{});
    case SILU:
      return f(std::integral_constant<int64_t, SILU>{});
    case RELU:
      return f(std::integral_constant<int64_t, RELU>{});
    default:
      return f(std::integral_constant<int64_t, SIGMOID>{});
  }
}

// Numbers that are computed at once: with their copies in f32 they stay in the CPU's first cache.
constexpr int64_t GATED_PIECE = 1024;

// Where results in f32 are written before they are stored.
inline float* results_in(float* out, float*) { return out; }
inline float* results_in(c10::BFloat16*, float* kept) { return kept; }
inline void store_results(const float*, float*, int64_t) {}
inline void store_results(const float* from, c10::BFloat16* to, int64_t n) { store_row(from, to, n); }

// Calls f(row, first, count) for the pieces of all rows, on libtorch's threads.
template <typename F>
void for_pieces(const GatedShape& shape, const F& f) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(shape.width, 1));
  at::parallel_for(0, shape.rows, grain, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; row++)
      for (int64_t first = 0; first < shape.width; first += GATED_PIECE)
        f(row, first, std::min(GATED_PIECE, shape.width - first));
  });
}

template <typename T>
void gated(const GatedShape& shape, const T* gate, const T* up, T* out) {
  for_activation(shape.activation, [&](auto activation) {
    constexpr int64_t A = decltype(activation)::value;
    for_pieces(shape, [&](int64_t row, int64_t first, int64_t n) {
      alignas(64) float kept[3][GATED_PIECE];
      T* to = out + row * shape.width + first;
      const float* g = floats(gate + row * shape.gate_row + first, kept[0], n);
      const float* u = floats(up + row * shape.up_row + first, kept[1], n);
      float* result = results_in(to, kept[2]);
      for_vectors(n, [&](int64_t i, int64_t lanes) {
        (curve<A, false>(some(g + i, lanes)).value * some(u + i, lanes)).store(result + i, lanes);
      });
      store_results(result, to, n);
    });
  });
}

template <typename T>
void gated_back(const GatedShape& shape, const T* gate, const T* up, const T* d_out, T* d_gate, T* d_up) {
  for_activation(shape.activation, [&](auto activation) {
    constexpr int64_t A = decltype(activation)::value;
    for_pieces(shape, [&](int64_t row, int64_t first, int64_t n) {
      alignas(64) float kept[5][GATED_PIECE];
      const int64_t at = row * shape.width + first;
      const float* g = floats(gate + row * shape.gate_row + first, kept[0], n);
      const float* u = floats(up + row * shape.up_row + first, kept[1], n);
      const float* d = floats(d_out + at, kept[2], n);
      float *of_gate = results_in(d_gate + at, kept[3]), *of_up = results_in(d_up + at, kept[4]);
      for_vectors(n, [&](int64_t i, int64_t lanes) {
        const Curve found = curve<A, true>(some(g + i, lanes));
        const Vec dy = some(d + i, lanes);
        (dy * some(u + i, lanes) * found.slope).store(of_gate + i, lanes);
        (dy * found.value).store(of_up + i, lanes);
      });
      store_results(of_gate, d_gate + at, n);
      store_results(of_up, d_up + at, n);
    });
  });
}
