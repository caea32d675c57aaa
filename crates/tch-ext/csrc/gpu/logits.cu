// Log-probabilities of targets, their entropies, and the gradient of the logits: a block per row.

// Largest z, and relative to it the sums of exp(z - most) and (z - most) exp(z - most).
struct Sums {
  float most, sum, weighted;
};

DEVICE Sums relative_to(const Sums& s, float most) {
  if (s.sum == 0) return {most, 0, 0};
  const float gap = s.most - most, scale = expf(gap);
  return {most, s.sum * scale, (s.weighted + gap * s.sum) * scale};
}

struct AddSums {
  DEVICE_MEMBER Sums operator()(const Sums& a, const Sums& b) const {
    const float most = fmaxf(a.most, b.most);
    if (most == -infinity()) return {most, a.sum + b.sum, 0};
    const Sums x = relative_to(a, most), y = relative_to(b, most);
    return {most, x.sum + y.sum, x.weighted + y.weighted};
  }
  DEVICE_MEMBER Sums other(const Sums& x, int lane) const {
    return {of_lane(x.most, lane), of_lane(x.sum, lane), of_lane(x.weighted, lane)};
  }
};

// Adds N logits. A logit of -inf has weight 0, and one that is not a number makes the sum none.
template <typename T, int N>
DEVICE void add(Sums& sums, const Pack<T, N>& logits, float inv_temperature) {
  float z[N], most = sums.most;
  for (int i = 0; i < N; i++) {
    z[i] = wide(logits.of[i]) * inv_temperature;
    most = fmaxf(most, z[i]);
  }
  if (most == -infinity()) {
    for (int i = 0; i < N; i++) sums.sum += z[i] != z[i] ? z[i] : 0;
    return;
  }
  if (most > sums.most) sums = relative_to(sums, most);
  for (int i = 0; i < N; i++) {
    const float gap = z[i] - most, e = expf(gap);
    sums.sum += e;
    sums.weighted += e > 0 ? gap * e : 0;
  }
}

constexpr int ROW_THREADS = 512;

// `entropy` may be null. A target outside of the vocabulary gives a log-probability that is no number.
template <typename T, int N>
DEVICE void stats(const T* all, const int64* targets, float* logprobs, float* lse, float* entropy, int64 vocab,
                  float inv_temperature) {
  const int64 row = blockIdx.x;
  const T* logits = all + row * vocab;
  Sums own = {-infinity(), 0, 0};
  for (int64 i = threadIdx.x * N; i < vocab; i += ROW_THREADS * N) add(own, load<T, N>(logits + i), inv_temperature);
  const Sums sums = over_block<ROW_THREADS>(own, AddSums());
  if (threadIdx.x != 0) return;
  const float log_sum = logf(sums.sum), log_all = sums.most + log_sum;
  const int64 target = targets[row];
  lse[row] = log_all;
  logprobs[row] = target < 0 || target >= vocab ? infinity() - infinity() : wide(logits[target]) * inv_temperature - log_all;
  if (entropy) entropy[row] = log_sum - sums.weighted / sums.sum;
}

// Replaces logits by the gradient of sum(slopes * logprobs) + sum(of_entropy * entropies); the last two arguments may be null.
template <typename T, int N>
DEVICE void gradient(T* all, const int64* targets, const float* lse, const float* slopes, const float* entropies,
                     const float* of_entropy, int64 vocab, float inv_temperature) {
  // Log-probabilities below this have probability 0 in f32. They are clamped, as 0 * -inf is NaN.
  const float least = -200;
  const int64 row = blockIdx.x, target = targets[row];
  T* logits = all + row * vocab;
  const float log_all = lse[row], slope = slopes[row] * inv_temperature;
  const float turn = entropies ? of_entropy[row] * inv_temperature : 0, entropy = entropies ? entropies[row] : 0;
  for (int64 i = threadIdx.x * N; i < vocab; i += ROW_THREADS * N) {
    Pack<T, N> pack = load<T, N>(logits + i);
    for (int k = 0; k < N; k++) {
      const float log_p = wide(pack.of[k]) * inv_temperature - log_all, p = expf(log_p);
      float g = i + k == target ? slope * (1 - p) : -slope * p;
      if (turn != 0) g -= turn * p * (fmaxf(log_p, least) + entropy);
      round_to(g, pack.of[k]);
    }
    store(logits + i, pack);
  }
}

#define STATS(name, T, N)                                                                                             \
  KERNEL(ROW_THREADS)                                                                                                 \
  name(const T* logits, const int64* targets, float* logprobs, float* lse, float* entropy, int64 vocab,               \
       float inv_temperature) {                                                                                       \
    stats<T, N>(logits, targets, logprobs, lse, entropy, vocab, inv_temperature);                                     \
  }
#define GRADIENT(name, T, N)                                                                                          \
  KERNEL(ROW_THREADS)                                                                                                 \
  name(T* logits, const int64* targets, const float* lse, const float* slopes, const float* entropies,                \
       const float* of_entropy, int64 vocab, float inv_temperature) {                                                 \
    gradient<T, N>(logits, targets, lse, slopes, entropies, of_entropy, vocab, inv_temperature);                      \
  }
STATS(logits_stats_f32, float, 1)
STATS(logits_stats_f32_packed, float, 4)
STATS(logits_stats_bf16, bf16, 1)
STATS(logits_stats_bf16_packed, bf16, 8)
GRADIENT(logits_gradient_f32, float, 1)
GRADIENT(logits_gradient_f32_packed, float, 4)
GRADIENT(logits_gradient_bf16, bf16, 1)
GRADIENT(logits_gradient_bf16_packed, bf16, 8)
