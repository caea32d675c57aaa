// One token per row: the inverse of the cumulative distribution at the row's draw, or the likeliest. A block per row.

constexpr int SAMPLE_THREADS = 512, SEGMENTS = 256, WARPS = SAMPLE_THREADS / 32;

struct Best {
  float value;
  int64 index;
};

// The larger, of equal ones the first.
struct Better {
  DEVICE_MEMBER Best operator()(const Best& a, const Best& b) const {
    const bool first = a.value > b.value || (a.value == b.value && a.index < b.index);
    return first ? a : b;
  }
  DEVICE_MEMBER Best other(const Best& x, int lane) const { return {of_lane(x.value, lane), of_lane(x.index, lane)}; }
};

struct Least {
  DEVICE_MEMBER int64 operator()(int64 a, int64 b) const { return a < b ? a : b; }
};

struct Most {
  DEVICE_MEMBER int64 operator()(int64 a, int64 b) const { return a > b ? a : b; }
};

template <typename Combine>
DEVICE int64 over_warp(int64 value, Combine combine) {
  for (int step = 16; step > 0; step /= 2) value = combine(value, of_lane(value, own_lane() ^ step));
  return value;
}

// The first token of [from, to) whose cumulative sum, from `before` on, exceeds `target`; without one the last that has a probability.
// Each warp does the same.
template <typename T>
DEVICE int64 token_in(const T* logits, int64 from, int64 to, double before, double target, float most, float inv_temperature) {
  const int64 none = 1ll << 62;
  int64 found = none, last = from;
  for (int64 start = from; start < to && found == none; start += 32) {
    const int64 i = start + own_lane();
    const double own = i < to ? expf(wide(logits[i]) * inv_temperature - most) : 0;
    double sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const int lane = own_lane() - step;
      const double left = of_lane(sum, lane < 0 ? own_lane() : lane);
      if (lane >= 0) sum += left;
    }
    found = over_warp(own > 0 && before + sum > target ? i : none, Least());
    last = over_warp(own > 0 ? i : last, Most());
    before += of_lane(sum, 31);
  }
  return found == none ? last : found;
}

template <typename T>
DEVICE void sample(const T* all, const double* draws, int64* tokens, float* logprobs, int64 vocab, float inv_temperature) {
  SHARED(double, sums, SEGMENTS);
  const int64 row = blockIdx.x;
  const T* logits = all + row * vocab;
  Best own = {-infinity(), vocab - 1};
  for (int64 i = threadIdx.x; i < vocab; i += SAMPLE_THREADS) own = Better()(own, Best{wide(logits[i]) * inv_temperature, i});
  const Best best = over_block<SAMPLE_THREADS>(own, Better());

  const int64 length = ((vocab + SEGMENTS - 1) / SEGMENTS + 31) / 32 * 32;
  for (int round = 0; round < SEGMENTS / WARPS; round++) {
    const int64 segment = threadIdx.x / 32 * (SEGMENTS / WARPS) + round, from = segment * length;
    double sum = 0;
    for (int64 i = from + own_lane(); i < vocab && i < from + length; i += 32)
      sum += expf(wide(logits[i]) * inv_temperature - best.value);
    for (int step = 16; step > 0; step /= 2) sum += of_lane(sum, own_lane() ^ step);
    if (own_lane() == 0) sums[segment] = sum;
  }
  __syncthreads();
  double total = 0;
  for (int i = 0; i < SEGMENTS; i++) total += sums[i];

  int64 token = best.index;
  if (draws) {
    const double target = draws[row] * total;
    double before = 0;
    int64 segment = -1, last = 0;
    double start = 0, start_of_last = 0;
    for (int i = 0; i < SEGMENTS; i++) {
      if (sums[i] > 0) last = i, start_of_last = before;
      if (segment < 0 && before + sums[i] > target) segment = i, start = before;
      before += sums[i];
    }
    if (segment < 0) segment = last, start = start_of_last;
    const int64 from = segment * length, to = from + length < vocab ? from + length : vocab;
    token = token_in(logits, from, to, start, target, best.value, inv_temperature);
  }
  if (threadIdx.x != 0) return;
  tokens[row] = token;
  logprobs[row] = wide(logits[token]) * inv_temperature - (best.value + static_cast<float>(log(total)));
}

KERNEL(SAMPLE_THREADS)
logits_sample_f32(const float* logits, const double* draws, int64* tokens, float* logprobs, int64 vocab, float inv_temperature) {
  sample(logits, draws, tokens, logprobs, vocab, inv_temperature);
}
KERNEL(SAMPLE_THREADS)
logits_sample_bf16(const bf16* logits, const double* draws, int64* tokens, float* logprobs, int64 vocab, float inv_temperature) {
  sample(logits, draws, tokens, logprobs, vocab, inv_temperature);
}
