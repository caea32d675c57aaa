// Steps of AdamW with moments in bf16 or in 8 bits, in the order of kernels.cpp. One pass over memory.

constexpr int ADAM_THREADS = 256;

// As kernels.h has it.
struct AdamWStep {
  float decay, beta1, first_weight, beta2, second_weight, size, root, eps;
};

DEVICE void step_of(const AdamWStep& s, float& param, float grad, float& first, float& second) {
  first = first * s.beta1 + s.first_weight * grad;
  second = second * s.beta2 + s.second_weight * grad * grad;
  param = param * s.decay - s.size * first / (sqrtf(second) / s.root + s.eps);
}

// Number `number`, from 0, of SplitMix64 with the state `key`: four words of 16 bits.
DEVICE uint64 random_words(uint64 key, int64 number) {
  uint64 x = key + static_cast<uint64>(number + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// One of the neighbours in bf16: a carry out of the lost bits is the one that is farther from 0.
DEVICE bf16 rounded(float x, uint64 words, int place) {
  const unsigned word = static_cast<unsigned>(words >> (16 * place)) & 0xffffu;
  return {static_cast<unsigned short>((__float_as_uint(x) + word) >> 16)};
}

// Parameter, gradient and moments in bf16, rounded at random by three keys. A thread has four numbers, which it reads and writes at once if
// all tensors begin at multiples of 8 bytes.
KERNEL(ADAM_THREADS)
adamw_rounded(AdamWStep step, bf16* params, const bf16* grads, bf16* firsts, bf16* seconds, int64 count, uint64 key,
              uint64 key1, uint64 key2, int aligned) {
  const int64 quads = (count + 3) / 4;
  for (int64 quad = blockIdx.x * static_cast<int64>(ADAM_THREADS) + threadIdx.x; quad < quads;
       quad += static_cast<int64>(gridDim.x) * ADAM_THREADS) {
    const uint64 words = random_words(key, quad), words1 = random_words(key1, quad), words2 = random_words(key2, quad);
    const int64 at = quad * 4;
    const bool whole = aligned && at + 4 <= count;
    Pack<bf16, 4> p, g, m, v;
    if (whole) {
      p = load<bf16, 4>(params + at), g = load<bf16, 4>(grads + at);
      m = load<bf16, 4>(firsts + at), v = load<bf16, 4>(seconds + at);
    }
    for (int k = 0; k < 4; k++) {
      if (at + k >= count) break;
      if (!whole) p.of[k] = params[at + k], g.of[k] = grads[at + k], m.of[k] = firsts[at + k], v.of[k] = seconds[at + k];
      float param = wide(p.of[k]), first = wide(m.of[k]), second = wide(v.of[k]);
      step_of(step, param, wide(g.of[k]), first, second);
      p.of[k] = rounded(param, words, k), m.of[k] = rounded(first, words1, k), v.of[k] = rounded(second, words2, k);
      if (!whole) params[at + k] = p.of[k], firsts[at + k] = m.of[k], seconds[at + k] = v.of[k];
    }
    if (whole) store(params + at, p), store(firsts + at, m), store(seconds + at, v);
  }
}

// A moment in 8 bits: codes by number, the greatest magnitude of each block of 256, and the tables of its map.
struct BlockedMoment {
  unsigned char* codes;
  float* absmax;
  const float* map;
  const float* middles;
  const unsigned char* least_codes;
};

DEVICE void store_code(const BlockedMoment& moment, int64 at, bool is_there, float value) {
  const float top = over_block<ADAM_THREADS>(is_there ? fabsf(value) : 0, Largest());
  const float absmax = top == 0 ? 1 : top;
  if (threadIdx.x == 0) moment.absmax[blockIdx.x] = absmax;
  if (!is_there) return;
  const float scaled = value / absmax;
  const unsigned char least = moment.least_codes[__float_as_uint(scaled) >> 16];
  moment.codes[at] = static_cast<unsigned char>(least + (moment.middles[least] < scaled ? 1 : 0));
}

// Parameter and gradient in f32, moments in 8 bits. A block of threads has a block of numbers.
KERNEL(ADAM_THREADS)
adamw_blocked(AdamWStep step, float* params, const float* grads, BlockedMoment first, BlockedMoment second, int64 count) {
  const int64 at = blockIdx.x * static_cast<int64>(ADAM_THREADS) + threadIdx.x;
  const bool is_there = at < count;
  float m = 0, v = 0;
  if (is_there) {
    m = first.map[first.codes[at]] * first.absmax[blockIdx.x];
    v = second.map[second.codes[at]] * second.absmax[blockIdx.x];
    float param = params[at];
    step_of(step, param, grads[at], m, v);
    params[at] = param;
  }
  store_code(first, at, is_there, m);
  store_code(second, at, is_there, v);
}
