// Rotary positions: rotates dimension i with i + half of the first `parts` entries of x [tokens, heads, entries, head_dim], and copies
// the rest; to another dtype if asked. A thread has N neighbouring pairs, or N dimensions twice.

constexpr int ROTARY_THREADS = 256;

// Sizes of x; `groups` is the number of threads of an entry: head_dim less `half`, divided by N.
struct RotaryShape {
  int64 threads;
  int heads, entries, parts, head_dim, half, groups;
  // 1, or -1 to rotate back.
  float sign;
};

template <typename From, typename To, int N>
DEVICE void copy_pack(const From* from, To* to) {
  const Pack<From, N> pack = load<From, N>(from);
  Pack<To, N> out;
  for (int k = 0; k < N; k++) round_to(wide(pack.of[k]), out.of[k]);
  store(to, out);
}

template <typename From, typename To, int N>
DEVICE void rotate(const From* x, const float* cos, const float* sin, To* out, const RotaryShape& s) {
  for (int64 thread = blockIdx.x * static_cast<int64>(ROTARY_THREADS) + threadIdx.x; thread < s.threads;
       thread += static_cast<int64>(gridDim.x) * ROTARY_THREADS) {
    const int group = thread % s.groups * N;
    const int64 row = thread / s.groups, token = row / s.entries / s.heads;
    const bool rotates = row % s.entries < s.parts;
    const From* from = x + row * s.head_dim;
    To* to = out + row * s.head_dim;
    const int other = group + s.half;
    if (group >= s.half || !rotates) {
      // Dimensions beyond the rotated ones, and entries that are not rotated, of which the first threads have two parts.
      copy_pack<From, To, N>(from + other, to + other);
      if (group < s.half) copy_pack<From, To, N>(from + group, to + group);
      continue;
    }
    const Pack<From, N> a = load<From, N>(from + group), b = load<From, N>(from + other);
    const Pack<float, N> c = load<float, N>(cos + token * s.half + group), d = load<float, N>(sin + token * s.half + group);
    Pack<To, N> first, second;
    for (int k = 0; k < N; k++) {
      const float turn = s.sign * d.of[k];
      round_to(wide(a.of[k]) * c.of[k] - wide(b.of[k]) * turn, first.of[k]);
      round_to(wide(b.of[k]) * c.of[k] + wide(a.of[k]) * turn, second.of[k]);
    }
    store(to + group, first);
    store(to + other, second);
  }
}

#define ROTATE(name, From, To, N)                                                                         \
  KERNEL(ROTARY_THREADS) name(const From* x, const float* cos, const float* sin, To* out, RotaryShape s) { \
    rotate<From, To, N>(x, cos, sin, out, s);                                                             \
  }
ROTATE(rotate_f32_f32, float, float, 1)
ROTATE(rotate_f32_f32_packed, float, float, 4)
ROTATE(rotate_f32_bf16, float, bf16, 1)
ROTATE(rotate_f32_bf16_packed, float, bf16, 4)
ROTATE(rotate_bf16_f32, bf16, float, 1)
ROTATE(rotate_bf16_f32_packed, bf16, float, 4)
ROTATE(rotate_bf16_bf16, bf16, bf16, 1)
ROTATE(rotate_bf16_bf16_packed, bf16, bf16, 4)
