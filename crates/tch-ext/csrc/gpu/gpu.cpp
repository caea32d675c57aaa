// The host's side of the kernels for GPUs: which one, with how many blocks, from which tensors.
#include "gpu.h"

#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../common.h"

namespace tch_ext::gpu {

const Functions* functions = nullptr;

namespace {

using at::Tensor;

#define SOURCE(source, name) #source,
#define NAME(source, name) #name,
constexpr const char* SOURCES[] = {TCH_EXT_GPU_KERNELS(SOURCE)};
constexpr const char* NAMES[] = {TCH_EXT_GPU_KERNELS(NAME)};
#undef SOURCE
#undef NAME
constexpr size_t COUNT = sizeof(NAMES) / sizeof(NAMES[0]);

// Of the .cu files.
constexpr unsigned ROW_THREADS = 512, SAMPLE_THREADS = 512, THREADS = 256;
// More blocks than fill any GPU; the kernels go on from there. Also the most rows of blocks, of which CUDA takes 65535.
constexpr int64_t MOST_BLOCKS = 1 << 20, MOST_BLOCK_ROWS = 1 << 15;
// Rows of a block in the sums for the gradient of a norm's weight.
constexpr int64_t LEAST_ROWS_OF_PART = 32, MOST_PARTS = 256;

// The loaded kernels, and the architecture that they are compiled for; they compute on GPUs of this one.
void* loaded[COUNT] = {};
std::atomic<bool> is_loaded{false};
std::atomic<uint64_t> devices{0};
// A test runs the kernels on the processor.
std::atomic<bool> is_emulated{false};
std::array<std::atomic<int64_t>, COUNT> launches{};
// A check lets few blocks do all the work.
std::atomic<int64_t> most_blocks{MOST_BLOCKS};

template <typename T>
const void* argument(const T& x) {
  return &x;
}

bool is_f32(const Tensor& x) { return x.scalar_type() == at::kFloat; }

bool has_kernel_dtype(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kBFloat16; }

// The kernel for f32 or bf16 of four in their order: f32, f32 packed, bf16, bf16 packed.
Kernel chosen(Kernel first, at::ScalarType dtype, bool packed) {
  return static_cast<Kernel>(static_cast<int>(first) + (dtype == at::kFloat ? 0 : 2) + (packed ? 1 : 0));
}

bool is_aligned(const Tensor& x, size_t bytes) {
  return !x.defined() || reinterpret_cast<uintptr_t>(x.const_data_ptr()) % bytes == 0;
}

int64_t numbers_of(const Tensor& x) { return is_f32(x) ? 4 : 8; }

void check(const char* what, const Tensor& x, const Tensor& like, at::ScalarType dtype, int64_t numel) {
  TORCH_CHECK(x.device() == like.device() && x.is_contiguous() && x.scalar_type() == dtype && x.numel() == numel, what, ": expected ",
              numel, " contiguous elements of ", dtype, " on ", like.device(), ", found ", x.sizes(), " of ", x.scalar_type(), " on ",
              x.device());
}

void check_logits(const Tensor& logits, const Tensor& targets) {
  TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous() && logits.size(1) > 0 && has_kernel_dtype(logits.scalar_type()),
              "logits: expected [rows, vocab], contiguous, f32 or bf16, found ", logits.sizes(), " ", logits.scalar_type());
  if (targets.defined()) check("targets of logits", targets, logits, at::kLong, logits.size(0));
}

const void* data(const Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }

at::TensorOptions options(const Tensor& like, at::ScalarType dtype) { return like.options().dtype(dtype).requires_grad(false); }

Grid of_rows(int64_t rows, unsigned threads) { return {static_cast<unsigned>(rows), 1, threads}; }

}  // namespace

Grid grid_over(int64_t count, int64_t per_block) {
  const int64_t blocks = (count + per_block - 1) / per_block;
  return {static_cast<unsigned>(std::min<int64_t>(blocks, most_blocks)), 1, THREADS};
}

bool takes(const Tensor& x) {
  if (x.is_cuda()) return is_loaded && x.get_device() < 64 && (devices >> x.get_device() & 1) != 0;
  return is_emulated && x.is_cpu();
}

void launch(Kernel kernel, const Grid& grid, const Tensor& like, std::initializer_list<const void*> args) {
  if (grid.x == 0 || grid.y == 0) return;
  std::vector<void*> list;
  for (const void* arg : args) list.push_back(const_cast<void*>(arg));
  launches[static_cast<size_t>(kernel)]++;
  if (like.is_cpu()) return emulated::run(kernel, grid, list.data());
  char* message = functions->launch(loaded[static_cast<size_t>(kernel)], grid.x, grid.y, grid.threads, like.get_device(), list.data());
  if (!message) return;
  const std::string text = message;
  free(message);
  TORCH_CHECK(false, NAMES[static_cast<size_t>(kernel)], ": ", text);
}

// --- Logits ------------------------------------------------------------------------------------------------------------

void logits_stats(const Tensor& logits, float inv_temperature, const Tensor& targets, Tensor& logprobs, Tensor& lse,
                  const Tensor& entropy) {
  check_logits(logits, targets);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  const bool packed = vocab % numbers_of(logits) == 0 && is_aligned(logits, 16);
  const void *in = data(logits), *ids = data(targets), *l = data(logprobs), *s = data(lse), *e = data(entropy);
  launch(chosen(Kernel::logits_stats_f32, logits.scalar_type(), packed), of_rows(rows, ROW_THREADS), logits,
         {&in, &ids, &l, &s, &e, &vocab, &inv_temperature});
}

void logits_gradient(const Tensor& logits, float inv_temperature, const Tensor& targets, const Tensor& lse, const Tensor& slopes,
                     const Tensor& entropy, const Tensor& of_entropy) {
  check_logits(logits, targets);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  for (const Tensor* x : {&lse, &slopes, &entropy, &of_entropy})
    if (x->defined()) check("numbers of logits", *x, logits, at::kFloat, rows);
  const bool packed = vocab % numbers_of(logits) == 0 && is_aligned(logits, 16);
  const void *in = data(logits), *ids = data(targets), *s = data(lse), *c = data(slopes), *e = data(entropy), *o = data(of_entropy);
  launch(chosen(Kernel::logits_gradient_f32, logits.scalar_type(), packed), of_rows(rows, ROW_THREADS), logits,
         {&in, &ids, &s, &c, &e, &o, &vocab, &inv_temperature});
}

std::array<Tensor, 2> logits_sample(const Tensor& logits, float inv_temperature, const Tensor& draws) {
  check_logits(logits, Tensor());
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  if (draws.defined()) check("draws", draws, logits, at::kDouble, rows);
  const Tensor tokens = at::empty({rows}, options(logits, at::kLong)), logprobs = at::empty({rows}, options(logits, at::kFloat));
  const void *in = data(logits), *d = data(draws), *t = data(tokens), *l = data(logprobs);
  launch(is_f32(logits) ? Kernel::logits_sample_f32 : Kernel::logits_sample_bf16, of_rows(rows, SAMPLE_THREADS), logits,
         {&in, &d, &t, &l, &vocab, &inv_temperature});
  return {tokens, logprobs};
}

// --- Rotary positions --------------------------------------------------------------------------------------------------

namespace {

// As rotary.cu has it.
struct RotaryShape {
  int64_t threads, token;
  int heads, entries, parts, head_dim, half, groups;
  float sign;
};

}  // namespace

bool rotates(const Tensor& x, at::ScalarType dtype) {
  return takes(x) && x.dim() == 4 && has_kernel_dtype(x.scalar_type()) && has_kernel_dtype(dtype);
}

Tensor rotated(const Tensor& given, const Tensor& cosines, const Tensor& sines, int64_t parts, bool back, at::ScalarType dtype) {
  // Tokens may be apart: as columns of a product that has more than these heads.
  const bool is_dense = given.stride(3) == 1 && (given.size(2) == 1 || given.stride(2) == given.size(3)) &&
                        (given.size(1) == 1 || given.stride(1) == given.size(2) * given.size(3));
  const Tensor x = is_dense ? given : given.contiguous(), cos = cosines.contiguous(), sin = sines.contiguous();
  const int half = static_cast<int>(cos.size(1)), head_dim = static_cast<int>(x.size(3));
  const Tensor out = at::empty(x.sizes(), options(x, dtype));
  const bool packed =
      half % 4 == 0 && head_dim % 4 == 0 && x.stride(0) % 4 == 0 && is_aligned(x, 16) && is_aligned(cos, 16) && is_aligned(sin, 16);
  RotaryShape shape{};
  shape.token = x.stride(0);
  shape.groups = (head_dim - half) / (packed ? 4 : 1);
  shape.threads = x.size(0) * x.size(1) * x.size(2) * shape.groups;
  shape.heads = static_cast<int>(x.size(1)), shape.entries = static_cast<int>(x.size(2)), shape.parts = static_cast<int>(parts);
  shape.head_dim = head_dim, shape.half = half, shape.sign = back ? -1.f : 1.f;
  const auto first = is_f32(x) ? (dtype == at::kFloat ? Kernel::rotate_f32_f32 : Kernel::rotate_f32_bf16)
                               : (dtype == at::kFloat ? Kernel::rotate_bf16_f32 : Kernel::rotate_bf16_bf16);
  const void *in = data(x), *c = data(cos), *s = data(sin), *o = data(out);
  launch(static_cast<Kernel>(static_cast<int>(first) + (packed ? 1 : 0)), grid_over(shape.threads, THREADS), x, {&in, &c, &s, &o, &shape});
  return out;
}

namespace {

// As rotary.cu has it.
struct CachedShape {
  int64_t threads;
  int64_t rows_of[3], heads_of[3];
  int heads, kv_heads, head_dim, half, groups;
};

}  // namespace

bool rotates_cached(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys) {
  if (!takes(q) || !has_kernel_dtype(q.scalar_type())) return false;
  for (const Tensor* x : {&q, &k, &v})
    if (x->dim() != 3 || x->scalar_type() != keys.scalar_type() || x->stride(2) != 1) return false;
  return true;
}

Tensor rotate_cached(const std::array<Tensor, 3>& qkv, const Tensor& cosines, const Tensor& sines, const Tensor& places, const Tensor& keys,
                     const Tensor& values) {
  const auto& [q, k, v] = qkv;
  TORCH_CHECK(rotates_cached(q, k, v, keys) && k.sizes() == v.sizes() && q.size(0) == k.size(0) && q.size(2) == k.size(2),
              "rotary positions of a step: ", q.sizes(), " ", q.scalar_type(), ", keys ", k.sizes(), ", values ", v.sizes());
  const int64_t rows = q.size(0), head_dim = q.size(2), half = cosines.defined() ? cosines.size(1) : 0;
  const Tensor cos = cosines.defined() ? cosines.contiguous() : Tensor(), sin = sines.defined() ? sines.contiguous() : Tensor();
  for (const Tensor* x : {&cos, &sin})
    if (x->defined()) check("angles of a step", *x, q, at::kFloat, rows * half);
  TORCH_CHECK(2 * half <= head_dim && cos.defined() == sin.defined(), "rotary positions of a step: ", half, " angles for ", head_dim);
  check("places of a step", places, q, at::kLong, rows);
  for (const Tensor* x : {&keys, &values})
    TORCH_CHECK(x->device() == q.device() && x->scalar_type() == q.scalar_type() && x->is_contiguous() && x->dim() == 2 &&
                    x->size(1) == k.size(1) * head_dim,
                "cache of a step: ", x->sizes(), " ", x->scalar_type());
  const Tensor out = at::empty({rows, q.size(1), head_dim}, options(q, q.scalar_type()));
  const size_t bytes = 4 * q.element_size();
  bool packed = half % 4 == 0 && head_dim % 4 == 0 && is_aligned(cos, 16) && is_aligned(sin, 16) && is_aligned(keys, bytes) &&
                is_aligned(values, bytes);
  CachedShape s{};
  for (int i = 0; i < 3; i++) {
    s.rows_of[i] = qkv[i].stride(0), s.heads_of[i] = qkv[i].stride(1);
    packed = packed && s.rows_of[i] % 4 == 0 && s.heads_of[i] % 4 == 0 && is_aligned(qkv[i], bytes);
  }
  s.heads = static_cast<int>(q.size(1)), s.kv_heads = static_cast<int>(k.size(1)), s.head_dim = static_cast<int>(head_dim);
  s.half = static_cast<int>(half), s.groups = static_cast<int>(head_dim - half) / (packed ? 4 : 1);
  s.threads = rows * (s.heads + 2 * s.kv_heads) * s.groups;
  const void *pq = data(q), *pk = data(k), *pv = data(v), *c = data(cos), *d = data(sin), *p = data(places), *o = data(out);
  const void *to_keys = data(keys), *to_values = data(values);
  launch(chosen(Kernel::rotate_cached_f32, q.scalar_type(), packed), grid_over(s.threads, THREADS), q,
         {&pq, &pk, &pv, &c, &d, &p, &o, &to_keys, &to_values, &s});
  return out;
}

// --- Norms and the residual stream -------------------------------------------------------------------------------------

namespace {

// As norm.cu has it.
struct NormShape {
  int64_t width;
  float eps, offset;
  int center;
};

NormShape shape_of(const NormOptions& of, int64_t width) {
  return {width, static_cast<float>(of.eps), static_cast<float>(of.offset), of.center};
}

void check_norm(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const int64_t width = weight.numel();
  check("weight of a norm", weight, x, at::kFloat, width);
  if (bias.defined()) check("bias of a norm", bias, x, at::kFloat, width);
  check("input of a norm", x, x, at::kFloat, width == 0 ? 0 : x.numel() / width * width);
}

}  // namespace

std::array<Tensor, 3> norm(const NormOptions& of, const Tensor& x, const Tensor& weight, const Tensor& bias, at::ScalarType dtype) {
  check_norm(x, weight, bias);
  const int64_t rows = x.numel() / weight.numel();
  const Tensor out = at::empty(x.sizes(), options(x, dtype)), rstds = at::empty({rows}, options(x, at::kFloat));
  const Tensor means = of.center ? at::empty({rows}, options(x, at::kFloat)) : Tensor();
  const void *in = data(x), *w = data(weight), *b = data(bias), *o = data(out), *m = data(means), *r = data(rstds);
  const NormShape s = shape_of(of, weight.numel());
  launch(dtype == at::kFloat ? Kernel::norm_f32 : Kernel::norm_bf16, of_rows(rows, THREADS), x, {&in, &w, &b, &o, &m, &r, &s});
  return {out, means, rstds};
}

std::array<Tensor, 4> sum_norm(const NormOptions& of, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& weight,
                               const Tensor& bias, at::ScalarType dtype) {
  check_norm(x, weight, bias);
  const int64_t rows = x.numel() / weight.numel();
  check("branch of a residual sum", a, x, a.scalar_type(), x.numel());
  TORCH_CHECK(has_kernel_dtype(a.scalar_type()) && (dtype == a.scalar_type() || dtype == at::kFloat), "branch of a residual sum: ",
              a.scalar_type(), ", its norm in ", dtype);
  if (b.defined()) check("branch of a residual sum", b, x, a.scalar_type(), x.numel());
  const Tensor sums = at::empty(x.sizes(), options(x, at::kFloat)), out = at::empty(x.sizes(), options(x, dtype));
  const Tensor rstds = at::empty({rows}, options(x, at::kFloat)), means = of.center ? at::empty({rows}, options(x, at::kFloat)) : Tensor();
  const void *in = data(x), *first = data(a), *second = data(b), *w = data(weight), *c = data(bias), *t = data(sums), *o = data(out);
  const void *m = data(means), *r = data(rstds);
  const NormShape s = shape_of(of, weight.numel());
  const Kernel of_bf16 = dtype == at::kFloat ? Kernel::sum_norm_bf16_f32 : Kernel::sum_norm_bf16;
  launch(is_f32(a) ? Kernel::sum_norm_f32 : of_bf16, of_rows(rows, THREADS), x,
         {&in, &first, &second, &w, &c, &t, &o, &m, &r, &s});
  return {sums, out, means, rstds};
}

std::array<Tensor, 2> norm_gradient(const NormOptions& of, const Tensor& of_out, const Tensor& of_sums, const Tensor& x,
                                    const Tensor& weight, const Tensor& means, const Tensor& rstds,
                                    std::optional<at::ScalarType> branch) {
  const int64_t rows = x.numel() / weight.numel();
  check("gradient of a norm", of_out, x, of_out.scalar_type(), x.numel());
  if (of_sums.defined()) check("gradient of a residual sum", of_sums, x, at::kFloat, x.numel());
  const Tensor of_x = at::empty(x.sizes(), options(x, at::kFloat));
  // In f32 the two are the same.
  const Tensor of_branch = branch == at::kBFloat16 ? at::empty(x.sizes(), options(x, at::kBFloat16)) : Tensor();
  const void *d = data(of_out), *t = data(of_sums), *in = data(x), *w = data(weight), *m = data(means), *r = data(rstds), *o = data(of_x);
  const void* rounded = data(of_branch);
  const NormShape s = shape_of(of, weight.numel());
  launch(is_f32(of_out) ? Kernel::norm_gradient_f32 : Kernel::norm_gradient_bf16, of_rows(rows, THREADS), x,
         {&d, &t, &in, &w, &m, &r, &o, &rounded, &s});
  return {of_x, branch ? (of_branch.defined() ? of_branch : of_x) : Tensor()};
}

std::array<Tensor, 2> norm_weight_gradient(const NormOptions& of, const Tensor& of_out, const Tensor& x, const Tensor& means,
                                           const Tensor& rstds, bool with_bias) {
  const int64_t rows = rstds.numel(), width = rows == 0 ? x.size(-1) : x.numel() / rows;
  const int64_t rows_of_part = std::max(LEAST_ROWS_OF_PART, (rows + MOST_PARTS - 1) / MOST_PARTS);
  const int64_t parts = (rows + rows_of_part - 1) / rows_of_part;
  const Tensor weights = at::empty({parts, width}, options(x, at::kFloat));
  const Tensor biases = with_bias ? at::empty({parts, width}, options(x, at::kFloat)) : Tensor();
  const void *d = data(of_out), *in = data(x), *m = data(means), *r = data(rstds), *w = data(weights), *b = data(biases);
  const int center = of.center;
  // Each thread sums one column of one part.
  const Grid grid{static_cast<unsigned>((width + THREADS - 1) / THREADS), static_cast<unsigned>(parts), THREADS};
  launch(is_f32(of_out) ? Kernel::norm_weight_gradient_f32 : Kernel::norm_weight_gradient_bf16, grid, x,
         {&d, &in, &m, &r, &w, &b, &rows, &width, &rows_of_part, &center});
  // Over few rows, in the order that libtorch's sums always have.
  return {weights.sum(0), with_bias ? biases.sum(0) : Tensor()};
}

bool adds(const Tensor& x, const Tensor& a, const Tensor& b) {
  return takes(x) && is_f32(x) && has_kernel_dtype(a.scalar_type()) && x.is_contiguous() && a.is_contiguous() &&
         (!b.defined() || b.is_contiguous());
}

Tensor residual(const Tensor& x, const Tensor& a, const Tensor& b) {
  const Tensor out = at::empty(x.sizes(), options(x, at::kFloat));
  const bool packed = x.numel() % 4 == 0 && is_aligned(x, 16) && is_aligned(a, 16) && is_aligned(b, 16);
  const int64_t packs = x.numel() / (packed ? 4 : 1);
  const void *in = data(x), *first = data(a), *second = data(b), *o = data(out);
  launch(chosen(Kernel::residual_f32, a.scalar_type(), packed), grid_over(packs, THREADS), x, {&in, &first, &second, &o, &packs});
  return out;
}

// --- Gates -------------------------------------------------------------------------------------------------------------

namespace {

// As gated.cu has it.
struct GatedShape {
  int64_t rows, packs, stride;
  int activation;
};

// Rows of `width` numbers, `stride` apart, in packs of `numbers`.
std::pair<GatedShape, Grid> gated_shape(int64_t rows, int64_t width, int64_t stride, int64_t numbers, int64_t activation) {
  const GatedShape s{rows, width / numbers, stride, static_cast<int>(activation)};
  Grid grid = grid_over(s.packs, THREADS);
  grid.y = static_cast<unsigned>(std::min<int64_t>({rows, MOST_BLOCK_ROWS, most_blocks}));
  return {s, grid};
}

// The halves of [rows, 2 * width]: the width, and how many numbers are in a pack.
std::pair<int64_t, int64_t> halves_of(const Tensor& both) {
  TORCH_CHECK(both.dim() == 2 && both.is_contiguous() && both.size(1) % 2 == 0 && has_kernel_dtype(both.scalar_type()),
              "gated: expected [rows, 2 * width], contiguous, f32 or bf16, found ", both.sizes(), " ", both.scalar_type());
  const int64_t width = both.size(1) / 2, numbers = numbers_of(both);
  return {width, width % numbers == 0 && is_aligned(both, 16) ? numbers : 1};
}

const void* at_number(const Tensor& x, int64_t number) {
  return static_cast<const char*>(x.const_data_ptr()) + number * static_cast<int64_t>(x.element_size());
}

}  // namespace

Tensor gated(const Tensor& gate, const Tensor& up, int64_t activation) {
  if (up.defined()) check("gated: up", up, gate, gate.scalar_type(), gate.numel());
  const Tensor out = at::empty(gate.sizes(), options(gate, gate.scalar_type()));
  const bool packed = gate.numel() % numbers_of(gate) == 0 && is_aligned(gate, 16) && is_aligned(up, 16);
  // All numbers in one row.
  const auto [s, grid] = gated_shape(1, gate.numel(), 0, packed ? numbers_of(gate) : 1, activation);
  const void *g = data(gate), *u = data(up), *o = data(out);
  launch(chosen(Kernel::gated_f32, gate.scalar_type(), packed), grid, gate, {&g, &u, &o, &s});
  return out;
}

std::array<Tensor, 2> gated_gradient(const Tensor& gate, const Tensor& up, const Tensor& of_out, int64_t activation) {
  check("gated: gradient", of_out, gate, gate.scalar_type(), gate.numel());
  const Tensor of_gate = at::empty(gate.sizes(), options(gate, gate.scalar_type()));
  const Tensor of_up = up.defined() ? at::empty(gate.sizes(), options(gate, gate.scalar_type())) : Tensor();
  const bool packed =
      gate.numel() % numbers_of(gate) == 0 && is_aligned(gate, 16) && is_aligned(up, 16) && is_aligned(of_out, 16);
  const auto [s, grid] = gated_shape(1, gate.numel(), 0, packed ? numbers_of(gate) : 1, activation);
  const void *g = data(gate), *u = data(up), *d = data(of_out), *og = data(of_gate), *ou = data(of_up);
  launch(chosen(Kernel::gated_gradient_f32, gate.scalar_type(), packed), grid, gate, {&g, &u, &d, &og, &ou, &s});
  return {of_gate, of_up};
}

Tensor gated_halves(const Tensor& both, int64_t activation) {
  const auto [width, numbers] = halves_of(both);
  const Tensor out = at::empty({both.size(0), width}, options(both, both.scalar_type()));
  const auto [s, grid] = gated_shape(both.size(0), width, 2 * width, numbers, activation);
  const void *g = data(both), *u = at_number(both, width), *o = data(out);
  launch(chosen(Kernel::gated_f32, both.scalar_type(), numbers > 1), grid, both, {&g, &u, &o, &s});
  return out;
}

Tensor gated_halves_gradient(const Tensor& both, const Tensor& of_out, int64_t activation) {
  const auto [width, most] = halves_of(both);
  check("gated: gradient", of_out, both, both.scalar_type(), both.size(0) * width);
  const int64_t numbers = is_aligned(of_out, 16) ? most : 1;
  const Tensor of_both = at::empty(both.sizes(), options(both, both.scalar_type()));
  const auto [s, grid] = gated_shape(both.size(0), width, 2 * width, numbers, activation);
  const void *g = data(both), *u = at_number(both, width), *d = data(of_out), *og = data(of_both), *ou = at_number(of_both, width);
  launch(chosen(Kernel::gated_gradient_f32, both.scalar_type(), numbers > 1), grid, both, {&g, &u, &d, &og, &ou, &s});
  return of_both;
}

// --- Attention of decoding ---------------------------------------------------------------------------------------------

namespace {

// Of attend.cu.
constexpr unsigned ATTEND_THREADS = 128;
constexpr int64_t CHUNK = 128, MOST_GROUP = 16, MOST_DIM = 256;

// As attend.cu has it.
struct AttendShape {
  int64_t capacity, window;
  int heads, kv_heads, dim, group, chunks;
  float scale;
};

}  // namespace

Tensor attend(const AttendOptions& of, const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& lengths) {
  const Tensor q = query.contiguous();
  TORCH_CHECK(q.dim() == 3 && keys.dim() == 2 && q.size(2) > 0 && has_kernel_dtype(q.scalar_type()) && of.capacity > 0, "attention of a step: ",
              q.sizes(), " ", q.scalar_type(), ", cache ", keys.sizes());
  const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2), kv_heads = keys.size(1) / dim;
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= MOST_GROUP && dim <= MOST_DIM && dim % 8 == 0,
              "attention of a step: ", heads, " heads of ", dim, " with ", kv_heads, " key heads");
  const int64_t places = rows * of.capacity * kv_heads * dim;
  check("keys of a cache", keys, q, q.scalar_type(), places);
  check("values of a cache", values, q, q.scalar_type(), places);
  check("lengths of a cache", lengths, q, at::kLong, rows);
  TORCH_CHECK(is_aligned(keys, 16), "attention of a step: a cache that begins between multiples of 16 bytes");
  AttendShape s{};
  s.capacity = of.capacity, s.window = of.window, s.scale = static_cast<float>(of.scale);
  s.heads = static_cast<int>(heads), s.kv_heads = static_cast<int>(kv_heads), s.dim = static_cast<int>(dim);
  s.group = static_cast<int>(heads / kv_heads);
  s.chunks = static_cast<int>((std::min(of.longest, of.capacity) + CHUNK - 1) / CHUNK);
  const int64_t numbers = rows * kv_heads * s.chunks * s.group;
  const Tensor tops = at::empty({numbers}, options(q, at::kFloat)), sums = at::empty({numbers}, options(q, at::kFloat));
  const Tensor parts = at::empty({numbers, dim}, options(q, at::kFloat)), out = at::empty(q.sizes(), options(q, q.scalar_type()));
  const void *in = data(q), *k = data(keys), *v = data(values), *n = data(lengths), *t = data(tops), *u = data(sums), *p = data(parts);
  const void* o = data(out);
  const Grid grid{static_cast<unsigned>(rows * kv_heads), static_cast<unsigned>(s.chunks), ATTEND_THREADS};
  launch(is_f32(q) ? Kernel::attend_f32 : Kernel::attend_bf16, grid, q, {&in, &k, &v, &n, &t, &u, &p, &s});
  launch(is_f32(q) ? Kernel::attend_combine_f32 : Kernel::attend_combine_bf16, {static_cast<unsigned>(rows * heads), 1, ATTEND_THREADS}, q,
         {&n, &t, &u, &p, &o, &s});
  return out;
}

// --- Quantized weights -------------------------------------------------------------------------------------------------

namespace {

// Of quantized.cu.
constexpr unsigned QUANTIZED_THREADS = 256;
constexpr int64_t COLUMNS = 4, CODES = 32, ROWS = 4;
// With more rows the values of the weight are made once, and libtorch's product is faster.
constexpr int64_t MOST_QUANTIZED_ROWS = 8;

// As quantized.cu has it.
struct QuantizedShape {
  int64_t in, out, rows, nested_block;
  int shift;
  float offset;
};

}  // namespace

bool multiplies_quantized(const QuantizedMatrix& w, const Tensor& like, int64_t rows, at::ScalarType dtype) {
  const bool fits = w.map && w.in > 0 && w.in % CODES == 0 && w.out > 0 && w.block >= CODES && reinterpret_cast<uintptr_t>(w.codes) % 16 == 0;
  return takes(like) && fits && has_kernel_dtype(dtype) && rows <= MOST_QUANTIZED_ROWS;
}

Tensor quantized_product(const QuantizedMatrix& w, const Tensor& given, const Tensor& bias) {
  Tensor x = given.contiguous();
  if (!is_aligned(x, 16)) x = x.clone();
  if (bias.defined()) check("bias of a quantized weight", bias, x, x.scalar_type(), w.out);
  const Tensor out = at::empty({x.size(0), w.out}, options(x, x.scalar_type()));
  QuantizedShape s{};
  s.in = w.in, s.out = w.out, s.rows = x.size(0), s.nested_block = w.nested_block, s.offset = w.offset;
  while (int64_t{1} << s.shift < w.block) s.shift++;
  const bool one = s.rows == 1;
  const int64_t of_block = QUANTIZED_THREADS / 32 * COLUMNS;
  const Grid grid{static_cast<unsigned>((w.out + of_block - 1) / of_block), static_cast<unsigned>((s.rows + ROWS - 1) / ROWS),
                  QUANTIZED_THREADS};
  const auto kernel = is_f32(x) ? (one ? Kernel::quantized_row_f32 : Kernel::quantized_rows_f32)
                                : (one ? Kernel::quantized_row_bf16 : Kernel::quantized_rows_bf16);
  const void *in = data(x), *codes = w.codes, *map = w.map, *scales = w.scales, *nested = w.nested, *nested_map = w.nested_map;
  const void *nested_scales = w.nested_scales, *b = data(bias), *o = data(out);
  launch(kernel, grid, x, {&in, &codes, &map, &scales, &nested, &nested_map, &nested_scales, &b, &o, &s});
  return out;
}

// --- Optimizer steps ---------------------------------------------------------------------------------------------------

void adamw_rounded(const AdamWStep& step, const Tensor& param, const Tensor& grad, const Tensor& first, const Tensor& second,
                   const uint64_t* keys) {
  const int64_t count = param.numel();
  int aligned = 1;
  for (const Tensor* x : {&param, &grad, &first, &second}) {
    check("a step in bf16", *x, param, at::kBFloat16, count);
    aligned = aligned && is_aligned(*x, 8);
  }
  const void *p = data(param), *g = data(grad), *m = data(first), *v = data(second);
  launch(Kernel::adamw_rounded, grid_over(count, 4 * THREADS), param, {&step, &p, &g, &m, &v, &count, &keys[0], &keys[1], &keys[2], &aligned});
}

void adamw_blocked(const AdamWStep& step, const Tensor& param, const Tensor& grad, const BlockedMoment& first,
                   const BlockedMoment& second) {
  const int64_t count = param.numel();
  const void *p = data(param), *g = data(grad);
  // A block for each block of numbers.
  const Grid grid{static_cast<unsigned>((count + THREADS - 1) / THREADS), 1, THREADS};
  launch(Kernel::adamw_blocked, grid, param, {&step, &p, &g, &first, &second, &count});
}

}  // namespace tch_ext::gpu

using namespace tch_ext;

extern "C" {

// Name of the source of kernel `index`, and its own; null after the last.
const char* tch_ext_gpu_source(size_t index) { return index < gpu::COUNT ? gpu::SOURCES[index] : nullptr; }
const char* tch_ext_gpu_kernel(size_t index) { return index < gpu::COUNT ? gpu::NAMES[index] : nullptr; }

char* tch_ext_gpu_versions(int device, int* nvrtc, int* arch) {
  return guard([&] {
    TORCH_CHECK(gpu::functions, "the CUDA library that `make cuda` builds is not loaded, or was built by an earlier version");
    if (char* message = gpu::functions->versions(device, nvrtc, arch)) {
      const std::string text = message;
      free(message);
      TORCH_CHECK(false, text);
    }
  });
}

char* tch_ext_gpu_compile(const char* source, const char* name, const char* const* options, int count, char** binary, size_t* size) {
  return gpu::functions->compile(source, name, options, count, binary, size);
}

void tch_ext_gpu_free(char* binary) { free(binary); }

// Loads the binary of a source, and finds its kernels in it.
char* tch_ext_gpu_load(const char* source, const void* binary, int device) {
  void* library = nullptr;
  if (char* message = gpu::functions->load(binary, device, &library)) return message;
  for (size_t i = 0; i < gpu::COUNT; i++) {
    if (strcmp(gpu::SOURCES[i], source) != 0) continue;
    if (char* message = gpu::functions->find(library, gpu::NAMES[i], &gpu::loaded[i])) return message;
  }
  return nullptr;
}

// Lets the kernels compute on the GPUs whose bits are set, if all are loaded; with 0 on none.
char* tch_ext_gpu_use(uint64_t devices) {
  return guard([&] {
    for (size_t i = 0; i < gpu::COUNT; i++)
      TORCH_CHECK(devices == 0 || gpu::loaded[i], gpu::NAMES[i], ": the kernel is not loaded");
    gpu::devices = devices;
    gpu::is_loaded = devices != 0;
  });
}

bool tch_ext_gpu_has(int device) { return gpu::is_loaded && device < 64 && (gpu::devices >> device & 1) != 0; }

// Lets the kernels' sources compute tensors of the CPU, slowly, their threads in this order of emulate.h; 0 ends it. For tests.
void tch_ext_gpu_emulate(int order) {
  if (order != 0) gpu::emulated::set_order(order);
  gpu::is_emulated = order != 0;
}
bool tch_ext_gpu_is_emulated() { return gpu::is_emulated; }

// Lets at most so many blocks do the work that is divided over blocks, or with 0 as many as are good; for checks.
void tch_ext_gpu_limit_blocks(int64_t most) { gpu::most_blocks = most > 0 ? most : gpu::MOST_BLOCKS; }

// How often kernel `index` was started in this process.
int64_t tch_ext_gpu_launches(size_t index) { return index < gpu::COUNT ? gpu::launches[index].load() : 0; }

// Blocks and threads of a grid over pieces of work.
void tch_ext_gpu_grid(int64_t count, int64_t per_block, unsigned* blocks, unsigned* threads) {
  const gpu::Grid grid = gpu::grid_over(count, per_block);
  *blocks = grid.x;
  *threads = grid.threads;
}

}  // extern "C"
