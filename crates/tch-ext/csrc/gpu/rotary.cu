// Rotary positions. The first kernels rotate dimension i with i + half of the first `parts` entries of x [tokens, heads, entries, head_dim],
// and copy the rest; to another dtype if asked. The others do so for a decoding step, and write its keys and values to their cache. A thread
// has N neighbouring pairs, or N dimensions twice.

constexpr int ROTARY_THREADS = 256;

// Sizes of x, of which a token lies `token` numbers after the one before it; `groups` is the number of threads of an entry: head_dim less
// `half`, divided by N.
struct RotaryShape {
  int64 threads, token;
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

// Rotates dimensions `group`, ... with their partners `half` further of one head, or copies both and what has no partner.
template <typename From, typename To, int N>
DEVICE void rotate_part(const From* from, To* to, const float* cos, const float* sin, int group, int half, bool rotates, float sign) {
  const int other = group + half;
  if (group >= half || !rotates) {
    // Dimensions beyond the rotated ones, and entries that are not rotated, of which the first threads have two parts.
    copy_pack<From, To, N>(from + other, to + other);
    if (group < half) copy_pack<From, To, N>(from + group, to + group);
    return;
  }
  const Pack<From, N> a = load<From, N>(from + group), b = load<From, N>(from + other);
  const Pack<float, N> c = load<float, N>(cos + group), d = load<float, N>(sin + group);
  Pack<To, N> first, second;
  for (int k = 0; k < N; k++) {
    const float turn = sign * d.of[k];
    round_to(wide(a.of[k]) * c.of[k] - wide(b.of[k]) * turn, first.of[k]);
    round_to(wide(b.of[k]) * c.of[k] + wide(a.of[k]) * turn, second.of[k]);
  }
  store(to + group, first);
  store(to + other, second);
}

template <typename From, typename To, int N>
DEVICE void rotate(const From* x, const float* cos, const float* sin, To* out, const RotaryShape& s) {
  for (int64 thread = blockIdx.x * static_cast<int64>(ROTARY_THREADS) + threadIdx.x; thread < s.threads;
       thread += static_cast<int64>(gridDim.x) * ROTARY_THREADS) {
    const int group = thread % s.groups * N;
    const int64 row = thread / s.groups, token = row / s.entries / s.heads, angles = token * s.half;
    const From* from = x + token * s.token + (row - token * s.heads * s.entries) * s.head_dim;
    rotate_part<From, To, N>(from, out + row * s.head_dim, cos + angles, sin + angles, group, s.half, row % s.entries < s.parts, s.sign);
  }
}

// Sizes of a decoding step: numbers between the rows and between the heads of queries, keys and values; `half` is 0 without positions.
struct CachedShape {
  int64 threads;
  int64 rows_of[3], heads_of[3];
  int heads, kv_heads, head_dim, half, groups;
};

// One new token per row: rotates its queries to `out` [rows, heads, head_dim], and its keys to their place in a cache, where its values
// go too; both caches are [places, kv_heads, head_dim].
template <typename T, int N>
DEVICE void rotate_cached(const T* q, const T* k, const T* v, const float* cos, const float* sin, const int64* places, T* out, T* keys,
                          T* values, const CachedShape& s) {
  for (int64 thread = blockIdx.x * static_cast<int64>(ROTARY_THREADS) + threadIdx.x; thread < s.threads;
       thread += static_cast<int64>(gridDim.x) * ROTARY_THREADS) {
    const int group = thread % s.groups * N, all = s.heads + 2 * s.kv_heads;
    const int64 entry = thread / s.groups, row = entry / all;
    int head = entry % all;
    // 0 for queries, 1 for keys, 2 for values.
    const int which = head < s.heads ? 0 : head < s.heads + s.kv_heads ? 1 : 2;
    if (which > 0) head = (head - s.heads) % s.kv_heads;
    const T* from = (which == 0 ? q : which == 1 ? k : v) + row * s.rows_of[which] + head * s.heads_of[which];
    T* to = which == 0 ? out + (row * s.heads + head) * s.head_dim
                       : (which == 1 ? keys : values) + (places[row] * s.kv_heads + head) * s.head_dim;
    rotate_part<T, T, N>(from, to, cos + row * s.half, sin + row * s.half, group, s.half, which < 2, 1);
  }
}

#define ROTATE_CACHED(name, T, N)                                                                                      \
  KERNEL(ROTARY_THREADS)                                                                                               \
  name(const T* q, const T* k, const T* v, const float* cos, const float* sin, const int64* places, T* out, T* keys,   \
       T* values, CachedShape s) {                                                                                     \
    rotate_cached<T, N>(q, k, v, cos, sin, places, out, keys, values, s);                                              \
  }
ROTATE_CACHED(rotate_cached_f32, float, 1)
ROTATE_CACHED(rotate_cached_f32_packed, float, 4)
ROTATE_CACHED(rotate_cached_bf16, bf16, 1)
ROTATE_CACHED(rotate_cached_bf16_packed, bf16, 4)

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
