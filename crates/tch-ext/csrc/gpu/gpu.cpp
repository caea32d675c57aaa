// The host's side of the kernels for GPUs: which one, with how many blocks, from which tensors.
#include "gpu.h"

#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
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
// More blocks than fill any GPU; the kernels go on from there.
constexpr int64_t MOST_BLOCKS = 1 << 20;
// Rows of a block in the sums for the gradient of a norm's weight.
constexpr int64_t LEAST_ROWS_OF_PART = 32, MOST_PARTS = 256;

// The loaded kernels, and the architecture that they are compiled for; they compute on GPUs of this one.
void* loaded[COUNT] = {};
std::atomic<bool> is_loaded{false};
std::atomic<uint64_t> devices{0};
// A test runs the kernels on the processor.
std::atomic<bool> is_emulated{false};
std::array<std::atomic<int64_t>, COUNT> launches{};

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
  return {static_cast<unsigned>(std::min(blocks, MOST_BLOCKS)), 1, THREADS};
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
  int64_t threads;
  int heads, entries, parts, head_dim, half, groups;
  float sign;
};

}  // namespace

bool rotates(const Tensor& x, at::ScalarType dtype) {
  return takes(x) && x.dim() == 4 && has_kernel_dtype(x.scalar_type()) && has_kernel_dtype(dtype);
}

Tensor rotated(const Tensor& given, const Tensor& cosines, const Tensor& sines, int64_t parts, bool back, at::ScalarType dtype) {
  const Tensor x = given.contiguous(), cos = cosines.contiguous(), sin = sines.contiguous();
  const int half = static_cast<int>(cos.size(1)), head_dim = static_cast<int>(x.size(3));
  const Tensor out = at::empty(x.sizes(), options(x, dtype));
  const bool packed = half % 4 == 0 && head_dim % 4 == 0 && is_aligned(x, 16) && is_aligned(cos, 16) && is_aligned(sin, 16);
  RotaryShape shape{};
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

// --- Norms and the residual stream -------------------------------------------------------------------------------------

std::array<Tensor, 3> norm(const NormOptions& of, const Tensor& x, const Tensor& weight, const Tensor& bias, at::ScalarType dtype) {
  const int64_t width = weight.numel(), rows = x.numel() / width;
  check("weight of a norm", weight, x, at::kFloat, width);
  if (bias.defined()) check("bias of a norm", bias, x, at::kFloat, width);
  check("input of a norm", x, x, at::kFloat, rows * width);
  const Tensor out = at::empty(x.sizes(), options(x, dtype)), rstds = at::empty({rows}, options(x, at::kFloat));
  const Tensor means = of.center ? at::empty({rows}, options(x, at::kFloat)) : Tensor();
  const void *in = data(x), *w = data(weight), *b = data(bias), *o = data(out), *m = data(means), *r = data(rstds);
  const float eps = static_cast<float>(of.eps), offset = static_cast<float>(of.offset);
  const int center = of.center;
  launch(dtype == at::kFloat ? Kernel::norm_f32 : Kernel::norm_bf16, of_rows(rows, THREADS), x,
         {&in, &w, &b, &o, &m, &r, &width, &eps, &offset, &center});
  return {out, means, rstds};
}

Tensor norm_gradient(const NormOptions& of, const Tensor& of_out, const Tensor& x, const Tensor& weight, const Tensor& means,
                     const Tensor& rstds) {
  const int64_t width = weight.numel(), rows = x.numel() / width;
  const Tensor of_x = at::empty(x.sizes(), options(x, at::kFloat));
  const void *d = data(of_out), *in = data(x), *w = data(weight), *m = data(means), *r = data(rstds), *o = data(of_x);
  const float offset = static_cast<float>(of.offset);
  const int center = of.center;
  launch(is_f32(of_out) ? Kernel::norm_gradient_f32 : Kernel::norm_gradient_bf16, of_rows(rows, THREADS), x,
         {&d, &in, &w, &m, &r, &o, &width, &offset, &center});
  return of_x;
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
  Grid grid = grid_over(width, THREADS);
  grid.y = static_cast<unsigned>(parts);
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

// --- Gated MLPs --------------------------------------------------------------------------------------------------------

Tensor gated(const Tensor& gate, const Tensor& up, int64_t activation) {
  if (up.defined()) check("gated: up", up, gate, gate.scalar_type(), gate.numel());
  const Tensor out = at::empty(gate.sizes(), options(gate, gate.scalar_type()));
  const int64_t numbers = numbers_of(gate);
  const bool packed = gate.numel() % numbers == 0 && is_aligned(gate, 16) && is_aligned(up, 16);
  const int64_t packs = gate.numel() / (packed ? numbers : 1);
  const void *g = data(gate), *u = data(up), *o = data(out);
  const int which = static_cast<int>(activation);
  launch(chosen(Kernel::gated_f32, gate.scalar_type(), packed), grid_over(packs, THREADS), gate, {&g, &u, &o, &packs, &which});
  return out;
}

std::array<Tensor, 2> gated_gradient(const Tensor& gate, const Tensor& up, const Tensor& of_out, int64_t activation) {
  check("gated: gradient", of_out, gate, gate.scalar_type(), gate.numel());
  const Tensor of_gate = at::empty(gate.sizes(), options(gate, gate.scalar_type()));
  const Tensor of_up = up.defined() ? at::empty(gate.sizes(), options(gate, gate.scalar_type())) : Tensor();
  const int64_t numbers = numbers_of(gate);
  const bool packed =
      gate.numel() % numbers == 0 && is_aligned(gate, 16) && is_aligned(up, 16) && is_aligned(of_out, 16);
  const int64_t packs = gate.numel() / (packed ? numbers : 1);
  const void *g = data(gate), *u = data(up), *d = data(of_out), *og = data(of_gate), *ou = data(of_up);
  const int which = static_cast<int>(activation);
  launch(chosen(Kernel::gated_gradient_f32, gate.scalar_type(), packed), grid_over(packs, THREADS), gate,
         {&g, &u, &d, &og, &ou, &packs, &which});
  return {of_gate, of_up};
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

char* tch_ext_gpu_compile(const char* source, const char* name, int arch, char** binary, size_t* size) {
  return gpu::functions->compile(source, name, arch, binary, size);
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

// Whether tensors of the CPU are computed by the kernels' sources, slowly; for tests.
void tch_ext_gpu_emulate(bool on) { gpu::is_emulated = on; }
bool tch_ext_gpu_is_emulated() { return gpu::is_emulated; }

// How often kernel `index` was started in this process.
int64_t tch_ext_gpu_launches(size_t index) { return index < gpu::COUNT ? gpu::launches[index].load() : 0; }

// Blocks and threads of a grid over pieces of work.
void tch_ext_gpu_grid(int64_t count, int64_t per_block, unsigned* blocks, unsigned* threads) {
  const gpu::Grid grid = gpu::grid_over(count, per_block);
  *blocks = grid.x;
  *threads = grid.threads;
}

}  // extern "C"
