// RMS norms and layer norms over rows of f32, with an output in f32 or bf16, and sums of the residual stream.

constexpr int NORM_THREADS = 256;

// y = (x - mean) rstd (weight + offset) + bias; without `center` the mean is 0. `bias` and `mean` may be null. A block per row.
template <typename T>
DEVICE void norm(const float* all, const float* weight, const float* bias, T* out, float* means, float* rstds, int64 width,
                 float eps, float offset, int center) {
  const int64 row = blockIdx.x;
  const float* x = all + row * width;
  float mean = 0;
  if (center) {
    float own = 0;
    for (int64 i = threadIdx.x; i < width; i += NORM_THREADS) own += x[i];
    mean = over_block<NORM_THREADS>(own, Add()) / width;
  }
  float own = 0;
  for (int64 i = threadIdx.x; i < width; i += NORM_THREADS) own += (x[i] - mean) * (x[i] - mean);
  const float rstd = 1 / sqrtf(over_block<NORM_THREADS>(own, Add()) / width + eps);
  for (int64 i = threadIdx.x; i < width; i += NORM_THREADS) {
    const float y = (x[i] - mean) * rstd * (weight[i] + offset);
    round_to(bias ? y + bias[i] : y, out[row * width + i]);
  }
  if (threadIdx.x != 0) return;
  rstds[row] = rstd;
  if (means) means[row] = mean;
}

// The gradient of x: with g = dy (weight + offset) and the normalized numbers n, rstd (g - mean(g n) n), less mean(g) where x was centred.
template <typename T>
DEVICE void norm_gradient(const T* of_out, const float* all, const float* weight, const float* means, const float* rstds,
                          float* of_x, int64 width, float offset, int center) {
  const int64 row = blockIdx.x, start = row * width;
  const float mean = center ? means[row] : 0, rstd = rstds[row];
  float sum = 0, product = 0;
  for (int64 i = threadIdx.x; i < width; i += NORM_THREADS) {
    const float g = wide(of_out[start + i]) * (weight[i] + offset);
    sum += g;
    product += g * (all[start + i] - mean) * rstd;
  }
  product = over_block<NORM_THREADS>(product, Add()) / width;
  sum = center ? over_block<NORM_THREADS>(sum, Add()) / width : 0;
  for (int64 i = threadIdx.x; i < width; i += NORM_THREADS) {
    const float g = wide(of_out[start + i]) * (weight[i] + offset);
    of_x[start + i] = rstd * (g - sum - (all[start + i] - mean) * rstd * product);
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
                int64 width, float eps, float offset, int center) {                                                    \
    norm(x, weight, bias, out, means, rstds, width, eps, offset, center);                                              \
  }                                                                                                                    \
  KERNEL(NORM_THREADS)                                                                                                 \
  norm_gradient_##suffix(const T* of_out, const float* x, const float* weight, const float* means, const float* rstds, \
                         float* of_x, int64 width, float offset, int center) {                                         \
    norm_gradient(of_out, x, weight, means, rstds, of_x, width, offset, center);                                       \
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
