// Short convolutions and the gated delta rule as functions of tensors, by the kernels of `mixing_kernels.h`. The gradient of a convolution's
// weight is added to its `.grad` in place, as in `ops.cpp`.
#include <torch/csrc/autograd/custom_function.h>

#include "common.h"
#include "kernels.h"

namespace tch_ext {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const float* floats(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr; }
float* mutable_floats(const Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr; }

// Clears what belongs to no row: tokens after the last.
void clear_rest(const Tensor& x, int64_t used) {
  if (used < x.size(0)) x.narrow(0, used, x.size(0) - used).zero_();
}

// The weight of a convolution, [width, 1, kernel], in f32.
struct Weight {
  Tensor values, bias;
  ConvShape shape;

  Weight(const Tensor& weight, const MaybeTensor& maybe_bias) {
    TORCH_CHECK(weight.dim() == 3 && weight.size(1) == 1 && weight.size(2) > 0 && weight.is_cpu(),
                "convolution: weight ", weight.sizes());
    values = weight.detach().to(at::kFloat).contiguous();
    if (maybe_bias) bias = maybe_bias->detach().to(at::kFloat).contiguous();
    shape = {weight.size(0), weight.size(2)};
    TORCH_CHECK(!bias.defined() || bias.numel() == shape.width, "convolution: bias ", bias.sizes());
  }
};

// Sums in f32 for the gradient of a leaf: the gradient itself, or memory that `add` adds to it.
class LeafGradient {
 public:
  explicit LeafGradient(const Tensor& leaf) {
    if (!leaf.defined() || !leaf.requires_grad()) return;
    Tensor& grad = leaf.mutable_grad();
    if (!grad.defined()) grad = at::zeros_like(leaf, leaf.options().requires_grad(false));
    grad_ = grad;
    const bool direct = grad.scalar_type() == at::kFloat && grad.is_contiguous();
    sums_ = direct ? grad : at::zeros(grad.sizes(), grad.options().dtype(at::kFloat));
  }
  float* data() const { return mutable_floats(sums_); }
  void add() const {
    if (grad_.defined() && !sums_.is_same(grad_)) grad_.add_(sums_.to(grad_.scalar_type()));
  }

 private:
  Tensor grad_, sums_;
};

std::vector<int64_t> all(const int64_t* starts, size_t rows) { return {starts, starts + rows + 1}; }

// The row that each row continues, or -1; -1 for all if `parents` is null.
std::vector<int64_t> all_parents(const int64_t* parents, size_t rows) {
  return parents ? std::vector<int64_t>(parents, parents + rows) : std::vector<int64_t>(rows, -1);
}

// Packed rows with what is derived of them.
struct Rows {
  std::vector<int64_t> starts, parents, slots, trees;

  Rows(std::vector<int64_t> all_starts, std::vector<int64_t> all_parents)
      : starts(std::move(all_starts)), parents(std::move(all_parents)), slots(parents.size(), -1) {
    const auto rows = static_cast<int64_t>(parents.size());
    TORCH_CHECK(starts.size() == parents.size() + 1, "packed rows: ", starts.size(), " starts, ", rows, " rows");
    int64_t used = 0;
    for (int64_t r = 0; r < rows; r++) {
      if (parents[r] < 0) {
        trees.push_back(r);
        used = 0;
        continue;
      }
      TORCH_CHECK(parents[r] < r && parents[r] >= trees.back(), "packed rows: row ", r, " continues row ", parents[r]);
      if (int64_t& slot = slots[parents[r]]; slot < 0) slot = used++;
    }
    trees.push_back(rows);
  }

  Branches view() const {
    return {starts.data(), parents.data(), slots.data(), static_cast<int64_t>(parents.size()), trees.data(),
            static_cast<int64_t>(trees.size()) - 1};
  }
};

Rows saved_rows(AutogradContext* ctx) {
  return {ctx->saved_data["starts"].toIntVector(), ctx->saved_data["parents"].toIntVector()};
}

void save_rows(AutogradContext* ctx, const Rows& rows) {
  ctx->saved_data["starts"] = rows.starts;
  ctx->saved_data["parents"] = rows.parents;
}

void check_rows(const char* what, const Tensor& x, int64_t width, const std::vector<int64_t>& starts) {
  TORCH_CHECK(x.is_cpu() && x.dim() == 2 && x.size(1) == width && starts.front() == 0 && starts.back() <= x.size(0),
              what, ": x ", x.sizes(), ", expected rows of ", width, " for ", starts.back(), " tokens");
}

struct GatedConv : torch::autograd::Function<GatedConv> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                        const Rows* rows) {
    const Tensor input = x.contiguous();
    const Weight used(weight, bias);
    check_rows("convolution", input, 3 * used.shape.width, rows->starts);
    const Tensor out = at::empty({input.size(0), used.shape.width}, input.options().requires_grad(false));
    clear_rest(out, rows->starts.back());
    for_dtype(input.scalar_type(), "convolution", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().conv.gated(used.shape, rows->view(), input.const_data_ptr<T>(), floats(used.values),
                                   floats(used.bias), out.mutable_data_ptr<T>());
    });
    ctx->save_for_backward({input, weight, bias ? *bias : Tensor()});
    save_rows(ctx, *rows);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const Rows rows = saved_rows(ctx);
    const Tensor &x = saved[0], &bias = saved[2], g = grads[0].contiguous();
    const Weight used(saved[1], bias.defined() ? MaybeTensor(bias) : std::nullopt);
    const Tensor dx = at::empty_like(x, x.options().requires_grad(false));
    clear_rest(dx, rows.starts.back());
    const LeafGradient of_weight(saved[1]), of_bias(bias);
    for_dtype(x.scalar_type(), "convolution", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().conv.gated_back(used.shape, rows.view(), x.const_data_ptr<T>(), floats(used.values),
                                        floats(used.bias), g.const_data_ptr<T>(), dx.mutable_data_ptr<T>(),
                                        of_weight.data(), of_bias.data());
    });
    of_weight.add();
    of_bias.add();
    return {dx, {}, {}, {}};
  }
};

struct SiluConv : torch::autograd::Function<SiluConv> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Rows* rows) {
    const Tensor input = x.contiguous();
    const Weight used(weight, std::nullopt);
    check_rows("convolution", input, used.shape.width, rows->starts);
    const Tensor out = at::empty(input.sizes(), input.options().dtype(at::kFloat).requires_grad(false));
    clear_rest(out, rows->starts.back());
    for_dtype(input.scalar_type(), "convolution", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().conv.silu(used.shape, rows->view(), input.const_data_ptr<T>(), floats(used.values),
                                  out.mutable_data_ptr<float>());
    });
    ctx->save_for_backward({input, weight});
    save_rows(ctx, *rows);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const Rows rows = saved_rows(ctx);
    const Tensor &x = saved[0], g = grads[0].contiguous();
    const Weight used(saved[1], std::nullopt);
    const Tensor dx = at::empty_like(x, x.options().requires_grad(false));
    clear_rest(dx, rows.starts.back());
    const LeafGradient of_weight(saved[1]);
    for_dtype(x.scalar_type(), "convolution", [&](auto zero) {
      using T = decltype(zero);
      kernels().of<T>().conv.silu_back(used.shape, rows.view(), x.const_data_ptr<T>(), floats(used.values),
                                       floats(g), dx.mutable_data_ptr<T>(), of_weight.data());
    });
    of_weight.add();
    return {dx, {}, {}};
  }
};

void check_delta(const DeltaShape& s, const Tensor& x, const Tensor& g, const Tensor& beta,
                 const std::vector<int64_t>& starts) {
  TORCH_CHECK(s.key_heads > 0 && s.value_heads % s.key_heads == 0 && s.key_dim > 0 && s.value_dim > 0,
              "delta rule: ", s.value_heads, " value heads of ", s.key_heads, " key heads");
  check_rows("delta rule", x, 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim, starts);
  for (const Tensor& rates : {g, beta})
    TORCH_CHECK(rates.is_cpu() && rates.sizes() == at::IntArrayRef({x.size(0), s.value_heads}) &&
                    rates.scalar_type() == at::kFloat && x.scalar_type() == at::kFloat,
                "delta rule: decays or strengths ", rates.sizes(), " ", rates.scalar_type(), ", x ", x.sizes());
}

void check_states(const DeltaShape& s, const Tensor& states, int64_t rows) {
  TORCH_CHECK(!states.defined() || (states.is_cpu() && states.is_contiguous() && states.scalar_type() == at::kFloat &&
                                    states.sizes() == at::IntArrayRef({rows, s.value_heads, s.key_dim, s.value_dim})),
              "delta rule: states ", states.sizes(), " ", states.scalar_type());
}

struct DeltaRule : torch::autograd::Function<DeltaRule> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& g, const Tensor& beta,
                        const DeltaShape* shape, const Rows* rows) {
    const Tensor input = x.contiguous(), decays = g.contiguous(), strengths = beta.contiguous();
    check_delta(*shape, input, decays, strengths, rows->starts);
    const Tensor out = at::empty({input.size(0), shape->value_heads * shape->value_dim}, input.options().requires_grad(false));
    clear_rest(out, rows->starts.back());
    kernels().delta.forward(*shape, rows->view(), floats(input), floats(decays), floats(strengths), nullptr,
                            mutable_floats(out), nullptr);
    ctx->save_for_backward({input, decays, strengths});
    save_rows(ctx, *rows);
    ctx->saved_data["shape"] =
        std::vector<int64_t>{shape->key_heads, shape->value_heads, shape->key_dim, shape->value_dim};
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const auto sizes = ctx->saved_data["shape"].toIntVector();
    const Rows rows = saved_rows(ctx);
    const DeltaShape shape{sizes[0], sizes[1], sizes[2], sizes[3]};
    const Tensor g = grads[0].contiguous();
    variable_list out;
    for (const Tensor& input : saved) {
      out.push_back(at::empty_like(input, input.options().requires_grad(false)));
      clear_rest(out.back(), rows.starts.back());
    }
    kernels().delta.backward(shape, rows.view(), floats(saved[0]), floats(saved[1]), floats(saved[2]), floats(g),
                             mutable_floats(out[0]), mutable_floats(out[1]), mutable_floats(out[2]));
    return {out[0], out[1], out[2], {}, {}};
  }
};

}  // namespace
}  // namespace tch_ext

using namespace tch_ext;

extern "C" {

struct tch_ext_delta {
  int64_t key_heads, value_heads, key_dim, value_dim;
};

static DeltaShape shape_of(const tch_ext_delta* d) { return {d->key_heads, d->value_heads, d->key_dim, d->value_dim}; }

char* tch_ext_gated_convolution(Tensor** out, const Tensor* x, const Tensor* weight, const Tensor* bias,
                                const int64_t* starts, const int64_t* parents, size_t rows) {
  return guard([&] {
    const Rows packed(all(starts, rows), all_parents(parents, rows));
    *out = new Tensor(GatedConv::apply(*x, *weight, maybe(bias), &packed));
  });
}

char* tch_ext_silu_convolution(Tensor** out, const Tensor* x, const Tensor* weight, const int64_t* starts,
                               const int64_t* parents, size_t rows) {
  return guard([&] {
    const Rows packed(all(starts, rows), all_parents(parents, rows));
    *out = new Tensor(SiluConv::apply(*x, *weight, &packed));
  });
}

char* tch_ext_delta_rule(Tensor** out, const tch_ext_delta* sizes, const Tensor* x, const Tensor* g, const Tensor* beta,
                         const int64_t* starts, const int64_t* parents, size_t rows) {
  return guard([&] {
    const DeltaShape shape = shape_of(sizes);
    const Rows packed(all(starts, rows), all_parents(parents, rows));
    *out = new Tensor(DeltaRule::apply(*x, *g, *beta, &shape, &packed));
  });
}

// Not differentiable; `start` may be null, and `end` is filled.
char* tch_ext_delta_rule_from(Tensor** out, const tch_ext_delta* sizes, const Tensor* x, const Tensor* g,
                              const Tensor* beta, const int64_t* starts, size_t rows, const Tensor* start, Tensor* end) {
  return guard([&] {
    at::NoGradGuard no_grad;
    const DeltaShape shape = shape_of(sizes);
    const Rows packed(all(starts, rows), all_parents(nullptr, rows));
    const auto& places = packed.starts;
    const Tensor input = x->contiguous(), decays = g->contiguous(), strengths = beta->contiguous();
    check_delta(shape, input, decays, strengths, places);
    const Tensor before = start ? *start : Tensor();
    check_states(shape, before, static_cast<int64_t>(rows));
    check_states(shape, *end, static_cast<int64_t>(rows));
    Tensor result = at::empty({input.size(0), shape.value_heads * shape.value_dim}, input.options());
    clear_rest(result, places.back());
    kernels().delta.forward(shape, packed.view(), floats(input), floats(decays), floats(strengths), floats(before),
                            mutable_floats(result), mutable_floats(*end));
    *out = new Tensor(result);
  });
}

// `active` may be null; `states` are changed in place.
char* tch_ext_delta_step(Tensor** out, const tch_ext_delta* sizes, const Tensor* x, const Tensor* g, const Tensor* beta,
                         const Tensor* active, Tensor* states) {
  return guard([&] {
    at::NoGradGuard no_grad;
    const DeltaShape shape = shape_of(sizes);
    const int64_t rows = x->size(0);
    const Tensor input = x->contiguous(), decays = g->contiguous(), strengths = beta->contiguous();
    check_delta(shape, input, decays, strengths, {0, rows});
    check_states(shape, *states, rows);
    const Tensor mask = active ? active->contiguous() : Tensor();
    TORCH_CHECK(!mask.defined() || (mask.numel() == rows && mask.scalar_type() == at::kFloat), "delta rule: rows ",
                mask.sizes());
    Tensor result = at::empty({rows, shape.value_heads * shape.value_dim}, input.options());
    kernels().delta.step(shape, rows, floats(input), floats(decays), floats(strengths), floats(mask),
                         mutable_floats(*states), mutable_floats(result));
    *out = new Tensor(result);
  });
}

}  // extern "C"
