// Several linear layers that read the same input, as one product: their weights lie one after another in memory, so they are one matrix.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "common.h"
#include "products.h"

namespace tch_ext {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Matrices or vectors as one along their first dimension, without a copy, if they lie one after another in one memory; else undefined. The
// result has the version of the first.
Tensor adjacent(at::TensorList parts) {
  if (parts.empty() || !parts[0].defined() || !parts[0].has_storage()) return {};
  const Tensor& first = parts[0];
  if (first.dim() != 1 && first.dim() != 2) return {};
  int64_t rows = 0, end = first.storage_offset();
  for (const Tensor& part : parts) {
    if (!part.defined() || part.scalar_type() != first.scalar_type() || part.dim() != first.dim() || !part.is_contiguous() ||
        part.sizes().slice(1) != first.sizes().slice(1) || part.storage_offset() != end || !part.is_alias_of(first))
      return {};
    rows += part.size(0);
    end += part.numel();
  }
  // A view of a leaf requires a gradient, also if it is made without a graph.
  const Tensor numbers = first.detach();
  if (first.dim() == 1) return numbers.as_strided({rows}, {1}, first.storage_offset());
  return numbers.as_strided({rows, first.size(1)}, {first.size(1), 1}, first.storage_offset());
}

// The gradients of leaves as one tensor, if all are trained and the gradients lie one after another; else undefined. Where there is no
// gradient yet, they are made so.
Tensor joint_gradient(at::TensorList leaves) {
  const Tensor& first = leaves[0];
  bool none = true;
  int64_t rows = 0;
  std::vector<Tensor> grads;
  for (const Tensor& leaf : leaves) {
    if (!leaf.requires_grad() || leaf.scalar_type() != first.scalar_type() || !leaf.is_contiguous()) return {};
    grads.push_back(leaf.grad());
    none = none && !grads.back().defined();
    rows += leaf.size(0);
  }
  if (!none) return adjacent(grads);
  std::vector<int64_t> sizes = first.sizes().vec();
  sizes[0] = rows;
  const Tensor all = at::zeros(sizes, first.options().requires_grad(false));
  int64_t from = 0;
  for (const Tensor& leaf : leaves) {
    leaf.mutable_grad() = all.narrow(0, from, leaf.size(0));
    from += leaf.size(0);
  }
  return all;
}

// Adds the gradients of the layers' weights, for the gradient `g` [N, sum of widths] of their results.
void add_weight_gradients(at::TensorList weights, const Tensor& g, const Tensor& x) {
  if (const Tensor all = joint_gradient(weights); all.defined()) return add_matrix_product(all, g.t(), x);
  int64_t from = 0;
  for (const Tensor& weight : weights) {
    const int64_t width = weight.size(0);
    if (weight.requires_grad()) add_matrix_product(gradient_of(weight), g.narrow(1, from, width).t(), x);
    from += width;
  }
}

// Likewise of their biases.
void add_bias_gradients(at::TensorList biases, const Tensor& g) {
  bool any = false;
  for (const Tensor& bias : biases) any = any || bias.requires_grad();
  if (!any) return;
  const Tensor sums = g.sum(0, false, at::kFloat);
  if (const Tensor all = joint_gradient(biases); all.defined()) {
    all.add_(sums);
    return;
  }
  int64_t from = 0;
  for (const Tensor& bias : biases) {
    const int64_t width = bias.size(0);
    if (bias.requires_grad()) gradient_of(bias).add_(sums.narrow(0, from, width));
    from += width;
  }
}

struct Joint : torch::autograd::Function<Joint> {
  // `leaves` are the weights of `count` layers, and then their biases, if they have some; `used` and `used_bias` the same values in the
  // dtype of products, one after another. Returns the results side by side, or if `splits` one by one, as columns of one memory.
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList leaves, const Tensor& used,
                               const MaybeTensor& used_bias, int64_t count, bool splits) {
    const Tensor input = x.to(used.scalar_type());
    variable_list saved{input, used};
    saved.insert(saved.end(), leaves.begin(), leaves.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["count"] = count;
    ctx->saved_data["dtype"] = x.scalar_type();
    const Tensor out = linear_product(input, used, used_bias);
    if (!splits) return {out};
    variable_list parts;
    int64_t from = 0;
    for (const Tensor& weight : leaves.slice(0, count)) {
      // Not as a view: the parts share no number, so that a change of one in place is none of the others.
      parts.push_back(out.narrow(1, from, weight.size(0)).variable_data());
      from += weight.size(0);
    }
    return parts;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &used = saved[1];
    const at::TensorList leaves = at::TensorList(saved).slice(2);
    const auto count = static_cast<size_t>(ctx->saved_data["count"].toInt());
    const Tensor g = (grads.size() == 1 ? grads[0] : at::cat(grads, 1)).to(used.scalar_type());
    add_weight_gradients(leaves.slice(0, count), g, x);
    add_bias_gradients(leaves.slice(count), g);
    // For each leaf, and the arguments beside them.
    variable_list result(leaves.size() + 5);
    if (ctx->needs_input_grad(0)) result[0] = matrix_product(g, used).to(ctx->saved_data["dtype"].toScalarType());
    return result;
  }
};

void check(const Tensor& x, at::TensorList weights, at::TensorList biases, const Tensor& used, const MaybeTensor& used_bias) {
  int64_t width = 0;
  for (const Tensor& weight : weights) {
    TORCH_CHECK(weight.dim() == 2 && used.dim() == 2 && weight.size(1) == used.size(1), "joint product: a weight ", weight.sizes(),
                " as a part of ", used.sizes());
    width += weight.size(0);
  }
  TORCH_CHECK(x.dim() == 2 && used.size(0) == width && x.size(1) == used.size(1), "joint product: x ", x.sizes(), ", weights ",
              used.sizes(), " for results of ", width);
  TORCH_CHECK(biases.empty() != used_bias.has_value() && (biases.empty() || biases.size() == weights.size()), "joint product: ",
              biases.size(), " biases of ", weights.size(), " layers");
  for (size_t i = 0; i < biases.size(); i++)
    TORCH_CHECK(biases[i].dim() == 1 && biases[i].size(0) == weights[i].size(0), "joint product: a bias ", biases[i].sizes(),
                " beside a weight ", weights[i].sizes());
  TORCH_CHECK(!used_bias || used_bias->numel() == width, "joint product: ", used_bias ? used_bias->numel() : 0, " biases for ", width);
}

}  // namespace
}  // namespace tch_ext

using namespace tch_ext;

extern "C" {

// The tensors as one, if they lie one after another; else null.
char* tch_ext_adjacent(Tensor** out, Tensor* const* parts, size_t count) {
  return guard([&] {
    const Tensor found = adjacent(tensors(parts, count));
    *out = found.defined() ? new Tensor(found) : nullptr;
  });
}

// `biases` has as many tensors as `weights`, or is null together with `used_bias`. Sets `out` to the result, or if `splits` to one of each
// layer.
char* tch_ext_joint_linear(Tensor** out, const Tensor* x, Tensor* const* weights, Tensor* const* biases, size_t count, const Tensor* used,
                           const Tensor* used_bias, bool splits) {
  return guard([&] {
    const std::vector<Tensor> all_weights = tensors(weights, count), all_biases = tensors(biases, biases ? count : 0);
    const MaybeTensor bias = used_bias ? MaybeTensor(*used_bias) : std::nullopt;
    check(*x, all_weights, all_biases, *used, bias);
    std::vector<Tensor> leaves = all_weights;
    leaves.insert(leaves.end(), all_biases.begin(), all_biases.end());
    // Only as a list of this type it is seen by autograd.
    const at::TensorList list(leaves);
    const variable_list results = Joint::apply(*x, list, *used, bias, static_cast<int64_t>(count), splits);
    for (size_t i = 0; i < results.size(); i++) out[i] = new Tensor(results[i]);
  });
}

}  // extern "C"
