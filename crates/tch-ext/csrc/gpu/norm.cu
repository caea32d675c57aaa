// RMS norms and layer norms over rows of f32, with an output in f32 or bf16, and sums of the residual stream.

constexpr int NORM_THREADS = 256;

// A norm of rows: y = (x - mean) rstd (weight + offset) + bias; without `center` the mean is 0.
struct NormShape {
  int64 width;
  float eps, offset;
  int center;
};

// Writes the norm of a row that the thread's own numbers of `x` are of: numbers threadIdx.x, threadIdx.x + NORM_THREADS, ... `bias` and `means`
// may be null.
template <typename T>
DEVICE void norm_row(const float* x, const float* weight, const float* bias, T* out, float* means, float* rstds, const NormShape& s) {
  const int64 row = blockIdx.x;
  float mean = 0;
  if (s.center) {
    float own = 0;
    for (int64 i = threadIdx.x; i < s.width; i += NORM_THREADS) own += x[i];
    mean = over_block<NORM_THREADS>(own, Add()) / s.width;
  }
  float own = 0;
  for (int64 i = threadIdx.x; i < s.width; i += NORM_THREADS) own += (x[i] - mean) * (x[i] - mean);
  const float rstd = 1 / sqrtf(over_block<NORM_THREADS>(own, Add()) / s.width + s.eps);
  for (int64 i = threadIdx.x; i < s.width; i += NORM_THREADS) {
    const float y = (x[i] - mean) * rstd * (weight[i] + s.offset);
    round_to(bias ? y + bias[i] : y, out[row * s.width + i]);
  }
  if (threadIdx.x != 0) return;
  rstds[row] = rstd;
  if (means) means[row] = mean;
}

// The norm of rows, a block each.
template <typename T>
DEVICE void norm(const float* all, const float* weight, const float* bias, T* out, float* means, float* rstds, const NormShape& s) {
  norm_row(all + blockIdx.x * s.width, weight, bias, out, means, rstds, s);
}

// The residual stream x + a + b and its norm; `b` may be null. Each thread reads again only the sums that it has written.
template <typename T, typename O>
DEVICE void sum_norm(const float* x, const T* a, const T* b, const float* weight, const float* bias, float* sums, O* out, float* means,
                     float* rstds, const NormShape& s) {
  const int64 start = blockIdx.x * s.width;
  for (int64 i = threadIdx.x; i < s.width; i += NORM_THREADS) {
    const float sum = x[start + i] + wide(a[start + i]);
    sums[start + i] = b ? sum + wide(b[start + i]) : sum;
  }
  norm_row(sums + start, weight, bias, out, means, rstds, s);
}

// The gradient of x: with g = dy (weight + offset) and the normalized numbers n, rstd (g - mean(g n) n), less mean(g) where x was centred;
// and `of_sums`, the gradient of x itself, if it is not null. `of_branch`, if it is not null, gets the same, rounded.
template <typename T>
DEVICE void norm_gradient(const T* of_out, const float* of_sums, const float* all, const float* weight, const float* means,
                          const float* rstds, float* of_x, bf16* of_branch, const NormShape& s) {
  const int64 row = blockIdx.x, start = row * s.width;
  const float mean = s.center ? means[row] : 0, rstd = rstds[row];
  float sum = 0, product = 0;
  for (int64 i = threadIdx.x; i < s.width; i += NORM_THREADS) {
    const float g = wide(of_out[start + i]) * (weight[i] + s.offset);
    sum += g;
    product += g * (all[start + i] - mean) * rstd;
  }
  product = over_block<NORM_THREADS>(product, Add()) / s.width;
  sum = s.center ? over_block<NORM_THREADS>(sum, Add()) / s.width : 0;
  for (int64 i = threadIdx.x; i < s.width; i += NORM_THREADS) {
    const float g = wide(of_out[start + i]) * (weight[i] + s.offset);
    float dx = rstd * (g - sum - (all[start + i] - mean) * rstd * product);
    if (of_sums) dx = of_sums[start + i] + dx;
    of_x[start + i] = dx;
    if (of_branch) round_to(dx, of_branch[start + i]);
  }
}

// Sums over the rows of a part, for the gradients of weight and bias: [parts, width] each. A thread has a column; `of_bias` may be null.
template <typename T>
DEVICE void norm_weight_gradient(const T* of_out, const float* all, const float* means, const float* rstds, float* of_weight,
                                 float* of_bias, int64 rows, int64 width, int64 rows_of_part, int center) {
  const int64 column = blockIdx.x * static_cast<int64>(NORM_THREADS) + threadIdx.x, part = blockIdx.y;
  if (column >= width) return;
  const int64 from = part * rows_of_part, to = from + rows_of_part < rows ? from + rows_of_part : rows;
  float weight = 0, bias = 0;
  for (int64 row = from; row < to; row++) {
    const float dy = wide(of_out[row * width + column]);
    weight += dy * (all[row * width + column] - (center ? means[row] : 0)) * rstds[row];
    bias += dy;
  }
  of_weight[part * width + column] = weight;
  if (of_bias) of_bias[part * width + column] = bias;
}

// out = x + a + b; `b` may be null. N numbers at once.
template <typename T, int N>
DEVICE void residual(const float* x, const T* a, const T* b, float* out, int64 packs) {
  for (int64 i = blockIdx.x * static_cast<int64>(NORM_THREADS) + threadIdx.x; i < packs;
       i += static_cast<int64>(gridDim.x) * NORM_THREADS) {
    Pack<float, N> sum = load<float, N>(x + i * N);
    const Pack<T, N> first = load<T, N>(a + i * N);
    for (int k = 0; k < N; k++) sum.of[k] += wide(first.of[k]);
    if (b) {
      const Pack<T, N> second = load<T, N>(b + i * N);
      for (int k = 0; k < N; k++) sum.of[k] += wide(second.of[k]);
    }
    store(out + i * N, sum);
  }
}

#define NORM(suffix, T)                                                                                                \
  KERNEL(NORM_THREADS)                                                                                                 \
  norm_##suffix(const float* x, const float* weight, const float* bias, T* out, float* means, float* rstds,            \
                NormShape s) {                                                                                         \
    norm(x, weight, bias, out, means, rstds, s);                                                                       \
  }                                                                                                                    \
  KERNEL(NORM_THREADS)                                                                                                 \
  sum_norm_##suffix(const float* x, const T* a, const T* b, const float* weight, const float* bias, float* sums,       \
                    T* out, float* means, float* rstds, NormShape s) {                                                 \
    sum_norm(x, a, b, weight, bias, sums, out, means, rstds, s);                                                       \
  }                                                                                                                    \
  KERNEL(NORM_THREADS)                                                                                                 \
  norm_gradient_##suffix(const T* of_out, const float* of_sums, const float* x, const float* weight,                   \
                         const float* means, const float* rstds, float* of_x, bf16* of_branch, NormShape s) {          \
    norm_gradient(of_out, of_sums, x, weight, means, rstds, of_x, of_branch, s);                                       \
  }                                                                                                                    \
  KERNEL(NORM_THREADS)                                                                                                 \
  norm_weight_gradient_##suffix(const T* of_out, const float* x, const float* means, const float* rstds,               \
                                float* of_weight, float* of_bias, int64 rows, int64 width, int64 rows_of_part,         \
                                int center) {                                                                          \
    norm_weight_gradient(of_out, x, means, rstds, of_weight, of_bias, rows, width, rows_of_part, center);              \
  }                                                                                                                    \
  KERNEL(NORM_THREADS) residual_##suffix(const float* x, const T* a, const T* b, float* out, int64 packs) {            \
    residual<T, 1>(x, a, b, out, packs);                                                                               \
  }                                                                                                                    \
  KERNEL(NORM_THREADS) residual_##suffix##_packed(const float* x, const T* a, const T* b, float* out, int64 packs) {   \
    residual<T, 4>(x, a, b, out, packs);                                                                               \
  }
NORM(f32, float)
NORM(bf16, bf16)
// Branches in bf16 and a norm in f32: the last of a model.
KERNEL(NORM_THREADS)
sum_norm_bf16_f32(const float* x, const bf16* a, const bf16* b, const float* weight, const float* bias, float* sums, float* out,
                  float* means, float* rstds, NormShape s) {
  sum_norm(x, a, b, weight, bias, sums, out, means, rstds, s);
}
