// The C++ half of tch-ext. Every function returns nullptr, or an error message that the caller frees with
// `tch_ext_free`: no exception crosses the border.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

template <typename F>
char* guard(F&& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& e) {
    return strdup(e.what());
  } catch (...) {
    return strdup("unknown C++ exception");
  }
}

std::vector<at::Tensor> tensors(at::Tensor* const* items, size_t count) {
  std::vector<at::Tensor> out;
  out.reserve(count);
  for (size_t i = 0; i < count; i++) out.push_back(*items[i]);
  return out;
}

}  // namespace

extern "C" {

void tch_ext_free(char* message) { free(message); }

// One AdamW step over `count` parameters in one pass over memory; `step` counts from 1.
char* tch_ext_fused_adamw(at::Tensor* const* params, at::Tensor* const* grads, at::Tensor* const* exp_avgs,
                          at::Tensor* const* exp_avg_sqs, size_t count, int64_t step, double lr, double beta1,
                          double beta2, double weight_decay, double eps) {
  return guard([&] {
    if (count == 0) return;
    c10::NoGradGuard no_grad;
    auto p = tensors(params, count);
    auto step_tensor = at::full({}, static_cast<double>(step), p[0].options().dtype(at::kFloat).requires_grad(false));
    std::vector<at::Tensor> steps(count, step_tensor);
    at::_fused_adamw_(p, tensors(grads, count), tensors(exp_avgs, count), tensors(exp_avg_sqs, count), {}, steps, lr,
                      beta1, beta2, weight_decay, eps, /*amsgrad=*/false, /*maximize=*/false);
  });
}

}  // extern "C"
