// The kernels as functions of tensors, differentiable where training needs it. The gradient of a weight is added to its
// `.grad` in place, without a temporary tensor of the weight's size.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/autograd.h>

#include "common.h"
#include "gpu/gpu.h"
#include "kernels.h"
#include "ordered.h"
#include "products.h"

// Exported by libtorch, but not declared in a header.
namespace at::native {
void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& out, float beta, float alpha) __attribute__((weak));
Tensor mkldnn_linear_pointwise(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                               std::string_view activation, c10::List<std::optional<Scalar>> numbers,
                               std::optional<std::string_view> algorithm) __attribute__((weak));
}  // namespace at::native

namespace tch_ext {

extern const Kernels kernels_default;
#ifdef TCH_EXT_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

const Kernels& kernels() {
#ifdef TCH_EXT_X86
  static const Kernels& chosen = [&]() -> const Kernels& {
    const std::string capability = at::get_cpu_capability();
    return capability == "AVX512" ? kernels_avx512 : capability == "AVX2" ? kernels_avx2 : kernels_default;
  }();
  return chosen;
#else
  return kernels_default;
#endif
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// --- Products -------------------------------------------------------------------------------------------------------

// Number of multiplications below which oneDNN's kernel lookup takes longer than the product.
constexpr int64_t ONEDNN_MIN = 1 << 20;

// Returns true if oneDNN should compute large f32 products. libtorch uses MKL for f32, which does not use AVX-512 on
// non-Intel CPUs; there oneDNN is twice as fast, at the same precision.
bool onednn_takes_f32() {
#ifdef TCH_EXT_X86
  static const bool foreign_avx512 = at::get_cpu_capability() == "AVX512" && !__builtin_cpu_is("intel") &&
                                     at::native::mkldnn_matmul && at::native::mkldnn_linear_pointwise &&
                                     at::globalContext().userEnabledMkldnn();
  return foreign_avx512;
#else
  return false;
#endif
}

// Returns true if oneDNN should compute a product [m, k] by [k, n]. A matrix-vector product is memory-bound and gains
// nothing.
bool prefers_onednn(const Tensor& like, int64_t m, int64_t k, int64_t n) {
  return onednn_takes_f32() && like.is_cpu() && like.scalar_type() == at::kFloat && n > 1 && m * k * n >= ONEDNN_MIN;
}

// Returns true if the CPU has instructions by which libtorch, that is oneDNN, multiplies bf16 or f16. Without them libtorch's own
// loops do, at a hundredth to a tenth of the rate of f32.
bool has_fast_products(at::ScalarType dtype) {
  static const auto supported = [](const char* name) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
    return !op || op->typed<bool()>().call();
  };
  static const bool bf16 = supported("mkldnn::_is_mkldnn_bf16_supported");
  static const bool f16 = supported("mkldnn::_is_mkldnn_fp16_supported");
  return dtype == at::kBFloat16 ? bf16 : dtype == at::kHalf ? f16 : true;
}

// Returns true if a product on `x` is computed in f32 from converted operands.
bool widens(const Tensor& x) { return x.is_cpu() && !has_fast_products(x.scalar_type()); }

// Memory for temporary tensors of one purpose, kept by the thread from call to call: memory that is allocated anew between the
// tensors that a graph stores leaves holes in the heap.
class Kept {
 public:
  // A tensor of `shape`, stored column after column if `transposed`; its contents are undefined.
  Tensor take(at::IntArrayRef shape, at::ScalarType dtype, bool transposed = false) {
    const int64_t bytes = c10::multiply_integers(shape) * static_cast<int64_t>(c10::elementSize(dtype));
    if (!bytes_.defined() || bytes_.numel() < bytes) {
      bytes_.reset();
      bytes_ = at::empty({bytes}, at::TensorOptions(at::kByte));
    }
    const Tensor flat = bytes_.narrow(0, 0, bytes).view(dtype);
    return transposed ? flat.view({shape[1], shape[0]}).t() : flat.view(shape);
  }

  // `x`, a matrix, in f32.
  Tensor widened(const Tensor& x) {
    const Tensor wide = take(x.sizes(), at::kFloat, x.stride(0) < x.stride(1));
    wide.copy_(x);
    return wide;
  }

 private:
  Tensor bytes_;
};

// `x` in f32: itself, or on a CPU a copy in `kept`, which the next call replaces.
Tensor in_f32(const Tensor& x, Kept& kept) {
  return x.is_cpu() && x.scalar_type() != at::kFloat ? kept.widened(x) : x.to(at::kFloat);
}

// Number of elements of an operand that are converted at once, and most rows and columns of a piece of the result: all of them stay
// in the CPU's cache.
constexpr int64_t WIDE = 1 << 19, WIDE_ROWS = 2048, WIDE_COLUMNS = 1024;

// out = a b + bias, or out += a b, computed in f32 and rounded once. `out` is f32 or has the dtype of `a` and `b`; `bias` has a number
// for each column.
void multiply_widened(const Tensor& out, const Tensor& a, const Tensor& b, bool add, const MaybeTensor& bias = {}) {
  thread_local Kept of_rows, of_columns, of_sums;
  const int64_t rows = a.size(0), depth = std::max<int64_t>(a.size(1), 1), width = b.size(1);
  const bool direct = out.scalar_type() == at::kFloat;
  const Tensor wide_bias = bias ? bias->to(at::kFloat) : Tensor();
  const int64_t most_rows = std::clamp<int64_t>(4 * WIDE / depth, 64, WIDE_ROWS);
  const int64_t most_columns = std::clamp<int64_t>(WIDE / depth, 64, WIDE_COLUMNS);
  for (int64_t i = 0; i < rows; i += most_rows) {
    const int64_t count = std::min(most_rows, rows - i);
    const Tensor wide = of_rows.widened(a.narrow(0, i, count));
    for (int64_t j = 0; j < width; j += most_columns) {
      const int64_t columns = std::min(most_columns, width - j);
      const Tensor tile = of_columns.widened(b.narrow(1, j, columns));
      const Tensor part = out.narrow(0, i, count).narrow(1, j, columns);
      Tensor sums = direct ? part : of_sums.take({count, columns}, at::kFloat);
      if (add && !direct) sums.copy_(part);
      if (add)
        sums.addmm_(wide, tile);
      else if (bias)
        at::addmm_out(sums, wide_bias.narrow(0, j, columns), wide, tile);
      else
        at::mm_out(sums, wide, tile);
      if (!direct) part.copy_(sums);
    }
  }
}

// out = a b, or out += a b.
void multiply_into(const Tensor& out, const Tensor& a, const Tensor& b, bool add) {
  if (widens(a)) return multiply_widened(out, a, b, add);
  if (prefers_onednn(out, a.size(0), a.size(1), b.size(1)))
    at::native::mkldnn_matmul(a, b, out, add ? 1.f : 0.f, 1.f);
  else if (add)
    Tensor(out).addmm_(a, b);
  else
    at::mm_out(const_cast<Tensor&>(out), a, b);
}

Tensor product(const Tensor& a, const Tensor& b) {
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options().requires_grad(false));
  multiply_into(out, a, b, false);
  return out;
}

// Returns the gradient of a leaf for in-place accumulation; creates it if necessary.
Tensor& grad_of(const Tensor& leaf) {
  Tensor& grad = leaf.mutable_grad();
  if (!grad.defined()) grad = at::zeros_like(leaf, leaf.options().requires_grad(false));
  return grad;
}

// Number of elements of a bf16 product that are computed at once: they stay in the CPU cache until they are added.
constexpr int64_t PIECE = 1 << 21;

// grad += a b, in the dtype of `grad`. Where `grad` is f32 and the product bf16, it is rounded twice on a CPU: to bf16, which is the
// result of oneDNN's product, and when it is added.
void add_product_to(Tensor grad, const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) &&
                  grad.sizes() == at::IntArrayRef({a.size(0), b.size(1)}) && a.device() == grad.device() &&
                  b.device() == grad.device(),
              "gradient ", grad.sizes(), " on ", grad.device(), ": a product of ", a.sizes(), " and ", b.sizes(), " on ",
              a.device());
  if (a.scalar_type() == grad.scalar_type() || (widens(a) && grad.is_cpu() && grad.scalar_type() == at::kFloat))
    return multiply_into(grad, a, b, true);
  if (grad.is_cuda() && grad.scalar_type() == at::kFloat) {
    // In one pass over the gradient; the sums are f32.
    at::addmm_out(grad, grad, a, b, at::kFloat);
    return;
  }
  if (!(grad.is_cpu() && grad.scalar_type() == at::kFloat && a.scalar_type() == at::kBFloat16 &&
        grad.is_contiguous())) {
    grad.add_(product(a, b));
    return;
  }
  if (grad.numel() == 0) return;
  const int64_t rows = a.size(0), width = b.size(1), pieces = (rows * width + PIECE - 1) / PIECE;
  const int64_t most = (rows + pieces - 1) / pieces;
  const Tensor piece = at::empty({most, width}, a.options().requires_grad(false));
  for (int64_t from = 0; from < rows; from += most) {
    const int64_t count = std::min(most, rows - from);
    multiply_into(piece.narrow(0, 0, count), a.narrow(0, from, count), b, false);
    float* sums = grad.mutable_data_ptr<float>() + from * width;
    kernels().bf16.sum(count * width, sums, piece.const_data_ptr<c10::BFloat16>(), nullptr, sums);
  }
}

// The same for the gradient of a leaf.
void add_product(const Tensor& leaf, const Tensor& a, const Tensor& b) { add_product_to(grad_of(leaf), a, b); }

const float* floats_or_null(const Tensor& x) { return x.defined() ? x.const_data_ptr<float>() : nullptr; }

// Returns the most elements of x with which the kernel for few rows is the fastest. Measured for 1 to 64 rows and widths of 256 to 4096
// against oneDNN on an EPYC with AVX-512; and against MKL on an EPYC with AVX2, where MKL has half to nine tenths of its rate.
int64_t most_of_few() {
#ifdef TCH_EXT_X86
  static const bool foreign_avx2 = at::get_cpu_capability() == "AVX2" && !__builtin_cpu_is("intel");
  if (foreign_avx2) return 1 << 17;
#endif
  return 1 << 15;
}

// Returns true if the kernel for few rows is the fastest.
bool are_few(at::ScalarType dtype, int64_t rows, int64_t depth) {
  // With more rows, CPUs with bf16 instructions are faster with oneDNN. Others convert bf16 in both ways, so the rule of f32 holds.
  if (dtype == at::kBFloat16 && has_fast_products(dtype)) return rows < 16;
  return (dtype == at::kFloat || dtype == at::kBFloat16) && rows <= 64 && rows * depth <= most_of_few();
}

// Computes a linear layer by the kernel for few rows, if it is the fastest.
std::optional<Tensor> few_rows(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  const auto dtype = x.scalar_type();
  const auto plain = [&](const Tensor& t) { return t.is_cpu() && t.is_contiguous() && t.scalar_type() == dtype; };
  if (!are_few(dtype, x.size(0), x.size(1)) || !plain(x) || !plain(weight) || (bias && !plain(*bias)))
    return std::nullopt;
  const int64_t rows = x.size(0), depth = x.size(1), width = weight.size(0);
  TORCH_CHECK(weight.size(1) == depth && (!bias || bias->numel() == width), "linear: x ", x.sizes(), ", weight ",
              weight.sizes());
  std::optional<Tensor> result;
  for_dtype(dtype, "linear", [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = kernels().of<T>().few_rows;
    if (!kernel) return;
    result = at::empty({rows, width}, x.options().requires_grad(false));
    kernel(rows, depth, width, x.const_data_ptr<T>(), weight.const_data_ptr<T>(),
           bias ? bias->const_data_ptr<T>() : nullptr, result->template mutable_data_ptr<T>());
  });
  return result;
}

// --- Linear ---------------------------------------------------------------------------------------------------------

// x matrix^T + bias, without a graph.
Tensor linear_of(const Tensor& x, const Tensor& matrix, const MaybeTensor& bias) {
  if (auto out = few_rows(x, matrix, bias)) return *out;
  if (widens(x)) {
    const Tensor out = at::empty({x.size(0), matrix.size(0)}, x.options().requires_grad(false));
    multiply_widened(out, x, matrix.t(), false, bias);
    return out;
  }
  if (prefers_onednn(x, x.size(0), x.size(1), matrix.size(0)))
    return at::native::mkldnn_linear_pointwise(x, matrix, bias, "none", c10::List<std::optional<at::Scalar>>(),
                                               std::nullopt);
  return at::linear(x, matrix, bias);
}

// Returns true if a product of a CPU can be written into columns of a matrix: not by oneDNN.
bool writes_columns(const Tensor& x, int64_t width) {
  return widens(x) || (x.scalar_type() == at::kFloat && !prefers_onednn(x, x.size(0), x.size(1), width));
}

// columns = x matrix^T + bias, without a graph; the columns of a larger matrix.
void linear_into(Tensor columns, const Tensor& x, const Tensor& matrix, const MaybeTensor& bias) {
  if (auto out = few_rows(x, matrix, bias)) {
    columns.copy_(*out);
  } else if (!writes_columns(x, matrix.size(0))) {
    columns.copy_(linear_of(x, matrix, bias));
  } else if (widens(x)) {
    multiply_widened(columns, x, matrix.t(), false, bias);
  } else if (bias) {
    at::addmm_out(columns, *bias, x, matrix.t());
  } else {
    at::mm_out(columns, x, matrix.t());
  }
}

// columns = a b, without a graph; the columns of a larger matrix.
void product_into(const Tensor& columns, const Tensor& a, const Tensor& b) {
  if (writes_columns(a, b.size(1)))
    multiply_into(columns, a, b, false);
  else
    columns.copy_(product(a, b));
}

// Calls `piece(from, count)` for pieces of the rows of `x`, at least once. A copy of a piece in f32 stays in a CPU's cache, and takes
// at most 64 MiB of a GPU, where fewer products are faster.
template <class F>
void in_pieces(const Tensor& x, F piece) {
  const int64_t elements = x.is_cpu() ? PIECE / 8 : PIECE * 8, width = std::max<int64_t>(x.size(1), 1), rows = x.size(0);
  const int64_t most = x.scalar_type() == at::kFloat ? rows : std::max<int64_t>(elements / width, 1);
  int64_t from = 0;
  do {
    const int64_t count = std::min(most, rows - from);
    piece(from, count);
    from += count;
  } while (from < rows);
}

// sums += a b, computed in f32 and rounded once more; a and b are f32, and `sums` has been rounded to its dtype before.
void add_f32_product(const Tensor& sums, const Tensor& a, const Tensor& b) {
  if (sums.scalar_type() == at::kFloat) return multiply_into(sums, a, b, true);
  thread_local Kept kept;
  in_pieces(sums, [&](int64_t from, int64_t count) {
    const Tensor piece = sums.narrow(0, from, count), wide = in_f32(piece, kept);
    multiply_into(wide, a.narrow(0, from, count), b, true);
    piece.copy_(wide);
  });
}

struct Linear : torch::autograd::Function<Linear> {
  // `weight` and `bias` are the leaves, `used` and `used_bias` the same values in the compute dtype.
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& used,
                        const MaybeTensor& bias, const MaybeTensor& used_bias, bool transposed) {
    const Tensor input = x.to(used.scalar_type());
    ctx->save_for_backward({input, weight, used, value_of(bias)});
    ctx->saved_data["transposed"] = transposed;
    ctx->saved_data["dtype"] = x.scalar_type();
    const Tensor matrix = transposed ? used.t() : used;
    return linear_of(input, matrix, used_bias);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &used = saved[2], &bias = saved[3];
    const bool transposed = ctx->saved_data["transposed"].toBool();
    const Tensor g = grads[0].to(used.scalar_type());
    if (weight.requires_grad()) transposed ? add_product(weight, x.t(), g) : add_product(weight, g.t(), x);
    if (bias.defined() && bias.requires_grad()) grad_of(bias).add_(g.sum(0, false, at::kFloat));
    Tensor dx;
    if (ctx->needs_input_grad(0))
      dx = product(g, transposed ? used.t() : used).to(ctx->saved_data["dtype"].toScalarType());
    return {dx, {}, {}, {}, {}, {}};
  }
};

// The term that an adapter adds before its second matrix: scale x a^T, f32.
Tensor low_rank(const Tensor& x, const Tensor& a, double scale) {
  thread_local Kept kept;
  const Tensor low = at::empty({x.size(0), a.size(0)}, a.options().requires_grad(false));
  in_pieces(x, [&](int64_t from, int64_t count) {
    multiply_into(low.narrow(0, from, count), in_f32(x.narrow(0, from, count), kept), a.t(), false);
  });
  return low.mul_(scale);
}

// Adds the gradients of an adapter's matrices; returns that of its low-rank term. `g` is the gradient of the layer's output.
Tensor low_rank_backward(const Tensor& g, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& low, double scale) {
  thread_local Kept kept;
  const Tensor d_low = at::empty({g.size(0), b.size(1)}, b.options().requires_grad(false));
  in_pieces(g, [&](int64_t from, int64_t count) {
    const Tensor wide = in_f32(g.narrow(0, from, count), kept);
    multiply_into(d_low.narrow(0, from, count), wide, b, false);
    if (b.requires_grad()) add_product(b, wide.t(), low.narrow(0, from, count));
  });
  d_low.mul_(scale);
  if (a.requires_grad())
    in_pieces(x, [&](int64_t from, int64_t count) {
      add_product(a, d_low.narrow(0, from, count).t(), in_f32(x.narrow(0, from, count), kept));
    });
  return d_low;
}

// A linear layer whose weight is frozen, with the low-rank matrices `a` [r, in] and `b` [out, r], f32, which are trained:
// x weight^T + bias + scale (x a^T) b^T. The products with `a` and `b` are f32. In bf16
// the result is rounded twice: the first term, and then the sum.
struct AdaptedLinear : torch::autograd::Function<AdaptedLinear> {
  // `used` and `used_bias` are weight and bias in the compute dtype.
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& used, const MaybeTensor& used_bias,
                        bool transposed, const Tensor& a, const Tensor& b, double scale) {
    const Tensor input = x.to(used.scalar_type());
    const Tensor low = low_rank(input, a, scale);
    ctx->save_for_backward({input, used, a, b, low});
    ctx->saved_data["transposed"] = transposed;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["dtype"] = x.scalar_type();
    Tensor out = linear_of(input, transposed ? used.t() : used, used_bias);
    add_f32_product(out, low, b.t());
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &used = saved[1], &a = saved[2], &b = saved[3], &low = saved[4];
    const Tensor g = grads[0].to(used.scalar_type());
    const Tensor d_low = low_rank_backward(g, x, a, b, low, ctx->saved_data["scale"].toDouble());
    Tensor dx;
    if (ctx->needs_input_grad(0)) {
      dx = product(g, ctx->saved_data["transposed"].toBool() ? used.t() : used);
      add_f32_product(dx, d_low, a);
      dx = dx.to(ctx->saved_data["dtype"].toScalarType());
    }
    return {dx, {}, {}, {}, {}, {}, {}};
  }
};

// --- Quantized linear layers ----------------------------------------------------------------------------------------

// A frozen weight [out, in] as it is stored: see `QuantizedMatrix`. Undefined tensors are absent.
struct QuantizedWeight {
  int64_t out, in;
  Tensor codes;   // uint8, two to a byte, or int8 [out, in]
  Tensor map;     // f32 [16]; undefined for eight bits
  Tensor scales;  // f32, or uint8 codes of scales; for eight bits the scale of each row
  Tensor nested_map, nested_scales;  // f32
  double offset;
  int64_t block, nested_block;

  bool four_bits() const { return map.defined(); }

  void check() const {
    const auto is = [&](const Tensor& t, at::ScalarType dtype, int64_t n) {
      return t.defined() && t.is_contiguous() && t.scalar_type() == dtype && t.numel() == n &&
             t.device() == codes.device();
    };
    const int64_t n = out * in;
    const bool pairs = four_bits() && block >= 32 && (block & (block - 1)) == 0;
    const int64_t blocks = pairs ? (n + block - 1) / block : out;
    const bool nests = nested_map.defined();
    const bool coded = four_bits() ? pairs && is(codes, at::kByte, (n + 1) / 2) && is(map, at::kFloat, 16)
                                   : is(codes, at::kChar, n) && !nests;
    const bool scaled = is(scales, nests ? at::kByte : at::kFloat, blocks) &&
                        (!nests || (nested_block > 0 && is(nested_map, at::kFloat, 256) &&
                                    is(nested_scales, at::kFloat, (blocks + nested_block - 1) / nested_block)));
    TORCH_CHECK(coded && scaled, "quantized weight [", out, ", ", in, "]: codes ", codes.sizes(), " ",
                codes.scalar_type(), ", scales ", scales.sizes(), " ", scales.scalar_type(), ", blocks of ", block);
  }

  QuantizedMatrix matrix() const {
    const bool nests = nested_map.defined();
    return {out,
            in,
            static_cast<const uint8_t*>(codes.const_data_ptr()),
            four_bits() ? map.const_data_ptr<float>() : nullptr,
            nests ? nullptr : scales.const_data_ptr<float>(),
            nests ? scales.const_data_ptr<uint8_t>() : nullptr,
            nests ? nested_map.const_data_ptr<float>() : nullptr,
            nests ? nested_scales.const_data_ptr<float>() : nullptr,
            static_cast<float>(offset),
            block,
            nested_block};
  }

  // The scales as f32, by libtorch's operations.
  Tensor plain_scales() const {
    if (!nested_map.defined()) return scales;
    const Tensor of_blocks = nested_scales.repeat_interleave(nested_block).narrow(0, 0, scales.numel());
    return nested_map.index_select(0, scales.flatten().to(at::kInt)).mul_(of_blocks).add_(offset);
  }

  // All values, by libtorch's operations on any device. Takes 6 bytes a value: indices of a byte's two values as i32, and values in f32.
  Tensor plain_values(at::ScalarType dtype) const {
    if (!four_bits()) return codes.to(at::kFloat).mul_(plain_scales().unsqueeze(1)).to(dtype);
    const int64_t n = out * in, whole = n / block;
    // Both values of each byte, [256, 2], as one number of 64 bits: so libtorch copies pairs, not single values.
    const Tensor firsts = map.unsqueeze(1).expand({16, 16}), seconds = map.unsqueeze(0).expand({16, 16});
    const Tensor pairs = at::stack({firsts, seconds}, 2).view({256, 2}).view(at::kLong).flatten();
    const Tensor values = pairs.index_select(0, codes.flatten().to(at::kInt)).view(at::kFloat).narrow(0, 0, n);
    const Tensor factors = plain_scales();
    values.narrow(0, 0, whole * block).view({whole, block}).mul_(factors.narrow(0, 0, whole).unsqueeze(1));
    if (whole * block < n) values.narrow(0, whole * block, n - whole * block).mul_(factors.narrow(0, whole, 1));
    return values.view({out, in}).to(dtype);
  }

  // Columns of rows, on a CPU, into `values`.
  Tensor part(Part part, const Tensor& values) const {
    for_dtype(values.scalar_type(), "quantized weight", [&](auto zero) {
      using T = decltype(zero);
      if (values.numel() > 0) kernels().of<T>().dequantize(matrix(), part, values.template mutable_data_ptr<T>());
    });
    return values;
  }

  bool has_kernels(at::ScalarType dtype) const {
    return codes.is_cpu() && (dtype == at::kFloat || dtype == at::kBFloat16);
  }

  Tensor values(at::ScalarType dtype) const {
    if (!has_kernels(dtype)) return plain_values(dtype);
    return part({0, out, 0, in}, at::empty({out, in}, codes.options().dtype(dtype)));
  }

  // x values^T + bias, without a graph.
  Tensor linear(const Tensor& x, const MaybeTensor& bias) const {
    const auto dtype = x.scalar_type();
    const bool plain_bias = !bias || (bias->scalar_type() == dtype && bias->is_contiguous());
    const bool fits = x.dim() == 2 && x.size(1) == in && plain_bias;
    if (fits && gpu::multiplies_quantized(matrix(), x, x.size(0), dtype)) return gpu::quantized_product(matrix(), x, value_of(bias));
    if (!has_kernels(dtype)) return linear_of(x, plain_values(dtype), bias);
    const int64_t rows = x.size(0);
    TORCH_CHECK(x.is_cpu() && x.size(1) == in &&
                    (!bias || (bias->is_cpu() && bias->numel() == out && bias->scalar_type() == dtype)),
                "quantized weight [", out, ", ", in, "] on a CPU: x ", x.sizes(), " on ", x.device());
    const Tensor result = at::empty({rows, out}, x.options().requires_grad(false));
    if (result.numel() == 0) return result;
    bool done = false;
    for_dtype(dtype, "quantized weight", [&](auto zero) {
      using T = decltype(zero);
      const auto kernel = kernels().of<T>().few_rows_quantized;
      if (!kernel || rows > FEW_ROWS || in == 0 || in % 16 != 0 || (bias && !bias->is_contiguous())) return;
      const Tensor input = x.contiguous();
      kernel(matrix(), rows, input.const_data_ptr<T>(), bias ? bias->const_data_ptr<T>() : nullptr,
             result.mutable_data_ptr<T>());
      done = true;
    });
    if (done) return result;
    for (int64_t from = 0; from < out; from += tile(in)) {
      const int64_t count = std::min(tile(in), out - from);
      const Tensor values = part({from, count, 0, in}, tile_values().take({count, in}, dtype));
      const MaybeTensor bias_of_tile = bias ? MaybeTensor(bias->narrow(0, from, count)) : std::nullopt;
      linear_into(result.narrow(1, from, count), x, values, bias_of_tile);
    }
    return result;
  }

  // g values, without a graph.
  Tensor product_with(const Tensor& g) const {
    const auto dtype = g.scalar_type();
    if (!has_kernels(dtype)) return product(g, plain_values(dtype));
    const Tensor result = at::empty({g.size(0), in}, g.options().requires_grad(false));
    for (int64_t from = 0; from < in; from += tile(out)) {
      const int64_t count = std::min(tile(out), in - from);
      const Tensor values = part({0, out, from, count}, tile_values().take({out, count}, dtype));
      product_into(result.narrow(1, from, count), g, values);
    }
    return result;
  }

 private:
  // Number of rows up to which the kernel on codes is faster than libtorch's product with the values.
  static constexpr int64_t FEW_ROWS = 8;

  static Kept& tile_values() {
    thread_local Kept kept;
    return kept;
  }

  // Rows, or columns, of `width` values in a tile, which stays in the CPU's cache.
  static int64_t tile(int64_t width) { return std::max<int64_t>(PIECE / 4 / std::max<int64_t>(width, 1) / 64, 1) * 64; }
};

// A linear layer with a quantized weight, and as `AdaptedLinear` if it has the matrices `a` and `b`. The backward pass computes the
// values again: the graph has the codes only.
struct QuantizedLinear : torch::autograd::Function<QuantizedLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const MaybeTensor& bias, const MaybeTensor& a,
                        const MaybeTensor& b, double scale, const QuantizedWeight* weight, at::ScalarType dtype) {
    const QuantizedWeight& w = *weight;
    w.check();
    const Tensor input = x.to(dtype);
    Tensor low;
    if (a) low = low_rank(input, *a, scale);
    ctx->save_for_backward({a ? input : Tensor(), value_of(a), value_of(b), low, w.codes, w.map, w.scales, w.nested_map,
                            w.nested_scales});
    ctx->saved_data["numbers"] = std::vector<int64_t>{w.out, w.in, w.block, w.nested_block};
    ctx->saved_data["offset"] = w.offset;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["compute"] = dtype;
    ctx->saved_data["dtype"] = x.scalar_type();
    Tensor out = w.linear(input, bias);
    if (a) add_f32_product(out, low, b->t());
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const auto n = ctx->saved_data["numbers"].toIntVector();
    const Tensor &x = saved[0], &a = saved[1], &b = saved[2], &low = saved[3];
    const QuantizedWeight weight{n[0],     n[1],     saved[4], saved[5], saved[6],
                                 saved[7], saved[8], ctx->saved_data["offset"].toDouble(), n[2], n[3]};
    const Tensor g = grads[0].to(ctx->saved_data["compute"].toScalarType());
    Tensor d_low;
    if (a.defined()) d_low = low_rank_backward(g, x, a, b, low, ctx->saved_data["scale"].toDouble());
    Tensor dx;
    if (ctx->needs_input_grad(0)) {
      dx = weight.product_with(g);
      if (a.defined()) add_f32_product(dx, d_low, a);
      dx = dx.to(ctx->saved_data["dtype"].toScalarType());
    }
    return {dx, {}, {}, {}, {}, {}, {}};
  }
};

// --- The residual stream --------------------------------------------------------------------------------------------

struct Residual : torch::autograd::Function<Residual> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& a, const MaybeTensor& b) {
    const Tensor second = value_of(b);
    ctx->saved_data["dtype"] = a.scalar_type();
    ctx->saved_data["two"] = b.has_value();
    for (const Tensor& branch : {a, b ? second : a})
      TORCH_CHECK(x.scalar_type() == at::kFloat && branch.device() == x.device() && branch.sizes() == x.sizes() &&
                      branch.scalar_type() == a.scalar_type() &&
                      (!x.is_cpu() || (x.is_contiguous() && branch.is_contiguous())),
                  "residual: x ", x.sizes(), " ", x.scalar_type(), ", branch ", branch.sizes(), " ",
                  branch.scalar_type());
    if (gpu::adds(x, a, second)) return gpu::residual(x, a, second);
    if (!x.is_cpu()) {
      Tensor out = at::add(x, a);
      return b ? out.add_(second) : out;
    }
    Tensor out = at::empty_like(x, x.options().requires_grad(false));
    for_dtype(a.scalar_type(), "residual", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().sum(x.numel(), x.const_data_ptr<float>(), a.const_data_ptr<T>(),
                            b ? second.const_data_ptr<T>() : nullptr, out.mutable_data_ptr<float>());
    });
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const Tensor branch = grads[0].to(ctx->saved_data["dtype"].toScalarType());
    return {grads[0], branch, ctx->saved_data["two"].toBool() ? branch : Tensor()};
  }
};

// --- Rotary positions -----------------------------------------------------------------------------------------------

// Rotates the first dimensions of the first `parts` entries of x [N, heads, entries, head_dim] by the angles whose cosines and
// sines are [N, dim / 2], in f32, pairing dimension i with i + dim / 2; by their negatives if `back`. Few operations, each over
// as much as possible: on a GPU each costs a start. Returns a new tensor of `dtype`.
Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t parts, bool back, at::ScalarType dtype) {
  if (gpu::rotates(x, dtype)) return gpu::rotated(x, cos, sin, parts, back, dtype);
  const int64_t half = cos.size(1), dim = 2 * half;
  const auto rotates = [&](const Tensor& of) { return of.narrow(2, 0, parts).narrow(3, 0, dim); };
  const auto half_of = [&](const Tensor& of, int64_t which) { return of.narrow(3, which * half, half); };
  const auto angles = [&](const Tensor& of) { return of.view({of.size(0), 1, 1, 1, half}); };
  Tensor source = at::empty({x.size(0), x.size(1), parts, dim}, x.options().dtype(at::kFloat).requires_grad(false));
  source.copy_(rotates(x));
  Tensor sum = at::mul(source.view({x.size(0), x.size(1), parts, 2, half}), angles(cos)).view_as(source);
  const Tensor sines = sin.view({sin.size(0), 1, 1, half});
  half_of(sum, 0).addcmul_(half_of(source, 1), sines, back ? 1 : -1);
  half_of(sum, 1).addcmul_(half_of(source, 0), sines, back ? -1 : 1);
  if (sum.sizes() == x.sizes()) return sum.to(dtype);
  Tensor out = at::empty(x.sizes(), x.options().dtype(dtype).requires_grad(false));
  out.copy_(x);
  rotates(out).copy_(sum);
  return out;
}

struct Rotate : torch::autograd::Function<Rotate> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t parts,
                        at::ScalarType dtype) {
    TORCH_CHECK(x.dim() == 4 && cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.size(0) == x.size(0) &&
                    cos.scalar_type() == at::kFloat && cos.device() == x.device() && 2 * cos.size(1) <= x.size(3) &&
                    parts <= x.size(2),
                "rotate: x ", x.sizes(), ", angles ", cos.sizes(), " and ", sin.sizes(), ", parts ", parts);
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["parts"] = parts;
    ctx->saved_data["dtype"] = x.scalar_type();
    return rotated(x, cos, sin, parts, false, dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const auto dtype = ctx->saved_data["dtype"].toScalarType();
    return {rotated(grads[0], saved[0], saved[1], ctx->saved_data["parts"].toInt(), true, dtype), {}, {}, {}, {}};
  }
};

// --- Embedding ------------------------------------------------------------------------------------------------------

// grad[ids[i]] += rows[i], in the dtype of `grad`.
void add_rows(Tensor& grad, const Tensor& ids, const Tensor& rows) {
  const OrderedSums ordered(grad);
  if (grad.scalar_type() == at::kFloat) {
    grad.index_add_(0, ids, rows.to(at::kFloat));
    return;
  }
  // The rows of a frequent token are summed in f32 first: in bf16 a sum would stop to grow.
  const auto [unique, places, counts] = at::_unique2(ids, /*sorted=*/true, /*return_inverse=*/true);
  const Tensor sums = at::zeros({unique.size(0), grad.size(1)}, grad.options().dtype(at::kFloat));
  sums.index_add_(0, places, rows.to(at::kFloat));
  grad.index_add_(0, unique, sums.to(grad.scalar_type()));
}

struct Embedding : torch::autograd::Function<Embedding> {
  static Tensor forward(AutogradContext* ctx, const Tensor& table, const Tensor& ids) {
    ctx->save_for_backward({table, ids});
    return table.index_select(0, ids);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    if (saved[0].requires_grad()) add_rows(grad_of(saved[0]), saved[1], grads[0]);
    return {{}, {}};
  }
};

// --- Attention ------------------------------------------------------------------------------------------------------

// One fused tensor [tokens, width] of queries, keys and values, or one tensor of each.
struct Projections {
  std::vector<Tensor> tensors;
  bool by_head;  // in a fused tensor, query, key and value of a head are adjacent

  // Returns the heads of queries, keys and values in `from`, which has the layout of `tensors`.
  template <typename T, typename Tensors>
  std::array<Heads<T>, 3> heads(const AttentionShape& shape, const Tensors& from) const {
    const int64_t dim = shape.head_dim;
    std::array<Heads<T>, 3> result;
    const int64_t before[3] = {0, shape.heads * dim, (shape.heads + shape.kv_heads) * dim};
    for (int i = 0; i < 3; i++) {
      const bool fused = from.size() == 1;
      const Tensor& tensor = from[fused ? 0 : i];
      T* data;
      if constexpr (std::is_const_v<T>)
        data = tensor.template const_data_ptr<std::remove_const_t<T>>();
      else
        data = tensor.template mutable_data_ptr<T>();
      if (fused) data += by_head ? i * dim : before[i];
      result[i] = {data, tensor.size(1), fused && by_head ? 3 * dim : dim};
    }
    return result;
  }
};

void check_projections(const AttentionShape& shape, const Projections& x, int64_t tokens) {
  const int64_t widths[3] = {shape.heads, shape.kv_heads, shape.kv_heads};
  TORCH_CHECK(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0 && shape.head_dim > 0,
              "attention: ", shape.heads, " heads of ", shape.head_dim, " over ", shape.kv_heads);
  TORCH_CHECK(shape.window >= 0 && (shape.causal || shape.window == 0), "attention: a window of ", shape.window,
              shape.causal ? "" : " without causality");
  TORCH_CHECK(x.tensors.size() == 1 || x.tensors.size() == 3, "attention: expected one tensor or three");
  TORCH_CHECK(!x.by_head || (x.tensors.size() == 1 && shape.heads == shape.kv_heads),
              "attention: by head is one tensor");
  for (size_t i = 0; i < x.tensors.size(); i++) {
    const int64_t width = (x.tensors.size() == 1 ? shape.heads + 2 * shape.kv_heads : widths[i]) * shape.head_dim;
    const Tensor& tensor = x.tensors[i];
    TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.sizes() == at::IntArrayRef({tokens, width}) &&
                    tensor.scalar_type() == x.tensors[0].scalar_type(),
                "attention: expected [", tokens, ", ", width, "], found ", tensor.sizes(), " ", tensor.options());
  }
}

Rotation rotation_of(const AttentionShape& shape, const Tensor& cos, const Tensor& sin, int64_t tokens) {
  if (!cos.defined()) return {nullptr, nullptr, 0};
  for (const Tensor& x : {cos, sin})
    TORCH_CHECK(x.is_cpu() && x.is_contiguous() && x.scalar_type() == at::kFloat && x.dim() == 2 &&
                    x.size(0) == tokens && x.size(1) == cos.size(1) && 2 * x.size(1) <= shape.head_dim,
                "attention: angles of shape ", x.sizes(), " for ", tokens, " tokens");
  return {cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), cos.size(1)};
}

template <typename T>
Cache<T> cache_of(const AttentionShape& shape, const Tensor& keys, const Tensor& values, int64_t rows,
                  int64_t capacity) {
  if (!keys.defined()) return {nullptr, nullptr, 0};
  const int64_t width = shape.kv_heads * shape.head_dim;
  for (const Tensor& x : {keys, values})
    TORCH_CHECK(x.is_cpu() && x.is_contiguous() && x.sizes() == at::IntArrayRef({rows * capacity, width}),
                "attention: cache of shape ", x.sizes(), " for ", rows, " rows of ", capacity);
  return {keys.mutable_data_ptr<T>(), values.mutable_data_ptr<T>(), capacity};
}

struct AttentionCall {
  AttentionShape shape;
  std::vector<int64_t> starts;
  bool by_head;

  Packed packed() const { return {starts.data(), static_cast<int64_t>(starts.size()) - 1}; }
};

// Returns the output and the log-sum-exp of the scores.
std::pair<Tensor, Tensor> attend(const AttentionCall& call, const std::vector<Tensor>& inputs, const Tensor& cos,
                                 const Tensor& sin, const Tensor& keys, const Tensor& values, int64_t capacity) {
  const AttentionShape& shape = call.shape;
  const Projections projections{inputs, call.by_head};
  // Tokens after the last sequence are padding: no token attends to them, and their output is 0.
  const int64_t tokens = inputs[0].size(0), counted = call.starts.back();
  TORCH_CHECK(counted <= tokens, "attention: sequences of ", counted, " tokens in ", tokens);
  check_projections(shape, projections, tokens);
  const auto options = inputs[0].options().requires_grad(false);
  Tensor out = at::empty({tokens, shape.heads * shape.head_dim}, options);
  out.narrow(0, counted, tokens - counted).zero_();
  Tensor lse = at::empty({tokens, shape.heads}, options.dtype(at::kFloat));
  const Rotation rotation = rotation_of(shape, cos, sin, tokens);
  for_dtype(out.scalar_type(), "attention", [&](auto zero) {
    using T = decltype(zero);
    const auto [q, k, v] = projections.heads<const T>(shape, inputs);
    const Cache<T> cache = cache_of<T>(shape, keys, values, call.packed().rows, capacity);
    kernels().of<T>().attention.forward(shape, call.packed(), q, k, v, rotation, out.mutable_data_ptr<T>(),
                                        lse.mutable_data_ptr<float>(), cache);
  });
  return {out, lse};
}

struct Attention : torch::autograd::Function<Attention> {
  // `k` and `v` are empty if `q` is a fused projection.
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const MaybeTensor& k, const MaybeTensor& v,
                        const MaybeTensor& cos, const MaybeTensor& sin, const AttentionCall* call) {
    std::vector<Tensor> inputs{q};
    if (k) inputs.insert(inputs.end(), {*k, *v});
    auto [out, lse] = attend(*call, inputs, value_of(cos), value_of(sin), {}, {}, 0);
    ctx->save_for_backward({q, value_of(k), value_of(v), value_of(cos), value_of(sin), out, lse});
    const AttentionShape& s = call->shape;
    ctx->saved_data["starts"] = call->starts;
    ctx->saved_data["numbers"] =
        std::vector<int64_t>{s.heads, s.kv_heads, s.head_dim, s.window, s.causal, call->by_head};
    ctx->saved_data["scale"] = static_cast<double>(s.scale);
    ctx->saved_data["softcap"] = static_cast<double>(s.softcap);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const auto n = ctx->saved_data["numbers"].toIntVector();
    const float scale = ctx->saved_data["scale"].toDouble(), softcap = ctx->saved_data["softcap"].toDouble();
    const AttentionCall call{
        {n[0], n[1], n[2], scale, softcap, n[3], n[4] != 0}, ctx->saved_data["starts"].toIntVector(), n[5] != 0};
    std::vector<Tensor> inputs{saved[0]};
    if (saved[1].defined()) inputs.insert(inputs.end(), {saved[1], saved[2]});
    const Projections projections{inputs, call.by_head};
    std::vector<Tensor> d_inputs;
    for (const Tensor& input : inputs) {
      d_inputs.push_back(at::empty_like(input, input.options().requires_grad(false)));
      d_inputs.back().narrow(0, call.starts.back(), input.size(0) - call.starts.back()).zero_();
    }
    const Tensor &out = saved[5], &lse = saved[6], g = grads[0].to(out.scalar_type()).contiguous();
    const Rotation rotation = rotation_of(call.shape, saved[3], saved[4], out.size(0));
    for_dtype(out.scalar_type(), "attention", [&](auto zero) {
      using T = decltype(zero);
      const auto [q, k, v] = projections.heads<const T>(call.shape, inputs);
      const auto [dq, dk, dv] = projections.heads<T>(call.shape, d_inputs);
      kernels().of<T>().attention.backward(call.shape, call.packed(), q, k, v, rotation, out.const_data_ptr<T>(),
                                           lse.const_data_ptr<float>(), g.const_data_ptr<T>(), dq, dk, dv);
    });
    d_inputs.resize(6);  // no gradients for the angles and the call
    return d_inputs;
  }
};

// --- Norms ----------------------------------------------------------------------------------------------------------

// Adds the gradients of the weight and the bias of a norm on a GPU to those of the leaves that are trained.
void add_norm_gradients(const gpu::NormOptions& options, const Tensor& of_out, const Tensor& x, const Tensor& means,
                        const Tensor& rstds, const Tensor& weight, const Tensor& bias) {
  const bool has_weight = weight.requires_grad(), has_bias = bias.defined() && bias.requires_grad();
  if (!has_weight && !has_bias) return;
  const auto [of_weight, of_bias] = gpu::norm_weight_gradient(options, of_out, x, means, rstds, has_bias);
  if (has_weight) grad_of(weight).add_(of_weight);
  if (has_bias) grad_of(bias).add_(of_bias);
}

struct Norm : torch::autograd::Function<Norm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const MaybeTensor& maybe_bias,
                        double eps, bool center, double offset, at::ScalarType dtype) {
    const Tensor input = x.contiguous(), used = weight.to(at::kFloat), bias = value_of(maybe_bias);
    const Tensor used_bias = bias.defined() ? bias.to(at::kFloat) : bias;
    const int64_t width = input.size(-1);
    TORCH_CHECK(
        (input.is_cpu() || gpu::takes(input)) && input.scalar_type() == at::kFloat && width > 0 && used.device() == input.device() &&
            used.is_contiguous() && used.numel() == width &&
            (!bias.defined() ||
             (used_bias.device() == input.device() && used_bias.is_contiguous() && used_bias.numel() == width)),
        "norm: x ", input.sizes(), " ", input.scalar_type(), ", weight ", weight.sizes());
    if (gpu::takes(input)) {
      const auto [normed, means, rstds] = gpu::norm({eps, offset, center}, input, used, used_bias, dtype);
      ctx->save_for_backward({input, weight, bias, rstds, means});
      ctx->saved_data["numbers"] = std::vector<double>{eps, center ? 1.0 : 0.0, offset};
      return normed;
    }
    const NormShape shape{input.numel() / width, width, eps, center, static_cast<float>(offset)};
    Tensor out = at::empty(input.sizes(), input.options().dtype(dtype).requires_grad(false));
    Tensor stats = at::empty({shape.rows, 2}, input.options().requires_grad(false));
    for_dtype(dtype, "norm", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().norm.forward(shape, input.const_data_ptr<float>(), used.const_data_ptr<float>(),
                                     floats_or_null(used_bias), out.mutable_data_ptr<T>(),
                                     stats.mutable_data_ptr<float>());
    });
    ctx->save_for_backward({input, weight, bias, stats, {}});
    ctx->saved_data["numbers"] = std::vector<double>{eps, center ? 1.0 : 0.0, offset};
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &stats = saved[3];
    const auto numbers = ctx->saved_data["numbers"].toDoubleVector();
    const int64_t width = x.size(-1);
    const NormShape shape{x.numel() / width, width, numbers[0], numbers[1] != 0, static_cast<float>(numbers[2])};
    const Tensor g = grads[0].contiguous(), used = weight.to(at::kFloat);
    if (gpu::takes(x)) {
      const gpu::NormOptions options{numbers[0], numbers[2], numbers[1] != 0};
      add_norm_gradients(options, g, x, saved[4], stats, weight, bias);
      return {gpu::norm_gradient(options, g, {}, x, used, saved[4], stats, std::nullopt)[0], {}, {}, {}, {}, {}, {}};
    }
    Tensor dx = at::empty_like(x, x.options().requires_grad(false));
    // Frozen weights have no gradient; weights of other dtypes than f32 are frozen.
    auto grad_or_null = [](const Tensor& leaf) {
      if (!leaf.defined() || !leaf.requires_grad()) return static_cast<float*>(nullptr);
      const Tensor& grad = grad_of(leaf);
      TORCH_CHECK(grad.is_contiguous(), "norm: the gradient has strides ", grad.strides());
      return grad.mutable_data_ptr<float>();
    };
    for_dtype(g.scalar_type(), "norm", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().norm.backward(shape, x.const_data_ptr<float>(), used.const_data_ptr<float>(),
                                      stats.const_data_ptr<float>(), g.const_data_ptr<T>(),
                                      dx.mutable_data_ptr<float>(), grad_or_null(weight), grad_or_null(bias));
    });
    return {dx, {}, {}, {}, {}, {}, {}};
  }
};

// --- The residual stream and its norm, on a GPU ---------------------------------------------------------------------

// As `Residual`, then `Norm` of the sum in the dtype of the branches or in f32; returns both.
struct SumNorm : torch::autograd::Function<SumNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& a, const MaybeTensor& b, const Tensor& weight,
                               const MaybeTensor& maybe_bias, const gpu::NormOptions& options, at::ScalarType dtype) {
    const Tensor input = x.contiguous(), second = b ? b->contiguous() : Tensor(), bias = value_of(maybe_bias);
    TORCH_CHECK(gpu::takes(input), "norm of a sum: no kernels are loaded for ", input.device());
    TORCH_CHECK(input.size(-1) > 0 && weight.numel() == input.size(-1), "norm of a sum: x ", input.sizes(), ", weight ", weight.sizes());
    const Tensor used = weight.to(at::kFloat).contiguous(), used_bias = bias.defined() ? bias.to(at::kFloat) : bias;
    const auto [sums, normed, means, rstds] = gpu::sum_norm(options, input, a.contiguous(), second, used, used_bias, dtype);
    ctx->save_for_backward({sums, weight, bias, rstds, means});
    ctx->saved_data["numbers"] = std::vector<double>{options.eps, options.center ? 1.0 : 0.0, options.offset};
    ctx->saved_data["two"] = b.has_value();
    ctx->saved_data["branch"] = a.scalar_type();
    // Nothing uses the sum after the last norm: it then has no gradient, in place of one of zeros.
    ctx->set_materialize_grads(false);
    return {sums, normed};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &rstds = saved[3], &means = saved[4];
    const auto numbers = ctx->saved_data["numbers"].toDoubleVector();
    const gpu::NormOptions options{numbers[0], numbers[2], numbers[1] != 0};
    const auto branch = ctx->saved_data["branch"].toScalarType();
    const Tensor of_sums = grads[0].defined() ? grads[0].contiguous() : Tensor();
    if (!grads[1].defined()) {
      const Tensor of_branch = of_sums.defined() ? of_sums.to(branch) : Tensor();
      return {of_sums, of_branch, ctx->saved_data["two"].toBool() ? of_branch : Tensor(), {}, {}, {}, {}};
    }
    const Tensor g = grads[1].contiguous();
    add_norm_gradients(options, g, x, means, rstds, weight, bias);
    const auto [of_x, of_branch] =
        gpu::norm_gradient(options, g, of_sums, x, weight.to(at::kFloat).contiguous(), means, rstds, branch);
    return {of_x, of_branch, ctx->saved_data["two"].toBool() ? of_branch : Tensor(), {}, {}, {}, {}};
  }
};

// --- Gates ----------------------------------------------------------------------------------------------------------

// `x` as rows of its last dimension, whose numbers lie next to each other: itself, if it is so, such as half of the columns of a product.
Tensor as_rows(const Tensor& x) {
  if (x.dim() == 2 && x.stride(1) == 1) return x;
  return x.contiguous().view({-1, x.size(-1)});
}

GatedShape gated_shape(const Tensor& gate, const Tensor& up, int64_t activation) {
  TORCH_CHECK(gate.is_cpu() && up.is_cpu() && gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
              "gated: gates ", gate.sizes(), " ", gate.scalar_type(), ", up ", up.sizes(), " ", up.scalar_type());
  return {gate.size(0), gate.size(1), gate.stride(0), up.stride(0), activation};
}

struct Gated : torch::autograd::Function<Gated> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const MaybeTensor& up, int64_t activation) {
    ctx->saved_data["activation"] = activation;
    if (gpu::takes(gate)) {
      const Tensor first = gate.contiguous(), second = up ? up->contiguous() : Tensor();
      ctx->save_for_backward({first, second});
      return gpu::gated(first, second, activation);
    }
    TORCH_CHECK(up && gate.dim() > 0, "gated: no kernel has the activation alone on ", gate.device());
    const Tensor first = as_rows(gate), second = as_rows(*up);
    const GatedShape shape = gated_shape(first, second, activation);
    const Tensor out = at::empty(gate.sizes(), gate.options().requires_grad(false));
    for_dtype(out.scalar_type(), "gated", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().gated.forward(shape, first.const_data_ptr<T>(), second.const_data_ptr<T>(),
                                      out.mutable_data_ptr<T>());
    });
    ctx->save_for_backward({first, second});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const int64_t activation = ctx->saved_data["activation"].toInt();
    const Tensor &gate = saved[0], &up = saved[1], g = grads[0].contiguous();
    if (gpu::takes(gate)) {
      const auto [of_gate, of_up] = gpu::gated_gradient(gate, up, g, activation);
      return {of_gate, of_up, {}};
    }
    const GatedShape shape = gated_shape(gate, up, activation);
    const auto options = g.options().requires_grad(false);
    const Tensor of_gate = at::empty(g.sizes(), options), of_up = at::empty(g.sizes(), options);
    for_dtype(g.scalar_type(), "gated", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().gated.backward(shape, gate.const_data_ptr<T>(), up.const_data_ptr<T>(), g.const_data_ptr<T>(),
                                       of_gate.mutable_data_ptr<T>(), of_up.mutable_data_ptr<T>());
    });
    return {of_gate, of_up, {}};
  }
};

// The same where gate and up are the halves of each row: without copies of them, and with one gradient.
struct GatedHalves : torch::autograd::Function<GatedHalves> {
  static Tensor forward(AutogradContext* ctx, const Tensor& both, int64_t activation) {
    TORCH_CHECK(gpu::takes(both), "gated: no kernels are loaded for ", both.device());
    const Tensor used = both.contiguous();
    ctx->save_for_backward({used});
    ctx->saved_data["activation"] = activation;
    return gpu::gated_halves(used, activation);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    return {gpu::gated_halves_gradient(saved[0], grads[0].contiguous(), ctx->saved_data["activation"].toInt()), {}};
  }
};

void check_logits(const Tensor& logits, const Tensor& targets) {
  TORCH_CHECK(logits.is_cpu() && logits.is_contiguous() && logits.dim() == 2 && targets.is_cpu() &&
                  targets.is_contiguous() && targets.scalar_type() == at::kLong && targets.numel() == logits.size(0),
              "logits of shape ", logits.sizes(), ", targets ", targets.sizes());
  TORCH_CHECK(
      targets.numel() == 0 || (targets.min().item<int64_t>() >= 0 && targets.max().item<int64_t>() < logits.size(1)),
      "logits: a target is outside the vocabulary of ", logits.size(1));
}

}  // namespace

Tensor linear_product(const Tensor& x, const Tensor& matrix, const std::optional<Tensor>& bias) { return linear_of(x, matrix, bias); }

Tensor matrix_product(const Tensor& a, const Tensor& b) { return product(a, b); }

Tensor& gradient_of(const Tensor& leaf) { return grad_of(leaf); }

void add_matrix_product(const Tensor& gradient, const Tensor& a, const Tensor& b) { add_product_to(gradient, a, b); }

}  // namespace tch_ext

using namespace tch_ext;

extern "C" {

// Configuration of an attention layer, as Rust passes it; the fields are those of `AttentionShape`.
struct tch_ext_attention {
  int64_t heads, kv_heads, head_dim, window;
  double scale, softcap;
  bool causal, by_head;
};

// A quantized weight, as Rust passes it; the fields are those of `QuantizedWeight`, and absent tensors are null.
struct tch_ext_quantized {
  int64_t out, in, block, nested_block;
  const Tensor *codes, *map, *scales, *nested_map, *nested_scales;
  double offset;
};

}  // extern "C"

static QuantizedWeight weight_of(const tch_ext_quantized* w) {
  return {w->out, w->in, *w->codes, value_of(w->map), *w->scales, value_of(w->nested_map), value_of(w->nested_scales),
          w->offset, w->block, w->nested_block};
}

static AttentionShape shape_of(const tch_ext_attention* a) {
  return {a->heads,  a->kv_heads, a->head_dim, static_cast<float>(a->scale), static_cast<float>(a->softcap),
          a->window, a->causal};
}

extern "C" {

// Optional tensors may be null. Results are new tensors, which the caller owns.

char* tch_ext_linear(Tensor** out, const Tensor* x, const Tensor* weight, const Tensor* used, const Tensor* bias,
                     const Tensor* used_bias, bool transposed) {
  return guard(
      [&] { *out = new Tensor(Linear::apply(*x, *weight, *used, maybe(bias), maybe(used_bias), transposed)); });
}

char* tch_ext_adapted_linear(Tensor** out, const Tensor* x, const Tensor* used, const Tensor* used_bias, bool transposed,
                             const Tensor* a, const Tensor* b, double scale) {
  return guard(
      [&] { *out = new Tensor(AdaptedLinear::apply(*x, *used, maybe(used_bias), transposed, *a, *b, scale)); });
}

// The values of a quantized weight, as f32, bf16 or f16 (`dtype` is libtorch's number); by libtorch's operations if `plain`.
char* tch_ext_dequantize(Tensor** out, const tch_ext_quantized* weight, int dtype, bool plain) {
  return guard([&] {
    at::NoGradGuard no_grad;
    const QuantizedWeight w = weight_of(weight);
    w.check();
    const auto kind = static_cast<at::ScalarType>(dtype);
    *out = new Tensor(plain ? w.plain_values(kind) : w.values(kind));
  });
}

// `a` and `b` may both be null.
char* tch_ext_quantized_linear(Tensor** out, const Tensor* x, const tch_ext_quantized* weight, const Tensor* bias,
                               const Tensor* a, const Tensor* b, double scale, int dtype) {
  return guard([&] {
    const QuantizedWeight w = weight_of(weight);
    const auto kind = static_cast<at::ScalarType>(dtype);
    *out = new Tensor(QuantizedLinear::apply(*x, maybe(bias), maybe(a), maybe(b), scale, &w, kind));
  });
}

// Whether a kernel of a GPU computes the product of `rows` rows of a dtype (libtorch's number) and a weight.
char* tch_ext_multiplies_quantized(bool* out, const tch_ext_quantized* weight, int64_t rows, int dtype) {
  return guard([&] {
    const QuantizedWeight w = weight_of(weight);
    *out = gpu::multiplies_quantized(w.matrix(), w.codes, rows, static_cast<at::ScalarType>(dtype));
  });
}

char* tch_ext_residual(Tensor** out, const Tensor* x, const Tensor* a, const Tensor* b) {
  return guard([&] { *out = new Tensor(Residual::apply(*x, *a, maybe(b))); });
}

char* tch_ext_rotate(Tensor** out, const Tensor* x, const Tensor* cos, const Tensor* sin, int64_t parts, int dtype) {
  return guard([&] { *out = new Tensor(Rotate::apply(*x, *cos, *sin, parts, static_cast<at::ScalarType>(dtype))); });
}

char* tch_ext_embedding(Tensor** out, const Tensor* table, const Tensor* ids) {
  return guard([&] { *out = new Tensor(Embedding::apply(*table, *ids)); });
}

char* tch_ext_norm(Tensor** out, const Tensor* x, const Tensor* weight, const Tensor* bias, double eps, bool center,
                   double offset, bool bf16) {
  return guard([&] {
    const auto dtype = bf16 ? at::kBFloat16 : at::kFloat;
    *out = new Tensor(Norm::apply(*x, *weight, maybe(bias), eps, center, offset, dtype));
  });
}

// `inputs` are one tensor or three; `starts` has one entry per row and one for the end. Not differentiable with a
// cache.
char* tch_ext_attention_packed(Tensor** out, const tch_ext_attention* attention, Tensor* const* inputs, size_t count,
                               const Tensor* cos, const Tensor* sin, const int64_t* starts, size_t rows,
                               const Tensor* keys, const Tensor* values, int64_t capacity) {
  return guard([&] {
    const AttentionCall call{shape_of(attention), std::vector<int64_t>(starts, starts + rows + 1), attention->by_head};
    if (keys) {
      *out = new Tensor(
          attend(call, tensors(inputs, count), value_of(cos), value_of(sin), *keys, *values, capacity).first);
      return;
    }
    auto input = [&](size_t i) { return maybe(i < count ? inputs[i] : nullptr); };
    *out = new Tensor(Attention::apply(*inputs[0], input(1), input(2), maybe(cos), maybe(sin), &call));
  });
}

char* tch_ext_attention_step(Tensor** out, const tch_ext_attention* attention, Tensor* const* inputs, size_t count,
                             const Tensor* cos, const Tensor* sin, const int64_t* lens, size_t rows, const Tensor* keys,
                             const Tensor* values, int64_t capacity) {
  return guard([&] {
    const AttentionShape shape = shape_of(attention);
    const Projections projections{tensors(inputs, count), attention->by_head};
    check_projections(shape, projections, rows);
    for (size_t row = 0; row < rows; row++)
      TORCH_CHECK(lens[row] >= 0 && lens[row] < capacity, "attention: row ", row, " of the cache is full");
    const Tensor& first = projections.tensors[0];
    Tensor result = at::empty({static_cast<int64_t>(rows), shape.heads * shape.head_dim}, first.options());
    const Rotation rotation = rotation_of(shape, value_of(cos), value_of(sin), rows);
    for_dtype(first.scalar_type(), "attention", [&](auto zero) {
      using T = decltype(zero);
      const auto [q, k, v] = projections.heads<const T>(shape, projections.tensors);
      const Cache<T> cache = cache_of<T>(shape, *keys, *values, rows, capacity);
      kernels().of<T>().attention.step(shape, rows, lens, q, k, v, rotation, result.mutable_data_ptr<T>(), cache);
    });
    *out = new Tensor(result);
  });
}

// Results are f32 with one number per row; `entropy` may be null.
char* tch_ext_logits_stats(Tensor** logprobs, Tensor** lse, Tensor** entropy, const Tensor* logits,
                           double inv_temperature, const Tensor* targets) {
  return guard([&] {
    const bool on_gpu = gpu::takes(*logits);
    if (!on_gpu) check_logits(*logits, *targets);
    const auto options = logits->options().dtype(at::kFloat).requires_grad(false);
    const int64_t rows = logits->size(0);
    Tensor l = at::empty({rows}, options), s = at::empty({rows}, options),
           e = entropy ? at::empty({rows}, options) : Tensor();
    if (on_gpu)
      gpu::logits_stats(*logits, inv_temperature, *targets, l, s, e);
    else for_dtype(logits->scalar_type(), "logits", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().logits.stats(rows, logits->size(1), logits->const_data_ptr<T>(), inv_temperature,
                                     targets->const_data_ptr<int64_t>(), l.mutable_data_ptr<float>(),
                                     s.mutable_data_ptr<float>(), entropy ? e.mutable_data_ptr<float>() : nullptr);
    });
    *logprobs = new Tensor(l);
    *lse = new Tensor(s);
    if (entropy) *entropy = new Tensor(e);
  });
}

// `entropy` and `of_entropy`, the coefficients of the entropies, may both be null.
char* tch_ext_logits_gradient(Tensor* logits, double inv_temperature, const Tensor* targets, const Tensor* lse,
                              const Tensor* coefficients, const Tensor* entropy, const Tensor* of_entropy) {
  return guard([&] {
    if (gpu::takes(*logits)) {
      gpu::logits_gradient(*logits, inv_temperature, *targets, *lse, *coefficients, value_of(entropy), value_of(of_entropy));
      logits->unsafeGetTensorImpl()->bump_version();
      return;
    }
    check_logits(*logits, *targets);
    const int64_t rows = logits->size(0);
    for (const Tensor* x : {lse, coefficients, entropy, of_entropy})
      TORCH_CHECK(!x || (x->is_cpu() && x->is_contiguous() && x->scalar_type() == at::kFloat && x->numel() == rows),
                  "logits: ", x->sizes(), " numbers for ", rows, " rows");
    auto numbers = [](const Tensor* x) { return x ? x->const_data_ptr<float>() : nullptr; };
    for_dtype(logits->scalar_type(), "logits", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().logits.gradient(rows, logits->size(1), logits->mutable_data_ptr<T>(), inv_temperature,
                                        targets->const_data_ptr<int64_t>(), lse->const_data_ptr<float>(),
                                        coefficients->const_data_ptr<float>(), numbers(entropy), numbers(of_entropy));
    });
    logits->unsafeGetTensorImpl()->bump_version();
  });
}

// `draws` may be null; `tokens` and `logprobs` have room for one number per row.
char* tch_ext_logits_sample(const Tensor* logits, double inv_temperature, const double* draws, int64_t* tokens,
                            float* logprobs, size_t rows) {
  return guard([&] {
    TORCH_CHECK(logits->is_cpu() && logits->is_contiguous() && logits->dim() == 2 &&
                    logits->size(0) == static_cast<int64_t>(rows) && logits->size(1) > 0,
                "logits of shape ", logits->sizes(), " for ", rows, " rows");
    for_dtype(logits->scalar_type(), "logits", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().logits.sample(rows, logits->size(1), logits->const_data_ptr<T>(), inv_temperature, draws,
                                      tokens, logprobs);
    });
  });
}

// The same by a kernel of a GPU, which is not waited for: `draws` [rows] f64, or null; tokens and log-probabilities are there too.
char* tch_ext_logits_sample_on_device(Tensor** tokens, Tensor** logprobs, const Tensor* logits, double inv_temperature,
                                      const Tensor* draws) {
  return guard([&] {
    TORCH_CHECK(gpu::takes(*logits), "logits on ", logits->device(), ": no kernels are loaded for it");
    auto [t, l] = gpu::logits_sample(*logits, inv_temperature, value_of(draws));
    *tokens = new Tensor(t);
    *logprobs = new Tensor(l);
  });
}

// Attention of one new token per row to a cache, by a kernel of a GPU; `window` is 0 for none. Not differentiable.
char* tch_ext_attention_of_step(Tensor** out, const Tensor* q, const Tensor* keys, const Tensor* values, const Tensor* lengths,
                                int64_t capacity, int64_t longest, int64_t window, double scale) {
  return guard([&] {
    TORCH_CHECK(gpu::takes(*q), "attention of a step on ", q->device(), ": no kernels are loaded for it");
    *out = new Tensor(gpu::attend({capacity, longest, window, scale}, *q, *keys, *values, *lengths));
  });
}

// activation(gate) * up, by a kernel of a GPU; `up` may be null.
char* tch_ext_gated(Tensor** out, const Tensor* gate, const Tensor* up, int64_t activation) {
  return guard([&] { *out = new Tensor(Gated::apply(*gate, maybe(up), activation)); });
}

// The same for [rows, 2 * width], of which each row has the gate, then up.
char* tch_ext_gated_halves(Tensor** out, const Tensor* both, int64_t activation) {
  return guard([&] { *out = new Tensor(GatedHalves::apply(*both, activation)); });
}

// x + a + b and its norm in `dtype`, the branches' or f32 (libtorch's numbers), by a kernel of a GPU; `b` and `bias` may be null.
char* tch_ext_sum_norm(Tensor** sum, Tensor** out, const Tensor* x, const Tensor* a, const Tensor* b, const Tensor* weight,
                       const Tensor* bias, double eps, bool center, double offset, int dtype) {
  return guard([&] {
    const gpu::NormOptions options{eps, offset, center};
    const variable_list found = SumNorm::apply(*x, *a, maybe(b), *weight, maybe(bias), options, static_cast<at::ScalarType>(dtype));
    *sum = new Tensor(found[0]);
    *out = new Tensor(found[1]);
  });
}

// Rotates the queries of one new token per row, and writes its rotated keys and its values to their places in a cache, by a kernel of a
// GPU; `cos` and `sin` may be null. Not differentiable.
char* tch_ext_rotate_cached(Tensor** out, const Tensor* q, const Tensor* k, const Tensor* v, const Tensor* cos, const Tensor* sin,
                            const Tensor* places, Tensor* keys, Tensor* values) {
  return guard([&] {
    at::NoGradGuard no_grad;
    TORCH_CHECK(gpu::takes(*q), "rotary positions of a step on ", q->device(), ": no kernels are loaded for it");
    *out = new Tensor(gpu::rotate_cached({*q, *k, *v}, value_of(cos), value_of(sin), *places, *keys, *values));
    for (Tensor* cache : {keys, values}) cache->unsafeGetTensorImpl()->bump_version();
  });
}

// Returns true if large f32 products are oneDNN's.
bool tch_ext_onednn_takes_f32() { return tch_ext::onednn_takes_f32(); }

char* tch_ext_product_into(Tensor* out, const Tensor* a, const Tensor* b) {
  return guard([&] {
    at::NoGradGuard no_grad;
    multiply_into(*out, *a, *b, false);
    // oneDNN's functions do not.
    out->unsafeGetTensorImpl()->bump_version();
  });
}

// Accumulates a product into the gradient of a leaf, in place: grad += a b.
char* tch_ext_add_product(const Tensor* leaf, const Tensor* a, const Tensor* b) {
  return guard([&] {
    at::NoGradGuard no_grad;
    add_product(*leaf, *a, *b);
  });
}

// libtorch's attention over packed sequences, which tch lacks; CUDA only. `window` is 0 for full attention.
char* tch_ext_flash_attention_varlen(Tensor** out, const tch_ext_attention* attention, const Tensor* q, const Tensor* k,
                                     const Tensor* v, const Tensor* starts, int64_t width) {
  return guard([&] {
    std::optional<int64_t> left, right;
    // libtorch's window does not count the token itself.
    if (attention->causal && attention->window > 0) left = attention->window - 1, right = 0;
    if (orders_sums()) {
      const FlashOptions options{width, attention->causal, attention->scale, left, right};
      *out = new Tensor(ordered_flash_attention(*q, *k, *v, *starts, options));
      return;
    }
    auto results =
        at::_flash_attention_forward(*q, *k, *v, *starts, *starts, width, width, /*dropout_p=*/0, attention->causal,
                                     /*return_debug_mask=*/false, attention->scale, left, right);
    *out = new Tensor(std::get<0>(results));
  });
}

// Runs the backward pass from `x` with the gradient `grad`.
char* tch_ext_backward(const Tensor* x, const Tensor* grad) {
  return guard([&] { torch::autograd::backward({*x}, {*grad}); });
}

}  // extern "C"
