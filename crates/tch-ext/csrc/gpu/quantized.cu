// Products of few rows with a weight in four bits, of which no values are stored: a warp has COLUMNS outputs of ROWS rows, and its lanes every
// 32nd pack of CODES inputs. The weight is read once for each ROWS rows. Weights are not rounded, sums are in f32.

constexpr int QUANTIZED_THREADS = 256, COLUMNS = 4, CODES = 32;

// Sizes of the weight [out, in], of which `in` is a multiple of CODES, and of its scales, one for 2^shift consecutive values.
struct QuantizedShape {
  int64 in, out, rows, nested_block;
  int shift;
  float offset;
};

// Scale number `block`: from `scales`, or with `nested` the value of its code times its own block's scale, plus the offset.
DEVICE float scale_of(const float* scales, const unsigned char* nested, const float* nested_map, const float* nested_scales, int64 block,
                      const QuantizedShape& s) {
  if (scales) return scales[block];
  return nested_map[nested[block]] * nested_scales[block / s.nested_block] + s.offset;
}

// `bias` may be null. Two codes are in a byte, the first in its upper half.
template <typename T, int ROWS>
DEVICE void few_rows(const T* x, const unsigned char* codes, const float* map, const float* scales, const unsigned char* nested,
                     const float* nested_map, const float* nested_scales, const T* bias, T* out, const QuantizedShape& s) {
  SHARED(float, values, 16);
  if (threadIdx.x < 16) values[threadIdx.x] = map[threadIdx.x];
  __syncthreads();
  const int64 first_row = static_cast<int64>(blockIdx.y) * ROWS;
  const int64 first = (static_cast<int64>(blockIdx.x) * (QUANTIZED_THREADS / 32) + threadIdx.x / 32) * COLUMNS;
  float sums[COLUMNS][ROWS] = {};
  for (int64 i = own_lane() * CODES; i < s.in; i += 32 * CODES) {
    Pack<unsigned char, CODES / 2> packs[COLUMNS];
    float factors[COLUMNS], dots[COLUMNS][ROWS] = {};
    for (int c = 0; c < COLUMNS; c++) {
      // Beyond the last output it is computed again, and not written.
      const int64 column = first + c < s.out ? first + c : s.out - 1, at = column * s.in + i;
      packs[c] = load<unsigned char, CODES / 2>(codes + at / 2);
      factors[c] = scale_of(scales, nested, nested_map, nested_scales, at >> s.shift, s);
    }
    for (int part = 0; part < CODES / 8; part++) {
      float inputs[ROWS][8];
      for (int r = 0; r < ROWS; r++) {
        const int64 row = first_row + r < s.rows ? first_row + r : s.rows - 1;
        const Pack<T, 8> pack = load<T, 8>(x + row * s.in + i + part * 8);
        for (int k = 0; k < 8; k++) inputs[r][k] = wide(pack.of[k]);
      }
      for (int c = 0; c < COLUMNS; c++)
        for (int k = 0; k < 4; k++) {
          const unsigned char byte = packs[c].of[part * 4 + k];
          const float a = values[byte >> 4], b = values[byte & 15];
          for (int r = 0; r < ROWS; r++) dots[c][r] += inputs[r][2 * k] * a + inputs[r][2 * k + 1] * b;
        }
    }
    for (int c = 0; c < COLUMNS; c++)
      for (int r = 0; r < ROWS; r++) sums[c][r] += dots[c][r] * factors[c];
  }
  for (int c = 0; c < COLUMNS; c++)
    for (int r = 0; r < ROWS; r++) {
      float sum = sums[c][r];
      for (int step = 16; step > 0; step /= 2) sum += of_lane(sum, own_lane() ^ step);
      const int64 column = first + c, row = first_row + r;
      if (own_lane() != 0 || column >= s.out || row >= s.rows) continue;
      round_to(bias ? sum + wide(bias[column]) : sum, out[row * s.out + column]);
    }
}

#define QUANTIZED(name, T, ROWS)                                                                                              \
  KERNEL(QUANTIZED_THREADS)                                                                                                   \
  name(const T* x, const unsigned char* codes, const float* map, const float* scales, const unsigned char* nested,            \
       const float* nested_map, const float* nested_scales, const T* bias, T* out, QuantizedShape s) {                        \
    few_rows<T, ROWS>(x, codes, map, scales, nested, nested_map, nested_scales, bias, out, s);                                \
  }
QUANTIZED(quantized_row_f32, float, 1)
QUANTIZED(quantized_rows_f32, float, 4)
QUANTIZED(quantized_row_bf16, bf16, 1)
QUANTIZED(quantized_rows_bf16, bf16, 4)
