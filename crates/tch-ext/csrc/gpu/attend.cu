// Attention of one new token per row to the keys and values of a cache: a block per row, key head and CHUNK positions, then a block per row
// and head that combines them in their order. Chunks follow positions, so a row's numbers do not depend on other rows or on the cache's
// capacity, and positions without a token cost nothing.

constexpr int ATTEND_THREADS = 128, CHUNK = 128, MOST_GROUP = 16, MOST_DIM = 256, KEY_LANES = 8;

// Sizes: q is [rows, heads, dim]; keys and values are [rows * capacity, kv_heads * dim]; `group` query heads share a key head. `chunks` of a row
// may have tokens. `window` is 0 for none.
struct AttendShape {
  int64 capacity, window;
  int heads, kv_heads, dim, group, chunks;
  float scale;
};

// Positions [from, to) of a chunk that the row's new token sees.
struct Span {
  int64 from, to;
};

DEVICE Span span_of(const AttendShape& s, int64 length, int chunk) {
  // A row has no more places.
  if (length > s.capacity) length = s.capacity;
  const int64 first = s.window > 0 && length > s.window ? length - s.window : 0, start = static_cast<int64>(chunk) * CHUNK;
  const int64 end = start + CHUNK < length ? start + CHUNK : length;
  return {start > first ? start : first, end};
}

// Writes the largest score, the sum of exponentials relative to it, and the weighted sum of the values, of each query head of the group:
// `tops` and `sums` [rows, kv_heads, chunks, group], `parts` [rows, kv_heads, chunks, group, dim].
template <typename T, int N>
DEVICE void attend(const T* q, const T* keys, const T* values, const int64* lengths, float* tops, float* sums, float* parts,
                   const AttendShape& s) {
  SHARED(float, queries, MOST_GROUP * MOST_DIM);
  SHARED(float, scores, MOST_GROUP * CHUNK);
  const int chunk = blockIdx.y, key_head = blockIdx.x % s.kv_heads, thread = threadIdx.x;
  const int64 row = blockIdx.x / s.kv_heads;
  const Span span = span_of(s, lengths[row], chunk);
  // The same for all threads of the block.
  if (span.from >= span.to) return;
  const int64 start = static_cast<int64>(chunk) * CHUNK, width = static_cast<int64>(s.kv_heads) * s.dim;
  const int64 first = row * s.capacity * width + key_head * s.dim;
  for (int i = thread; i < s.group * s.dim; i += ATTEND_THREADS)
    queries[i] = wide(q[(row * s.heads + key_head * s.group) * s.dim + i]) * s.scale;
  __syncthreads();

  // Each key by KEY_LANES lanes, which read neighbouring packs of it.
  const int lane = thread % KEY_LANES;
  for (int key = thread / KEY_LANES; key < CHUNK; key += ATTEND_THREADS / KEY_LANES) {
    const int64 position = start + key;
    const bool is_there = position >= span.from && position < span.to;
    for (int g = 0; g < s.group; g++) {
      float score = 0;
      for (int at = lane * N; is_there && at < s.dim; at += KEY_LANES * N) {
        const Pack<T, N> pack = load<T, N>(keys + first + position * width + at);
        for (int k = 0; k < N; k++) score += wide(pack.of[k]) * queries[g * s.dim + at + k];
      }
      for (int step = KEY_LANES / 2; step > 0; step /= 2) score += of_lane(score, own_lane() ^ step);
      if (lane == 0) scores[g * CHUNK + key] = is_there ? score : -infinity();
    }
  }
  __syncthreads();

  const int64 place = (static_cast<int64>(blockIdx.x) * s.chunks + chunk) * s.group;
  for (int g = 0; g < s.group; g++) {
    const float own = scores[g * CHUNK + thread];
    const float top = over_block<ATTEND_THREADS>(own, Largest());
    const float weight = expf(own - top);
    scores[g * CHUNK + thread] = weight;
    const float sum = over_block<ATTEND_THREADS>(weight, Add());
    if (thread == 0) tops[place + g] = top, sums[place + g] = sum;
  }
  // The threads have the dimensions, of one query head after another.
  const int from = static_cast<int>(span.from - start), to = static_cast<int>(span.to - start);
  for (int i = thread; i < s.group * s.dim; i += ATTEND_THREADS) {
    const int g = i / s.dim, dim = i % s.dim;
    const T* value = values + first + start * width + dim;
    float sum = 0;
    for (int key = from; key < to; key++) sum += scores[g * CHUNK + key] * wide(value[key * width]);
    parts[place * s.dim + i] = sum;
  }
}

// Combines the chunks of a row and head; a thread has every ATTEND_THREADS-th dimension.
template <typename T>
DEVICE void combine(const int64* lengths, const float* tops, const float* sums, const float* parts, T* out, const AttendShape& s) {
  const int head = blockIdx.x % s.heads, g = head % s.group;
  const int64 row = blockIdx.x / s.heads, of_row = (row * s.kv_heads + head / s.group) * s.chunks;
  const int64 length = lengths[row];
  for (int dim = threadIdx.x; dim < s.dim; dim += ATTEND_THREADS) {
    float top = -infinity(), sum = 0, value = 0;
    for (int chunk = 0; chunk < s.chunks; chunk++) {
      const Span span = span_of(s, length, chunk);
      if (span.from >= span.to) continue;
      const int64 place = (of_row + chunk) * s.group + g;
      const float most = fmaxf(top, tops[place]), old = sum == 0 ? 0 : expf(top - most), fresh = expf(tops[place] - most);
      sum = sum * old + sums[place] * fresh;
      value = value * old + parts[place * s.dim + dim] * fresh;
      top = most;
    }
    round_to(value / sum, out[(row * s.heads + head) * s.dim + dim]);
  }
}

#define ATTEND(suffix, T, N)                                                                                                       \
  KERNEL(ATTEND_THREADS)                                                                                                           \
  attend_##suffix(const T* q, const T* keys, const T* values, const int64* lengths, float* tops, float* sums, float* parts,        \
                  AttendShape s) {                                                                                                 \
    attend<T, N>(q, keys, values, lengths, tops, sums, parts, s);                                                                  \
  }                                                                                                                                \
  KERNEL(ATTEND_THREADS)                                                                                                           \
  attend_combine_##suffix(const int64* lengths, const float* tops, const float* sums, const float* parts, T* out, AttendShape s) { \
    combine(lengths, tops, sums, parts, out, s);                                                                                   \
  }
ATTEND(f32, float, 4)
ATTEND(bf16, bf16, 8)
