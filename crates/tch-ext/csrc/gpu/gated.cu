// Gates: activation(gate) * up, and the gradients of both; without `up`, the activation alone. N numbers at once, in f32.

constexpr int GATED_THREADS = 256;
// As in gpu.rs.
enum Activation { GELU = 0, GELU_TANH = 1, SILU = 2, RELU = 3, SIGMOID = 4 };

// The value of an activation and its slope.
struct Curve {
  float value, slope;
};

DEVICE Curve curve(int activation, float x) {
  if (activation == SILU || activation == SIGMOID) {
    const float s = 1 / (1 + expf(-x));
    if (activation == SIGMOID) return {s, s * (1 - s)};
    return {x * s, s * (1 + x * (1 - s))};
  }
  if (activation == GELU) {
    const float below = 0.5f * (1 + erff(x * 0.70710678118654752f));
    return {x * below, below + x * 0.39894228040143268f * expf(-0.5f * x * x)};
  }
  if (activation == GELU_TANH) {
    const float root = 0.79788456080286536f, cube = 0.044715f;
    const float t = tanhf(root * (x + cube * x * x * x));
    return {0.5f * x * (1 + t), 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * root * (1 + 3 * cube * x * x)};
  }
  // A number that is none stays so.
  return {x < 0 ? 0 : x, x > 0 ? 1.f : 0.f};
}

// Sizes: rows of `packs` packs, which begin `stride` numbers after one another in gate and up and in their gradients, and without gaps in the
// other tensors.
struct GatedShape {
  int64 rows, packs, stride;
  int activation;
};

// Calls `work` with the first number of each pack: its place in gate and up, and in the other tensors. Blocks have rows and parts of them.
template <int N, typename Work>
DEVICE void for_packs(const GatedShape& s, Work work) {
  for (int64 row = blockIdx.y; row < s.rows; row += gridDim.y)
    for (int64 i = blockIdx.x * static_cast<int64>(GATED_THREADS) + threadIdx.x; i < s.packs;
         i += static_cast<int64>(gridDim.x) * GATED_THREADS)
      work(row * s.stride + i * N, (row * s.packs + i) * N);
}

template <typename T, int N>
DEVICE void gated(const T* gate, const T* up, T* out, const GatedShape& s) {
  for_packs<N>(s, [&](int64 at, int64 to) {
    Pack<T, N> g = load<T, N>(gate + at), u;
    if (up) u = load<T, N>(up + at);
    for (int k = 0; k < N; k++) {
      const float value = curve(s.activation, wide(g.of[k])).value;
      round_to(up ? value * wide(u.of[k]) : value, g.of[k]);
    }
    store(out + to, g);
  });
}

template <typename T, int N>
DEVICE void gated_gradient(const T* gate, const T* up, const T* of_out, T* of_gate, T* of_up, const GatedShape& s) {
  for_packs<N>(s, [&](int64 at, int64 from) {
    Pack<T, N> g = load<T, N>(gate + at), u;
    const Pack<T, N> d = load<T, N>(of_out + from);
    if (up) u = load<T, N>(up + at);
    for (int k = 0; k < N; k++) {
      const Curve c = curve(s.activation, wide(g.of[k]));
      const float dy = wide(d.of[k]);
      round_to(up ? dy * wide(u.of[k]) * c.slope : dy * c.slope, g.of[k]);
      if (up) round_to(dy * c.value, u.of[k]);
    }
    store(of_gate + at, g);
    if (up) store(of_up + at, u);
  });
}

#define GATED(name, T, N)                                                                  \
  KERNEL(GATED_THREADS) name(const T* gate, const T* up, T* out, GatedShape s) {           \
    gated<T, N>(gate, up, out, s);                                                         \
  }
#define GATED_GRADIENT(name, T, N)                                                         \
  KERNEL(GATED_THREADS)                                                                    \
  name(const T* gate, const T* up, const T* of_out, T* of_gate, T* of_up, GatedShape s) {  \
    gated_gradient<T, N>(gate, up, of_out, of_gate, of_up, s);                             \
  }
GATED(gated_f32, float, 1)
GATED(gated_f32_packed, float, 4)
GATED(gated_bf16, bf16, 1)
GATED(gated_bf16_packed, bf16, 8)
GATED_GRADIENT(gated_gradient_f32, float, 1)
GATED_GRADIENT(gated_gradient_f32_packed, float, 4)
GATED_GRADIENT(gated_gradient_bf16, bf16, 1)
GATED_GRADIENT(gated_gradient_bf16_packed, bf16, 8)
