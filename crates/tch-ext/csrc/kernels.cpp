// Compiled once per instruction set; TCH_EXT_KERNELS is the name of the table that it defines. Uses libtorch's vectors
// (AVX-512, AVX2, NEON, or plain loops) and its thread pool.
#include "kernels.h"

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#ifdef TCH_EXT_X86
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace tch_ext {
namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t W = Vec::size();
constexpr float INF = std::numeric_limits<float>::infinity();

int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

// While it lives, this thread takes denormal numbers (below 1.2e-38) as zeros. An x86 processor multiplies them a hundred times slower than
// others, and fast decays of the delta rule and sharp attention have many: an SFT step of a Qwen3.5 took a third longer with them.
// Used by `for_each_task` alone: norms, softmaxes, gates and optimizer steps keep them.
class FlushDenormals {
 public:
#ifdef TCH_EXT_X86
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | FLUSH); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  // Of results, and of operands.
  static constexpr unsigned FLUSH = 1u << 15 | 1u << 6;
  unsigned before_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | FLUSH));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  static constexpr uint64_t FLUSH = 1u << 24;
  uint64_t before_;
#endif
};

// Runs `f(task)` for each task on libtorch's threads. The assignment to threads is arbitrary, so tasks must write to
// disjoint memory.
template <typename F>
void for_each_task(int64_t tasks, const F& f) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(tasks, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    const FlushDenormals flush;
    for (int64_t task; (task = next++) < tasks;) f(task);
  });
}

// Array of floats, aligned to cache lines. Not a std::vector: the linker keeps one copy of its code for all instruction
// sets, possibly one that the CPU does not support.
class Floats {
 public:
  explicit Floats(int64_t size = 0) { grow(size); }
  ~Floats() { release(); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;

  float* data() { return data_; }

  // Discards the contents.
  void grow(int64_t size) {
    if (size <= size_) return;
    release();
    data_ = static_cast<float*>(::operator new(size * sizeof(float), LINE));
    size_ = size;
  }

 private:
  static constexpr std::align_val_t LINE{64};
  float* data_ = nullptr;
  int64_t size_ = 0;

  void release() {
    ::operator delete(data_, LINE);
    data_ = nullptr;
    size_ = 0;
  }
};

// Scratch memory of a thread, reused from call to call and divided into pieces.
class Scratch {
 public:
  explicit Scratch(std::initializer_list<int64_t> sizes) {
    thread_local Floats kept;
    int64_t total = 0;
    for (int64_t size : sizes) total += padded(size);
    kept.grow(total);
    next_ = kept.data();
  }
  float* take(int64_t size) {
    float* piece = next_;
    next_ += padded(size);
    return piece;
  }

 private:
  float* next_;
};

void clear(float* x, int64_t n) { std::memset(x, 0, n * sizeof(float)); }

void load_row(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
void load_row(const c10::BFloat16* from, float* to, int64_t n) { at::vec::convert(from, to, n); }
void store_row(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
void store_row(const float* from, c10::BFloat16* to, int64_t n) { at::vec::convert(from, to, n); }

// Returns `n` floats at `from`: the pointer itself for floats, else the values converted into `buffer`.
const float* floats(const float* from, float*, int64_t) { return from; }
const float* floats(const c10::BFloat16* from, float* buffer, int64_t n) {
  load_row(from, buffer, n);
  return buffer;
}

Vec some(const float* x, int64_t lanes) { return lanes == W ? Vec::loadu(x) : Vec::loadu(x, lanes); }

// Calls f(i, lanes) for each whole vector of `n` numbers, and for the remaining lanes; `some` fills the others with
// zeros.
template <typename F>
void for_vectors(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + W <= n; i += W) f(i, W);
  if (i < n) f(i, n - i);
}

float sum_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, x);
}

// Returns the maximum, or NaN if there is one.
float max_of(const float* x, int64_t n) {
  // Several independent chains hide the latency of the maximum.
  constexpr int CHAINS = 4;
  Vec tops[CHAINS] = {Vec(-INF), Vec(-INF), Vec(-INF), Vec(-INF)};
  int64_t i = 0;
  for (; i + CHAINS * W <= n; i += CHAINS * W)
#pragma GCC unroll 4
    for (int j = 0; j < CHAINS; j++) tops[j] = at::vec::maximum(tops[j], Vec::loadu(x + i + j * W));
  for_vectors(n - i, [&](int64_t j, int64_t lanes) {
    const Vec last = some(x + i + j, lanes);
    tops[0] = at::vec::maximum(tops[0], lanes == W ? last : Vec::set(Vec(-INF), last, lanes));
  });
  const Vec top = at::vec::maximum(at::vec::maximum(tops[0], tops[1]), at::vec::maximum(tops[2], tops[3]));
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, top);
}

// --- A small matrix product: C = A B, or C += A B ------------------------------------------------------------------
// A's element (i, k) is a[i * a_row + k * a_col]; rows of B and C are contiguous and padded to whole vectors.

struct Matrix {
  const float* data;
  int64_t row, col;
};

constexpr int TILE_COLS = W == 8 ? 2 : 4;
constexpr int TILE_ROWS = 6;

template <int ROWS, int COLS>
inline void tile(int64_t depth, Matrix a, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  Vec sums[ROWS][COLS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) sums[i][j] = add ? Vec::loadu(c + i * ldc + j * W) : Vec(0.f);
  for (int64_t k = 0; k < depth; k++) {
    Vec row[COLS];
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) row[j] = Vec::loadu(b + k * ldb + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const Vec x(a.data[i * a.row + k * a.col]);
#pragma GCC unroll 8
      for (int j = 0; j < COLS; j++) sums[i][j] = at::vec::fmadd(x, row[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) sums[i][j].store(c + i * ldc + j * W);
}

// Multiplies all rows of a panel of COLS vectors.
template <int COLS>
void panel(int64_t rows, int64_t depth, Matrix a, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  auto at_row = [&](int64_t i) { return Matrix{a.data + i * a.row, a.row, a.col}; };
  int64_t i = 0;
  for (; i + TILE_ROWS <= rows; i += TILE_ROWS) tile<TILE_ROWS, COLS>(depth, at_row(i), b, ldb, c + i * ldc, ldc, add);
  switch (rows - i) {
    case 5:
      return tile<5, COLS>(depth, at_row(i), b, ldb, c + i * ldc, ldc, add);
    case 4:
      return tile<4, COLS>(depth, at_row(i), b, ldb, c + i * ldc, ldc, add);
    case 3:
      return tile<3, COLS>(depth, at_row(i), b, ldb, c + i * ldc, ldc, add);
    case 2:
      return tile<2, COLS>(depth, at_row(i), b, ldb, c + i * ldc, ldc, add);
    case 1:
      return tile<1, COLS>(depth, at_row(i), b, ldb, c + i * ldc, ldc, add);
  }
}

// `cols` is a multiple of W.
void multiply(int64_t rows, int64_t cols, int64_t depth, Matrix a, const float* b, int64_t ldb, float* c, int64_t ldc,
              bool add) {
  for (int64_t j = 0; j < cols;) {
    const int64_t vectors = std::min<int64_t>((cols - j) / W, TILE_COLS);
    switch (vectors) {
      case 4:
        panel<4>(rows, depth, a, b + j, ldb, c + j, ldc, add);
        break;
      case 3:
        panel<3>(rows, depth, a, b + j, ldb, c + j, ldc, add);
        break;
      case 2:
        panel<2>(rows, depth, a, b + j, ldb, c + j, ldc, add);
        break;
      default:
        panel<1>(rows, depth, a, b + j, ldb, c + j, ldc, add);
    }
    j += vectors * W;
  }
}

// --- Products of few rows -------------------------------------------------------------------------------------------
// Decoding one token at a time has few rows, so the products are bound by reading the weights from memory. Libraries
// for large products reach a quarter of the bandwidth; here each weight is prefetched and used for all rows.

// Tile of weight rows and input rows whose sums and operands fit the registers.
constexpr int DOT_COLS = W == 16 ? 6 : 3;
constexpr int DOT_ROWS = W == 16 ? 4 : 3;

Vec load_floats(const float* x) { return Vec::loadu(x); }
Vec load_floats(const c10::BFloat16* x) {
  Vec out;
  at::vec::load_fp32_from_bf16(x, out);
  return out;
}

// The order of summation is the same for every tile, so a row's result does not depend on the other rows.
template <int ROWS, int COLS, typename T>
inline void dots(int64_t depth, const float* x, const T* weight, const T* bias, T* out, int64_t width, bool ahead) {
  Vec sums[ROWS][COLS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) sums[i][j] = Vec(0.f);
  int64_t k = 0;
  for (; k + W <= depth; k += W) {
    Vec row[COLS];
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) {
      row[j] = load_floats(weight + j * depth + k);
      if (ahead) __builtin_prefetch(weight + (j + COLS) * depth + k);
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const Vec y = Vec::loadu(x + i * depth + k);
#pragma GCC unroll 8
      for (int j = 0; j < COLS; j++) sums[i][j] = at::vec::fmadd(y, row[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) {
      float sum = sum_of(sums[i][j]);
      for (int64_t l = k; l < depth; l++) sum += x[i * depth + l] * static_cast<float>(weight[j * depth + l]);
      out[i * width + j] = static_cast<T>(bias ? sum + static_cast<float>(bias[j]) : sum);
    }
}

// Calls `compute(count, first)` for MOST rows at a time, at most 4, and for the rest; `count` is a constant.
template <int MOST, typename F>
void for_tiles_of_rows(int64_t rows, const F& compute) {
  static_assert(MOST <= 4);
  for (int64_t i = 0; i < rows; i += MOST) {
    switch (std::min<int64_t>(rows - i, MOST)) {
      case 4:
        compute(std::integral_constant<int, 4>{}, i);
        break;
      case 3:
        compute(std::integral_constant<int, 3>{}, i);
        break;
      case 2:
        compute(std::integral_constant<int, 2>{}, i);
        break;
      default:
        compute(std::integral_constant<int, 1>{}, i);
    }
  }
}

// Computes COLS columns of all rows.
template <int COLS, typename T>
void dots_of(int64_t rows, int64_t depth, const float* x, const T* weight, const T* bias, T* out, int64_t width) {
  for_tiles_of_rows<DOT_ROWS>(rows, [&](auto count, int64_t i) {
    dots<count(), COLS>(depth, x + i * depth, weight, bias, out + i * width, width, i == 0);
  });
}

template <typename T>
void few_rows(int64_t rows, int64_t depth, int64_t width, const T* x, const T* weight, const T* bias, T* out) {
  const float* from;
  if constexpr (std::is_same_v<T, float>) {
    from = x;
  } else {
    float* widened = Scratch{rows * depth}.take(rows * depth);
    load_row(x, widened, rows * depth);
    from = widened;
  }
  // Pieces large enough for sequential reads, and small enough to balance the threads.
  const int64_t tiles = (width + DOT_COLS - 1) / DOT_COLS;
  const int64_t each = std::clamp<int64_t>(tiles / (8 * at::get_num_threads()), 1, 64);
  for_each_task((tiles + each - 1) / each, [&](int64_t task) {
    const int64_t end = std::min(width, (task + 1) * each * DOT_COLS);
    auto columns = [&](auto cols, int64_t j) {
      dots_of<cols()>(rows, depth, from, weight + j * depth, bias ? bias + j : nullptr, out + j, width);
    };
    int64_t j = task * each * DOT_COLS;
    for (; j + DOT_COLS <= end; j += DOT_COLS) columns(std::integral_constant<int, DOT_COLS>{}, j);
    for (; j < end; j++) columns(std::integral_constant<int, 1>{}, j);
  });
}

// --- Quantized weights ----------------------------------------------------------------------------------------------

// The scales of some blocks, or rows, from `first` on.
void load_scales(const QuantizedMatrix& w, int64_t first, int64_t count, float* to) {
  if (w.scales) return load_row(w.scales + first, to, count);
  for (int64_t i = 0; i < count; i++) {
    // Two roundings, as in bitsandbytes.
    const float scale = w.nested_map[w.nested[first + i]] * w.nested_scales[(first + i) / w.nested_block];
    to[i] = scale + w.offset;
  }
}

// The map of four bits, for W codes at a time.
class Map {
 public:
  explicit Map(const float* map) : map_(map) {
#if defined(CPU_CAPABILITY_AVX512)
    all_ = _mm512_loadu_ps(map);
#elif defined(CPU_CAPABILITY_AVX2)
    low_ = _mm256_loadu_ps(map);
    high_ = _mm256_loadu_ps(map + 8);
#endif
  }

  float one(const uint8_t* codes, int64_t at) const {
    const uint8_t pair = codes[at / 2];
    return map_[at % 2 ? pair & 15 : pair >> 4];
  }

  // The values of W codes from `at` on, which is even.
  Vec some(const uint8_t* codes, int64_t at) const {
    const uint8_t* from = codes + at / 2;
#if defined(CPU_CAPABILITY_AVX512)
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(unpacked(pairs)), all_);
#elif defined(CPU_CAPABILITY_AVX2)
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    const __m256i codes_of = _mm256_cvtepu8_epi32(unpacked(_mm_cvtsi32_si128(four)));
    const __m256 low = _mm256_permutevar8x32_ps(low_, codes_of), high = _mm256_permutevar8x32_ps(high_, codes_of);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes_of, 28)));
#else
    float values[W];
    for (int64_t i = 0; i < W; i++) values[i] = one(from, i);
    return Vec::loadu(values);
#endif
  }

 private:
  const float* map_;
#if defined(CPU_CAPABILITY_AVX512)
  __m512 all_;
#elif defined(CPU_CAPABILITY_AVX2)
  __m256 low_, high_;
#endif
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  // The codes of pairs in their order, one to a byte.
  static __m128i unpacked(__m128i pairs) {
    const __m128i mask = _mm_set1_epi8(15);
    return _mm_unpacklo_epi8(_mm_and_si128(_mm_srli_epi16(pairs, 4), mask), _mm_and_si128(pairs, mask));
  }
#endif
  friend class ScaledMap;
};

// W numbers of eight bits.
Vec load_bytes(const int8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  float values[W];
  for (int64_t i = 0; i < W; i++) values[i] = from[i];
  return Vec::loadu(values);
#endif
}

// Rounds finite numbers to the precision of T, to even.
Vec rounded(Vec x, float) { return x; }
Vec rounded(Vec x, c10::BFloat16) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
#else
  c10::BFloat16 narrow[W];
  float wide[W];
  x.store(wide);
  store_row(wide, narrow, W);
  return load_floats(narrow);
#endif
}

// The map of four bits times the scale of a block: sixteen products instead of one for each code.
class ScaledMap {
 public:
  // Number of vectors of sixteen codes.
  static constexpr int VECTORS = 16 / W;

  ScaledMap() = default;

  // The products are rounded to the precision of T.
  template <typename T>
  ScaledMap(const Map& map, float scale, T zero) {
#if defined(CPU_CAPABILITY_AVX512)
    all_ = rounded(Vec(map.all_) * Vec(scale), zero);
#elif defined(CPU_CAPABILITY_AVX2)
    low_ = rounded(Vec(map.low_) * Vec(scale), zero);
    high_ = rounded(Vec(map.high_) * Vec(scale), zero);
#else
    for (int i = 0; i < 16; i += W) rounded(Vec::loadu(map.map_ + i) * Vec(scale), zero).store(all_ + i);
#endif
  }

  // The values of the sixteen codes of eight bytes.
  void sixteen(const uint8_t* from, Vec values[VECTORS]) const {
#if defined(CPU_CAPABILITY_AVX512)
    const __m128i codes = Map::unpacked(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    values[0] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), all_);
#elif defined(CPU_CAPABILITY_AVX2)
    const __m128i codes = Map::unpacked(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    values[0] = eight(codes);
    values[1] = eight(_mm_unpackhi_epi64(codes, codes));
#else
    float wide[16];
    for (int i = 0; i < 8; i++) wide[2 * i] = all_[from[i] >> 4], wide[2 * i + 1] = all_[from[i] & 15];
    for (int i = 0; i < VECTORS; i++) values[i] = Vec::loadu(wide + i * W);
#endif
  }

 private:
#if defined(CPU_CAPABILITY_AVX512)
  Vec all_;
#elif defined(CPU_CAPABILITY_AVX2)
  Vec low_, high_;

  Vec eight(__m128i bytes) const {
    const __m256i codes = _mm256_cvtepu8_epi32(bytes);
    const __m256 low = _mm256_permutevar8x32_ps(low_, codes), high = _mm256_permutevar8x32_ps(high_, codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }
#else
  float all_[16];
#endif
};

// The values of `n` columns of row `row` from column `col` on; `scales` are those from that of the first value on.
void dequantize_row(const QuantizedMatrix& w, const float* scales, int64_t row, int64_t col, int64_t n, float* to) {
  if (!w.four_bits()) {
    const int8_t* codes = reinterpret_cast<const int8_t*>(w.codes) + row * w.in + col;
    const Vec scale(scales[0]);
    int64_t i = 0;
    for (; i + W <= n; i += W) (load_bytes(codes + i) * scale).store(to + i);
    for (; i < n; i++) to[i] = codes[i] * scales[0];
    return;
  }
  const Map map(w.map);
  const int64_t start = row * w.in + col, end = start + n, first = start / w.block;
  for (int64_t from = start; from < end;) {
    const int64_t until = std::min(end, (from / w.block + 1) * w.block);
    const float scale = scales[from / w.block - first];
    const Vec scale_of_all(scale);
    if (from % 2) {
      to[from - start] = map.one(w.codes, from) * scale;
      from++;
    }
    for (; from + W <= until; from += W) (map.some(w.codes, from) * scale_of_all).store(to + (from - start));
    for (; from < until; from++) to[from - start] = map.one(w.codes, from) * scale;
  }
}

template <typename T>
void dequantize(const QuantizedMatrix& w, Part part, T* out) {
  const int64_t blocks = w.four_bits() ? part.cols / w.block + 2 : 1;
  at::parallel_for(0, part.rows, std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(part.cols, 1)),
                   [&](int64_t first, int64_t last) {
                     Scratch scratch{blocks, part.cols};
                     float *scales = scratch.take(blocks), *wide = scratch.take(part.cols);
                     for (int64_t i = first; i < last; i++) {
                       const int64_t row = part.row + i, start = row * w.in + part.col, end = start + part.cols;
                       if (w.four_bits())
                         load_scales(w, start / w.block, (end - 1) / w.block - start / w.block + 1, scales);
                       else
                         load_scales(w, row, 1, scales);
                       if constexpr (std::is_same_v<T, float>) {
                         dequantize_row(w, scales, row, part.col, part.cols, out + i * part.cols);
                       } else {
                         dequantize_row(w, scales, row, part.col, part.cols, wide);
                         store_row(wide, out + i * part.cols, part.cols);
                       }
                     }
                   });
}

// As `dots`, for the columns from `column` on; `scales` are those from that of the first value on.
template <int ROWS, int COLS, bool FOUR_BITS, typename T>
inline void dots_quantized(const QuantizedMatrix& w, const Map& map, int64_t column, const float* scales, const float* x,
                           const T* bias, T* out) {
  const int64_t depth = w.in, start = column * depth;
  const int shift = FOUR_BITS ? __builtin_ctzll(w.block) : 0;
  const int64_t first = start >> shift;
  const int8_t* bytes = reinterpret_cast<const int8_t*>(w.codes);
  Vec sums[ROWS][COLS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) sums[i][j] = Vec(0.f);
  for (int64_t k = 0; k < depth; k += W) {
    Vec row[COLS];
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) {
      const int64_t at = start + j * depth + k;
      // `depth` and `block` are multiples of W, so these values are in one block.
      if constexpr (FOUR_BITS)
        row[j] = rounded(map.some(w.codes, at) * Vec(scales[(at >> shift) - first]), T{});
      else
        row[j] = rounded(load_bytes(bytes + at) * Vec(scales[j]), T{});
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const Vec y = Vec::loadu(x + i * depth + k);
#pragma GCC unroll 8
      for (int j = 0; j < COLS; j++) sums[i][j] = at::vec::fmadd(y, row[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) {
      const float sum = sum_of(sums[i][j]);
      out[i * w.out + j] = static_cast<T>(bias ? sum + static_cast<float>(bias[j]) : sum);
    }
}

// As `dots_quantized`, of four bits where rows are whole blocks: the same sums.
template <int ROWS, int COLS, typename T>
inline void dots_of_blocks(const QuantizedMatrix& w, const Map& map, int64_t column, const float* scales, const float* x,
                           const T* bias, T* out) {
  const int64_t depth = w.in, blocks = depth / w.block;
  const uint8_t* codes = w.codes + column * depth / 2;
  Vec sums[ROWS][COLS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) sums[i][j] = Vec(0.f);
  for (int64_t block = 0; block < blocks; block++) {
    ScaledMap maps[COLS];
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) maps[j] = ScaledMap(map, scales[j * blocks + block], T{});
    for (int64_t k = block * w.block; k < (block + 1) * w.block; k += 16) {
#pragma GCC unroll 8
      for (int j = 0; j < COLS; j++) {
        Vec values[ScaledMap::VECTORS];
        maps[j].sixteen(codes + (j * depth + k) / 2, values);
#pragma GCC unroll 8
        for (int v = 0; v < ScaledMap::VECTORS; v++)
#pragma GCC unroll 8
          for (int i = 0; i < ROWS; i++)
            sums[i][j] = at::vec::fmadd(Vec::loadu(x + i * depth + k + v * W), values[v], sums[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) {
      const float sum = sum_of(sums[i][j]);
      out[i * w.out + j] = static_cast<T>(bias ? sum + static_cast<float>(bias[j]) : sum);
    }
}

// Computes COLS columns of all rows.
template <int COLS, bool FOUR_BITS, typename T>
void dots_quantized_of(const QuantizedMatrix& w, const Map& map, int64_t rows, int64_t column, const float* scales,
                       const float* x, const T* bias, T* out) {
  const bool whole = FOUR_BITS && w.in % w.block == 0;
  for_tiles_of_rows<4>(rows, [&](auto count, int64_t i) {
    const float* from = x + i * w.in;
    T* to = out + i * w.out;
    whole ? dots_of_blocks<count(), COLS>(w, map, column, scales, from, bias, to)
          : dots_quantized<count(), COLS, FOUR_BITS>(w, map, column, scales, from, bias, to);
  });
}

template <bool FOUR_BITS, typename T>
void few_rows_quantized_as(const QuantizedMatrix& w, int64_t rows, const T* x, const T* bias, T* out) {
  // Not scratch memory, which the tasks of this thread use.
  Floats widened(std::is_same_v<T, float> ? 0 : rows * w.in);
  const float* from = floats(x, widened.data(), rows * w.in);
  constexpr int COLS = 4;
  const float none[16] = {};
  const Map map(FOUR_BITS ? w.map : none);
  const int64_t tiles = (w.out + COLS - 1) / COLS;
  const int64_t each = std::clamp<int64_t>(tiles / (8 * at::get_num_threads()), 1, 64);
  for_each_task((tiles + each - 1) / each, [&](int64_t task) {
    const int64_t begin = task * each * COLS, end = std::min(w.out, begin + each * COLS);
    const int64_t block = FOUR_BITS ? w.block : w.in, first = begin * w.in / block, last = (end * w.in - 1) / block;
    float* scales = Scratch{last - first + 1}.take(last - first + 1);
    load_scales(w, first, last - first + 1, scales);
    auto columns = [&](auto cols, int64_t j) {
      dots_quantized_of<cols(), FOUR_BITS>(w, map, rows, j, scales + (j * w.in / block - first), from,
                                           bias ? bias + j : nullptr, out + j);
    };
    int64_t j = begin;
    for (; j + COLS <= end; j += COLS) columns(std::integral_constant<int, COLS>{}, j);
    for (; j < end; j++) columns(std::integral_constant<int, 1>{}, j);
  });
}

template <typename T>
void few_rows_quantized(const QuantizedMatrix& w, int64_t rows, const T* x, const T* bias, T* out) {
  w.four_bits() ? few_rows_quantized_as<true>(w, rows, x, bias, out)
                : few_rows_quantized_as<false>(w, rows, x, bias, out);
}

// --- Attention ------------------------------------------------------------------------------------------------------

// Number of queries that share a pass over the keys.
constexpr int64_t BLOCK = 48;

// Rotates one head of token `n` by its angles, or by their negatives if `back`.
void rotate(const Rotation& rotation, int64_t n, float* x, bool back) {
  if (!rotation.cos) return;
  const float *cos = rotation.cos + n * rotation.half, *sin = rotation.sin + n * rotation.half;
  float* y = x + rotation.half;
  const float sign = back ? -1.f : 1.f;
  for (int64_t i = 0; i < rotation.half; i++) {
    const float a = x[i], b = y[i], s = sign * sin[i];
    x[i] = a * cos[i] - b * s;
    y[i] = b * cos[i] + a * s;
  }
}

void scale_row(float* x, int64_t n, float by) {
  for (int64_t i = 0; i < n; i++) x[i] *= by;
}

// The range of keys that at least one query of a block attends to, extended to whole vectors.
struct Keys {
  int64_t from, to;
  Keys(const AttentionShape& shape, int64_t first_query, int64_t queries, int64_t len) {
    const int64_t end = shape.causal ? first_query + queries : len;
    from = shape.window ? std::max<int64_t>(0, first_query - shape.window + 1) / W * W : 0;
    to = padded(end);
  }
  int64_t count() const { return to - from; }
};

// Soft-caps the scores of query `i`, and sets masked ones to -inf; `scores` starts at key `keys.from`.
void softcap_and_mask(const AttentionShape& shape, const Keys& keys, int64_t i, int64_t len, float* scores) {
  if (shape.softcap > 0) {
    const Vec cap(shape.softcap), inverse(1 / shape.softcap);
    for (int64_t j = 0; j < keys.count(); j += W) (cap * (Vec::loadu(scores + j) * inverse).tanh()).store(scores + j);
  }
  const int64_t first = (shape.window ? std::max<int64_t>(0, i - shape.window + 1) : 0) - keys.from;
  const int64_t end = (shape.causal ? i + 1 : len) - keys.from;
  std::fill(scores, scores + std::max<int64_t>(0, first), -INF);
  std::fill(scores + end, scores + keys.count(), -INF);
}

// Software prefetch: tokens are too far apart in memory for the hardware prefetcher.
template <typename T>
void prefetch(const T* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(x + i);
}
constexpr int64_t AHEAD = 8;

// Loads one head of a token as padded floats, rotated if `rotation` is given.
template <typename T>
void load_head(Heads<const T> x, int64_t n, int64_t h, int64_t dim, const Rotation* rotation, float* to) {
  prefetch(x.at(n + AHEAD, h), dim);
  load_row(x.at(n, h), to, dim);
  if (rotation) rotate(*rotation, n, to, false);
  std::fill(to + dim, to + padded(dim), 0.f);
}

// Transposes [len, dim] to [dim, len], padded with zeros.
void transpose(const float* x, int64_t len, int64_t dim, int64_t ldx, float* y, int64_t ldy) {
  at::vec::transpose_mxn<float>(x, ldx, y, ldy, static_cast<int>(len), static_cast<int>(dim));
  for (int64_t d = 0; d < dim; d++) std::fill(y + d * ldy + len, y + (d + 1) * ldy, 0.f);
}

// Replaces `n` scores by their softmax; returns their log-sum-exp. `n` is a multiple of W.
inline float softmax_row(float* x, int64_t n) {
  const float max = max_of(x, n);
  Vec total(0.f);
  for (int64_t j = 0; j < n; j += W) {
    const Vec p = (Vec::loadu(x + j) - Vec(max)).exp();
    p.store(x + j);
    total = total + p;
  }
  const float sum = sum_of(total);
  scale_row(x, n, 1 / sum);
  return max + std::log(sum);
}

template <typename T>
void attention_forward(const AttentionShape& shape, Packed packed, Heads<const T> q, Heads<const T> k, Heads<const T> v,
                       Rotation rotation, T* out, float* lse, Cache<T> cache) {
  const int64_t D = shape.head_dim, DP = padded(D), group = shape.heads / shape.kv_heads;
  for_each_task(packed.rows * shape.kv_heads, [&](int64_t task) {
    const int64_t row = task / shape.kv_heads, kv = task % shape.kv_heads;
    const int64_t start = packed.starts[row], len = packed.starts[row + 1] - start, SP = padded(len);
    Scratch scratch({len * DP, D * SP, len * DP, BLOCK * DP, BLOCK * SP, BLOCK * DP});
    float *keys = scratch.take(len * DP), *keys_t = scratch.take(D * SP), *values = scratch.take(len * DP);
    float *queries = scratch.take(BLOCK * DP), *scores = scratch.take(BLOCK * SP), *sums = scratch.take(BLOCK * DP);
    for (int64_t t = 0; t < len; t++) {
      load_head(k, start + t, kv, D, &rotation, keys + t * DP);
      load_head(v, start + t, kv, D, nullptr, values + t * DP);
      if (cache.keys) {
        const int64_t place = ((row * cache.capacity + t) * shape.kv_heads + kv) * D;
        store_row(keys + t * DP, cache.keys + place, D);
        store_row(values + t * DP, cache.values + place, D);
      }
    }
    transpose(keys, len, D, DP, keys_t, SP);
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
      for (int64_t first = 0; first < len; first += BLOCK) {
        const int64_t count = std::min(BLOCK, len - first);
        const Keys seen(shape, first, count, len);
        for (int64_t i = 0; i < count; i++) {
          load_head(q, start + first + i, h, D, &rotation, queries + i * DP);
          scale_row(queries + i * DP, D, shape.scale);
        }
        multiply(count, seen.count(), D, {queries, DP, 1}, keys_t + seen.from, SP, scores, SP, false);
        for (int64_t i = 0; i < count; i++) {
          float* x = scores + i * SP;
          softcap_and_mask(shape, seen, first + i, len, x);
          lse[(start + first + i) * shape.heads + h] = softmax_row(x, seen.count());
        }
        const int64_t depth = std::min(seen.to, len) - seen.from;
        multiply(count, DP, depth, {scores, SP, 1}, values + seen.from * DP, DP, sums, DP, false);
        for (int64_t i = 0; i < count; i++)
          store_row(sums + i * DP, out + ((start + first + i) * shape.heads + h) * D, D);
      }
    }
  });
}

// Replaces `n` scores `x`, with log-sum-exp `lse`, by their softmax p, and the gradients `dx` of p by those of the
// scores before soft-capping. `mean` is the sum of p * dx.
inline void softmax_backward_row(float softcap, float lse, float mean, int64_t n, float* x, float* dx) {
  for (int64_t j = 0; j < n; j += W) {
    const Vec score = Vec::loadu(x + j);
    const Vec p = (score - Vec(lse)).exp();
    Vec d = p * (Vec::loadu(dx + j) - Vec(mean));
    if (softcap > 0) {
      // A masked score is -inf and its p is 0, but 0 * inf is NaN.
      const Vec share = at::vec::maximum(score, Vec(-softcap)) * Vec(1 / softcap);
      d = d * (Vec(1.f) - share * share);
    }
    p.store(x + j);
    d.store(dx + j);
  }
}

template <typename T>
void attention_backward(const AttentionShape& shape, Packed packed, Heads<const T> q, Heads<const T> k,
                        Heads<const T> v, Rotation rotation, const T* out, const float* lse, const T* d_out,
                        Heads<T> dq, Heads<T> dk, Heads<T> dv) {
  const int64_t D = shape.head_dim, DP = padded(D), group = shape.heads / shape.kv_heads;
  for_each_task(packed.rows * shape.kv_heads, [&](int64_t task) {
    const int64_t row = task / shape.kv_heads, kv = task % shape.kv_heads;
    const int64_t start = packed.starts[row], len = packed.starts[row + 1] - start, SP = padded(len);
    Scratch scratch({len * DP, D * SP, len * DP, D * SP, len * DP, len * DP, BLOCK * DP, BLOCK * DP, BLOCK * DP,
                     BLOCK * SP, BLOCK * SP, DP});
    float *keys = scratch.take(len * DP), *keys_t = scratch.take(D * SP);
    float *values = scratch.take(len * DP), *values_t = scratch.take(D * SP);
    float *d_keys = scratch.take(len * DP), *d_values = scratch.take(len * DP);
    float *queries = scratch.take(BLOCK * DP), *d_queries = scratch.take(BLOCK * DP), *grads = scratch.take(BLOCK * DP);
    float *scores = scratch.take(BLOCK * SP), *d_scores = scratch.take(BLOCK * SP), *result = scratch.take(DP);
    for (int64_t t = 0; t < len; t++) {
      load_head(k, start + t, kv, D, &rotation, keys + t * DP);
      load_head(v, start + t, kv, D, nullptr, values + t * DP);
    }
    transpose(keys, len, D, DP, keys_t, SP);
    transpose(values, len, D, DP, values_t, SP);
    clear(d_keys, len * DP);
    clear(d_values, len * DP);
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
      for (int64_t first = 0; first < len; first += BLOCK) {
        const int64_t count = std::min(BLOCK, len - first);
        const Keys seen(shape, first, count, len);
        const int64_t depth = std::min(seen.to, len) - seen.from;
        for (int64_t i = 0; i < count; i++) {
          load_head(q, start + first + i, h, D, &rotation, queries + i * DP);
          scale_row(queries + i * DP, D, shape.scale);
          load_head(Heads<const T>{d_out, shape.heads * D, D}, start + first + i, h, D, nullptr, grads + i * DP);
        }
        multiply(count, seen.count(), D, {queries, DP, 1}, keys_t + seen.from, SP, scores, SP, false);
        multiply(count, seen.count(), D, {grads, DP, 1}, values_t + seen.from, SP, d_scores, SP, false);
        for (int64_t i = 0; i < count; i++) {
          const int64_t n = start + first + i;
          load_head(Heads<const T>{out, shape.heads * D, D}, n, h, D, nullptr, result);
          Vec products(0.f);
          for (int64_t d = 0; d < DP; d += W)
            products = at::vec::fmadd(Vec::loadu(result + d), Vec::loadu(grads + i * DP + d), products);
          softcap_and_mask(shape, seen, first + i, len, scores + i * SP);
          softmax_backward_row(shape.softcap, lse[n * shape.heads + h], sum_of(products), seen.count(), scores + i * SP,
                               d_scores + i * SP);
        }
        multiply(depth, DP, count, {scores, 1, SP}, grads, DP, d_values + seen.from * DP, DP, true);
        multiply(depth, DP, count, {d_scores, 1, SP}, queries, DP, d_keys + seen.from * DP, DP, true);
        multiply(count, DP, depth, {d_scores, SP, 1}, keys + seen.from * DP, DP, d_queries, DP, false);
        for (int64_t i = 0; i < count; i++) {
          scale_row(d_queries + i * DP, D, shape.scale);
          rotate(rotation, start + first + i, d_queries + i * DP, true);
          store_row(d_queries + i * DP, dq.at(start + first + i, h), D);
        }
      }
    }
    for (int64_t t = 0; t < len; t++) {
      rotate(rotation, start + t, d_keys + t * DP, true);
      store_row(d_keys + t * DP, dk.at(start + t, kv), D);
      store_row(d_values + t * DP, dv.at(start + t, kv), D);
    }
  });
}

// `lanes` floats at `x`, followed by zeros.
Vec some_floats(const float* x, int64_t lanes) { return some(x, lanes); }
Vec some_floats(const c10::BFloat16* x, int64_t lanes) {
  if (lanes == W) return load_floats(x);
  float buffer[W];
  load_row(x, buffer, lanes);
  return Vec::loadu(buffer, lanes);
}

// Most queries that share a pass over the keys of a step.
constexpr int64_t STEP_QUERIES = 4;

// Attention of QUERIES queries to the tokens from `first` to `len`, whose keys and values are `stride` apart. Rows of `queries` and
// `sums` have `padded(dim)` numbers; those of `scores`, which is overwritten, `padded(len)`.
template <int QUERIES, typename T>
void step_queries(const AttentionShape& shape, int64_t first, int64_t len, const T* keys, const T* values,
                  int64_t stride, const float* queries, float* scores, float* sums) {
  const int64_t D = shape.head_dim, DP = padded(D), LP = padded(len);
  for (int64_t t = first; t < len; t++) {
    prefetch(keys + (t + AHEAD) * stride, D);
    Vec products[QUERIES];
#pragma GCC unroll 4
    for (int g = 0; g < QUERIES; g++) products[g] = Vec(0.f);
    for_vectors(D, [&](int64_t d, int64_t lanes) {
      const Vec key = some_floats(keys + t * stride + d, lanes);
#pragma GCC unroll 4
      for (int g = 0; g < QUERIES; g++) products[g] = at::vec::fmadd(key, Vec::loadu(queries + g * DP + d), products[g]);
    });
#pragma GCC unroll 4
    for (int g = 0; g < QUERIES; g++) {
      const float score = sum_of(products[g]);
      scores[g * LP + t] = shape.softcap > 0 ? shape.softcap * std::tanh(score / shape.softcap) : score;
    }
  }
  for (int g = 0; g < QUERIES; g++) {
    float* x = scores + g * LP;
    std::fill(x, x + first, -INF);
    std::fill(x + len, x + LP, -INF);
    softmax_row(x, LP);
  }
  for_vectors(D, [&](int64_t d, int64_t lanes) {
    Vec total[QUERIES];
#pragma GCC unroll 4
    for (int g = 0; g < QUERIES; g++) total[g] = Vec(0.f);
    for (int64_t t = first; t < len; t++) {
      prefetch(values + (t + AHEAD) * stride + d, lanes);
      const Vec value = some_floats(values + t * stride + d, lanes);
#pragma GCC unroll 4
      for (int g = 0; g < QUERIES; g++) total[g] = at::vec::fmadd(Vec(scores[g * LP + t]), value, total[g]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < QUERIES; g++) total[g].store(sums + g * DP + d);
  });
}

template <typename T>
void attention_step(const AttentionShape& shape, int64_t rows, const int64_t* lens, Heads<const T> q, Heads<const T> k,
                    Heads<const T> v, Rotation rotation, T* out, Cache<T> cache) {
  const int64_t D = shape.head_dim, DP = padded(D), group = shape.heads / shape.kv_heads;
  for_each_task(rows * shape.kv_heads, [&](int64_t task) {
    const int64_t row = task / shape.kv_heads, kv = task % shape.kv_heads, len = lens[row] + 1;
    const int64_t first = shape.window ? std::max<int64_t>(0, len - shape.window) : 0;
    Scratch scratch({DP, group * DP, STEP_QUERIES * padded(len), group * DP});
    float *head = scratch.take(DP), *queries = scratch.take(group * DP);
    float *scores = scratch.take(STEP_QUERIES * padded(len)), *sums = scratch.take(group * DP);
    const int64_t stride = shape.kv_heads * D;
    T* keys = cache.keys + row * cache.capacity * stride + kv * D;
    T* values = cache.values + row * cache.capacity * stride + kv * D;
    load_head(k, row, kv, D, &rotation, head);
    store_row(head, keys + lens[row] * stride, D);
    load_head(v, row, kv, D, nullptr, head);
    store_row(head, values + lens[row] * stride, D);
    for (int64_t g = 0; g < group; g++) {
      load_head(q, row, kv * group + g, D, &rotation, queries + g * DP);
      scale_row(queries + g * DP, D, shape.scale);
    }
    auto attend = [&](auto count, int64_t g) {
      step_queries<count()>(shape, first, len, keys, values, stride, queries + g * DP, scores, sums + g * DP);
    };
    int64_t g = 0;
    for (; g + STEP_QUERIES <= group; g += STEP_QUERIES) attend(std::integral_constant<int, STEP_QUERIES>{}, g);
    switch (group - g) {
      case 3:
        attend(std::integral_constant<int, 3>{}, g);
        break;
      case 2:
        attend(std::integral_constant<int, 2>{}, g);
        break;
      case 1:
        attend(std::integral_constant<int, 1>{}, g);
    }
    for (g = 0; g < group; g++) store_row(sums + g * DP, out + (row * shape.heads + kv * group + g) * D, D);
  });
}

// --- Norms ----------------------------------------------------------------------------------------------------------

// Minimum number of rows per thread; fewer are not worth waking it.
constexpr int64_t NORM_GRAIN = 16;

// Sums f(i, lanes) over the first `lanes` lanes of each vector.
template <typename F>
float sum_over(int64_t n, const F& f) {
  Vec total(0.f);
  for_vectors(n, [&](int64_t i, int64_t lanes) {
    total = total + (lanes == W ? f(i, lanes) : Vec::set(Vec(0.f), f(i, lanes), lanes));
  });
  return sum_of(total);
}

template <typename T>
void norm_forward(const NormShape& shape, const float* x, const float* weight, const float* bias, T* out,
                  float* stats) {
  const int64_t n = shape.width;
  at::parallel_for(0, shape.rows, NORM_GRAIN, [&](int64_t from, int64_t to) {
    Scratch scratch({n});
    float* y = scratch.take(n);
    for (int64_t row = from; row < to; row++) {
      const float* in = x + row * n;
      const float mean =
          shape.center ? sum_over(n, [&](int64_t i, int64_t lanes) { return some(in + i, lanes); }) / n : 0;
      const float squares = sum_over(n, [&](int64_t i, int64_t lanes) {
        const Vec centred = some(in + i, lanes) - Vec(mean);
        return centred * centred;
      });
      const float scale = 1 / std::sqrt(squares / n + static_cast<float>(shape.eps));
      for (int64_t i = 0; i < n; i++) {
        const float normal = (in[i] - mean) * scale * (weight[i] + shape.offset);
        y[i] = bias ? normal + bias[i] : normal;
      }
      store_row(y, out + row * n, n);
      if (stats) {
        stats[2 * row] = mean;
        stats[2 * row + 1] = scale;
      }
    }
  });
}

template <typename T>
void norm_backward(const NormShape& shape, const float* x, const float* weight, const float* stats, const T* d_out,
                   float* dx, float* d_weight, float* d_bias) {
  const int64_t n = shape.width;
  // Each part sums its own rows, and the parts are summed in order: results are bit-identical for equal thread counts.
  const int64_t parts = std::min<int64_t>(at::get_num_threads(), (shape.rows + NORM_GRAIN - 1) / NORM_GRAIN);
  Floats partial(parts * 2 * n);
  clear(partial.data(), parts * 2 * n);
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    Scratch scratch({n, n});
    float *buffer = scratch.take(n), *g = scratch.take(n);
    const Vec offset(shape.offset);
    for (int64_t part = first; part < last; part++) {
      float *dw = partial.data() + part * 2 * n, *db = dw + n;
      for (int64_t row = shape.rows * part / parts; row < shape.rows * (part + 1) / parts; row++) {
        const float *in = x + row * n, *dy = floats(d_out + row * n, buffer, n);
        const Vec mean(stats[2 * row]), scale(stats[2 * row + 1]);
        auto normal = [&](int64_t i, int64_t lanes) { return (some(in + i, lanes) - mean) * scale; };
        Vec sum(0.f), slope(0.f);
        for_vectors(n, [&](int64_t i, int64_t lanes) {
          const Vec y = normal(i, lanes), d = some(dy + i, lanes), part_of_x = d * (some(weight + i, lanes) + offset);
          at::vec::fmadd(d, y, some(dw + i, lanes)).store(dw + i, lanes);
          (some(db + i, lanes) + d).store(db + i, lanes);
          part_of_x.store(g + i, lanes);
          sum = sum + part_of_x;
          slope = at::vec::fmadd(part_of_x, y, slope);
        });
        const Vec g_mean(shape.center ? sum_of(sum) / n : 0), g_slope(sum_of(slope) / n);
        for_vectors(n, [&](int64_t i, int64_t lanes) {
          (scale * (some(g + i, lanes) - g_mean - normal(i, lanes) * g_slope)).store(dx + row * n + i, lanes);
        });
      }
    }
  });
  for (int64_t part = 0; part < parts; part++) {
    for (int64_t i = 0; i < n && d_weight; i++) d_weight[i] += partial.data()[part * 2 * n + i];
    for (int64_t i = 0; i < n && d_bias; i++) d_bias[i] += partial.data()[part * 2 * n + n + i];
  }
}

// --- Logits ---------------------------------------------------------------------------------------------------------

// Number of logits per chunk; a chunk stays in the L1 cache while it is used twice.
constexpr int64_t CHUNK = 1024;

// Maximum of x = logit * inv_temperature over a chunk and, relative to it, the sums of exp(x) and x exp(x).
struct ChunkSums {
  float max;
  double sum, weighted;
};

template <bool WEIGHTED, typename T>
ChunkSums sums_of_chunk(const T* logits, int64_t n, float inv_temperature, float* buffer) {
  const float* x = floats(logits, buffer, n);
  const float max = max_of(x, n) * inv_temperature;
  if (max == -INF) return {max, 0, 0};
  const Vec factor(inv_temperature), top(max);
  Vec sum(0.f), weighted(0.f);
  for_vectors(n, [&](int64_t i, int64_t lanes) {
    const Vec scaled = some(x + i, lanes) * factor;
    Vec e = (scaled - top).exp();
    if (lanes < W) e = Vec::set(Vec(0.f), e, lanes);
    sum = sum + e;
    // A logit of -inf has weight 0, but 0 * inf is NaN.
    if (WEIGHTED)
      weighted = at::vec::fmadd(e, at::vec::maximum(scaled, Vec(std::numeric_limits<float>::lowest())), weighted);
  });
  return {max, sum_of(sum), WEIGHTED ? sum_of(weighted) : 0};
}

template <typename T>
void logits_stats(int64_t rows, int64_t vocab, const T* logits, float inv_temperature, const int64_t* targets,
                  float* logprobs, float* lse, float* entropy) {
  at::parallel_for(0, rows, 1, [&](int64_t from, int64_t to) {
    alignas(64) float buffer[CHUNK];
    for (int64_t row = from; row < to; row++) {
      const T* in = logits + row * vocab;
      ChunkSums all{-INF, 0, 0};
      for (int64_t i = 0; i < vocab; i += CHUNK) {
        const int64_t n = std::min(CHUNK, vocab - i);
        const ChunkSums part = entropy ? sums_of_chunk<true>(in + i, n, inv_temperature, buffer)
                                       : sums_of_chunk<false>(in + i, n, inv_temperature, buffer);
        if (part.max == -INF) continue;
        const float max = all.max > part.max || std::isnan(all.max) ? all.max : part.max;
        const double old = all.max == -INF ? 0 : std::exp(double(all.max) - max),
                     fresh = std::exp(double(part.max) - max);
        all = {max, all.sum * old + part.sum * fresh, all.weighted * old + part.weighted * fresh};
      }
      const double log_sum = all.max + std::log(all.sum);
      lse[row] = log_sum;
      logprobs[row] = static_cast<float>(in[targets[row]]) * inv_temperature - log_sum;
      if (entropy) entropy[row] = log_sum - all.weighted / all.sum;
    }
  });
}

template <typename T>
void logits_gradient(int64_t rows, int64_t vocab, T* logits, float inv_temperature, const int64_t* targets,
                     const float* lse, const float* coefficients, const float* entropy, const float* of_entropy) {
  // Log-probabilities below this have probability 0 in f32. They are clamped, as 0 * -inf is NaN.
  constexpr float MIN_LOGPROB = -200;
  at::parallel_for(0, rows, 1, [&](int64_t from, int64_t to) {
    alignas(64) float buffer[CHUNK];
    for (int64_t row = from; row < to; row++) {
      T* x = logits + row * vocab;
      const float scale = coefficients[row] * inv_temperature, slope = entropy ? of_entropy[row] * inv_temperature : 0;
      const float whole = entropy ? entropy[row] : 0;
      const Vec factor(inv_temperature), log_sum(lse[row]), minus(-scale), turn(slope), least(MIN_LOGPROB), all(whole);
      const float log_p = static_cast<float>(x[targets[row]]) * inv_temperature - lse[row];
      for (int64_t i = 0; i < vocab; i += CHUNK) {
        const int64_t n = std::min(CHUNK, vocab - i);
        const float* in = floats(x + i, buffer, n);
        auto log_ps = [&](int64_t j, int64_t lanes) { return some(in + j, lanes) * factor - log_sum; };
        if (slope == 0) {
          for_vectors(n, [&](int64_t j, int64_t lanes) { (minus * log_ps(j, lanes).exp()).store(buffer + j, lanes); });
        } else {
          for_vectors(n, [&](int64_t j, int64_t lanes) {
            const Vec log_p = at::vec::maximum(log_ps(j, lanes), least);
            (log_p.exp() * (minus - turn * (log_p + all))).store(buffer + j, lanes);
          });
        }
        store_row(buffer, x + i, n);
      }
      const float p = std::exp(log_p);
      float at_target = scale * (1 - p);
      if (slope != 0) at_target -= slope * p * (std::max(log_p, MIN_LOGPROB) + whole);
      x[targets[row]] = at_target;
    }
  });
}

template <typename T>
void logits_sample(int64_t rows, int64_t vocab, const T* logits, float inv_temperature, const double* draws,
                   int64_t* tokens, float* logprobs) {
  at::parallel_for(0, rows, 1, [&](int64_t from, int64_t to) {
    alignas(64) float buffer[CHUNK];
    std::vector<ChunkSums> chunks((vocab + CHUNK - 1) / CHUNK);
    for (int64_t row = from; row < to; row++) {
      const T* in = logits + row * vocab;
      auto size = [&](size_t chunk) { return std::min<int64_t>(CHUNK, vocab - chunk * CHUNK); };
      float max = -INF;
      for (size_t c = 0; c < chunks.size(); c++) {
        chunks[c] = sums_of_chunk<false>(in + c * CHUNK, size(c), inv_temperature, buffer);
        max = max > chunks[c].max || std::isnan(max) ? max : chunks[c].max;
      }
      double total = 0;
      for (ChunkSums& chunk : chunks) {
        chunk.sum = chunk.max == -INF ? 0 : chunk.sum * std::exp(double(chunk.max) - max);
        total += chunk.sum;
      }
      int64_t token = 0;
      if (draws) {
        // Finds the chunk, then the token in it: the first whose cumulative sum exceeds the target.
        const double target = draws[row] * total;
        double before = 0;
        size_t chunk = 0;
        while (chunk + 1 < chunks.size() && before + chunks[chunk].sum <= target) before += chunks[chunk++].sum;
        while (chunk > 0 && chunks[chunk].sum == 0) chunk--;
        const float* x = floats(in + chunk * CHUNK, buffer, size(chunk));
        token = -1;
        for (int64_t i = 0; i < size(chunk); i++) {
          const double p = std::exp(double(x[i]) * inv_temperature - max);
          if (p > 0) token = chunk * CHUNK + i;
          before += p;
          if (before > target && p > 0) break;
        }
        token = std::max<int64_t>(token, 0);
      } else {
        size_t chunk = 0;
        while (chunk + 1 < chunks.size() && !(chunks[chunk].max == max)) chunk++;
        const float* x = floats(in + chunk * CHUNK, buffer, size(chunk));
        int64_t i = 0;
        while (i + 1 < size(chunk) && !(x[i] * inv_temperature == max)) i++;
        token = chunk * CHUNK + i;
      }
      tokens[row] = token;
      logprobs[row] = static_cast<float>(in[token]) * inv_temperature - (max + std::log(total));
    }
  });
}

// --- Sums -----------------------------------------------------------------------------------------------------------

template <typename T>
void sum(int64_t n, const float* x, const T* a, const T* b, float* out) {
  at::parallel_for(0, (n + CHUNK - 1) / CHUNK, 16, [&](int64_t first, int64_t last) {
    float buffers[2][CHUNK];
    for (int64_t from = first * CHUNK; from < std::min(n, last * CHUNK); from += CHUNK) {
      const int64_t count = std::min(CHUNK, n - from);
      const float *y = floats(a + from, buffers[0], count), *z = b ? floats(b + from, buffers[1], count) : nullptr;
      for (int64_t i = 0; i < count; i += W) {
        const int64_t lanes = std::min(W, count - i);
        Vec total = some(x + from + i, lanes) + some(y + i, lanes);
        if (z) total = total + some(z + i, lanes);
        total.store(out + from + i, lanes);
      }
    }
  });
}

// --- Optimizer steps ------------------------------------------------------------------------------------------------

// In bitsandbytes' order, so that a moment near the border between two codes gets the code that bitsandbytes gives it. No
// fused multiply-adds: each number has the same bits on every instruction set.
void adamw(const AdamWStep& step, int64_t n, float* param, const float* grad, float* first, float* second) {
  const Vec decay(step.decay), beta1(step.beta1), beta2(step.beta2);
  const Vec first_weight(step.first_weight), second_weight(step.second_weight);
  const Vec size(step.size), root(step.root), eps(step.eps);
  for_vectors(n, [&](int64_t i, int64_t lanes) {
    const Vec g = some(grad + i, lanes), m = some(first + i, lanes), v = some(second + i, lanes);
    const Vec new_m = m * beta1 + first_weight * g, new_v = v * beta2 + second_weight * g * g;
    const Vec new_p = some(param + i, lanes) * decay - size * new_m / (new_v.sqrt() / root + eps);
    new_m.store(first + i, lanes);
    new_v.store(second + i, lanes);
    new_p.store(param + i, lanes);
  });
}

void load_block(const BlockedMoment& moment, int64_t block, int64_t n, float* to) {
  const uint8_t* codes = moment.codes + block * moment.BLOCK;
  const float absmax = moment.absmax[block];
  for (int64_t i = 0; i < n; i++) to[i] = moment.map[codes[i]] * absmax;
}

void store_block(const BlockedMoment& moment, int64_t block, int64_t n, const float* from) {
  Vec tops(0.f);
  for_vectors(n, [&](int64_t i, int64_t lanes) { tops = at::vec::maximum(tops, some(from + i, lanes).abs()); });
  const float top = at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, tops);
  const float absmax = top == 0 ? 1 : top;
  moment.absmax[block] = absmax;
  float scaled[BlockedMoment::BLOCK];
  for_vectors(n, [&](int64_t i, int64_t lanes) { (some(from + i, lanes) / Vec(absmax)).store(scaled + i, lanes); });
  uint8_t* codes = moment.codes + block * moment.BLOCK;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, scaled + i, sizeof bits);
    const uint8_t least = moment.least_codes[bits >> 16];
    codes[i] = least + (moment.middles[least] < scaled[i]);
  }
}

void adamw_blocked(const AdamWStep& step, int64_t n, float* param, const float* grad, const BlockedMoment& first,
                   const BlockedMoment& second) {
  constexpr int64_t BLOCK = BlockedMoment::BLOCK;
  at::parallel_for(0, (n + BLOCK - 1) / BLOCK, 16, [&](int64_t from, int64_t to) {
    alignas(64) float m[BLOCK], v[BLOCK];
    for (int64_t block = from; block < to; block++) {
      const int64_t start = block * BLOCK, count = std::min(BLOCK, n - start);
      load_block(first, block, count, m);
      load_block(second, block, count, v);
      adamw(step, count, param + start, grad + start, m, v);
      store_block(first, block, count, m);
      store_block(second, block, count, v);
    }
  });
}

// The words of SplitMix64 with the state `key`, from word 4 * `from` on: each of its numbers is four.
void random_words(uint64_t key, int64_t from, int64_t count, uint64_t* to) {
  for (int64_t i = 0; i < count; i++) {
    uint64_t x = key + static_cast<uint64_t>(from + i + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    to[i] = x ^ (x >> 31);
  }
}

// Each number becomes one of its neighbours: the bits of a float are ordered as its magnitude, so a carry out of the lost bits is
// the one that is farther from 0.
void store_rounded(const float* from, const uint16_t* words, int64_t n, c10::BFloat16* to) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    to[i].x = static_cast<uint16_t>((bits + words[i]) >> 16);
  }
}

void adamw_rounded(const AdamWStep& step, int64_t n, c10::BFloat16* param, const c10::BFloat16* grad,
                   c10::BFloat16* first, c10::BFloat16* second, const uint64_t* keys) {
  constexpr int64_t PIECE = 1024, WORDS = 4;
  at::parallel_for(0, (n + PIECE - 1) / PIECE, 4, [&](int64_t from, int64_t to) {
    alignas(64) float p[PIECE], g[PIECE], m[PIECE], v[PIECE];
    alignas(64) uint64_t random[PIECE / WORDS];
    uint16_t words[PIECE];
    for (int64_t piece = from; piece < to; piece++) {
      const int64_t start = piece * PIECE, count = std::min(PIECE, n - start);
      load_row(grad + start, g, count);
      load_row(param + start, p, count);
      load_row(first + start, m, count);
      load_row(second + start, v, count);
      adamw(step, count, p, g, m, v);
      const std::pair<const float*, c10::BFloat16*> results[] = {{p, param}, {m, first}, {v, second}};
      for (int64_t i = 0; i < 3; i++) {
        random_words(keys[i], start / WORDS, (count + WORDS - 1) / WORDS, random);
        std::memcpy(words, random, count * sizeof(uint16_t));
        store_rounded(results[i].first, words, count, results[i].second + start);
      }
    }
  });
}

#include "mixing_kernels.h"
#include "gated_kernels.h"

#if defined(CPU_CAPABILITY_DEFAULT) && !defined(__aarch64__)
constexpr bool PLAIN_LOOPS = true;
#else
constexpr bool PLAIN_LOOPS = false;
#endif

template <typename T>
constexpr KernelsOf<T> kernels_of() {
  return {{attention_forward<T>, attention_backward<T>, attention_step<T>},
          {norm_forward<T>, norm_backward<T>},
          {logits_stats<T>, logits_gradient<T>, logits_sample<T>},
          PLAIN_LOOPS ? nullptr : few_rows<T>,
          dequantize<T>,
          PLAIN_LOOPS ? nullptr : few_rows_quantized<T>,
          sum<T>,
          {conv_gated<T>, conv_gated_back<T>, conv_silu<T>, conv_silu_back<T>},
          {gated<T>, gated_back<T>}};
}

}  // namespace

extern const Kernels TCH_EXT_KERNELS;
const Kernels TCH_EXT_KERNELS = {
    kernels_of<float>(), kernels_of<c10::BFloat16>(), {adamw_blocked, adamw_rounded}, {delta_forward, delta_backward, delta_step}};

}  // namespace tch_ext
