// Operations whose gradients are sums in a fixed order; see ordered.h.
#include "ordered.h"

#include <torch/csrc/autograd/custom_function.h>

#include <cstdlib>
#include <cstring>

#include "common.h"

namespace tch_ext {

bool orders_sums() {
  static const bool asked = [] {
    const char* value = getenv("RLHF_SUMS");
    return value && strcmp(value, "ordered") == 0;
  }();
  return asked;
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows of x by index, of which the same may be asked for several times. The gradient is summed in f32.
struct SelectRows : torch::autograd::Function<SelectRows> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& index) {
    ctx->save_for_backward({index});
    ctx->saved_data["rows"] = x.size(0);
    return x.index_select(0, index);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const Tensor index = ctx->get_saved_variables()[0];
    auto shape = grads[0].sizes().vec();
    shape[0] = ctx->saved_data["rows"].toInt();
    const auto wide = grads[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    Tensor sums = at::zeros(shape, grads[0].options().dtype(wide));
    const OrderedSums ordered(sums);
    sums.index_add_(0, index, grads[0].to(wide));
    return {sums.to(grads[0].scalar_type()), {}};
  }
};

struct FlashAttention : torch::autograd::Function<FlashAttention> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& starts,
                        const FlashOptions* options) {
    const FlashOptions& o = *options;
    const auto [out, lse, random, unused, mask] = at::_flash_attention_forward(
        q, k, v, starts, starts, o.width, o.width, /*dropout_p=*/0, o.causal, /*return_debug_mask=*/false, o.scale, o.left, o.right);
    ctx->save_for_backward({q, k, v, starts, out, lse, random, unused});
    ctx->saved_data["numbers"] = std::vector<int64_t>{o.width, o.causal, o.left.value_or(-1), o.right.value_or(-1)};
    ctx->saved_data["scale"] = o.scale;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto s = ctx->get_saved_variables();
    const auto n = ctx->saved_data["numbers"].toIntVector();
    const auto side = [&](size_t i) { return n[i] < 0 ? std::nullopt : std::optional<int64_t>(n[i]); };
    const OrderedSums ordered(s[0]);
    auto [dq, dk, dv] =
        at::_flash_attention_backward(grads[0].contiguous(), s[0], s[1], s[2], s[4], s[5], s[3], s[3], n[0], n[0], /*dropout_p=*/0, n[1] != 0,
                                      s[6], s[7], ctx->saved_data["scale"].toDouble(), side(2), side(3));
    return {dq, dk, dv, {}, {}};
  }
};

}  // namespace

Tensor ordered_flash_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& starts, const FlashOptions& options) {
  return FlashAttention::apply(q, k, v, starts, &options);
}

}  // namespace tch_ext

extern "C" {

bool tch_ext_orders_sums() { return tch_ext::orders_sums(); }

char* tch_ext_select_rows(at::Tensor** out, const at::Tensor* x, const at::Tensor* index) {
  return tch_ext::guard([&] { *out = new at::Tensor(tch_ext::SelectRows::apply(*x, *index)); });
}

}  // extern "C"
