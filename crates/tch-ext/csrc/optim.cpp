// Optimizer steps, in place.
#include <c10/core/GradMode.h>

#include <cmath>

#include "common.h"
#include "gpu/gpu.h"
#include "kernels.h"

using at::Tensor;

// Settings of the step number `step`, from 1.
struct tch_ext_adamw {
  int64_t step;
  double lr, beta1, beta2, weight_decay, eps;
};

struct tch_ext_blocked_moment {
  const Tensor *codes, *absmax, *map, *middles, *least_codes;
};

namespace tch_ext {
namespace {

AdamWStep step_of(const tch_ext_adamw& a) {
  const auto correction = [&](double beta) { return 1 - std::pow(beta, static_cast<double>(a.step)); };
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(1 - a.lr * a.weight_decay),
          f(a.beta1),
          f(1 - a.beta1),
          f(a.beta2),
          f(1 - a.beta2),
          f(a.lr / correction(a.beta1)),
          f(std::sqrt(correction(a.beta2))),
          f(a.eps)};
}

void check(const char* what, const Tensor& x, at::ScalarType dtype, int64_t numel) {
  TORCH_CHECK((x.is_cpu() || gpu::takes(x)) && x.is_contiguous() && x.scalar_type() == dtype && x.numel() == numel, what,
              ": expected ", numel, " contiguous elements of ", dtype, " on the CPU, or a GPU with kernels, found ", x.sizes(), " of ", x.scalar_type(), " on ",
              x.device());
}

BlockedMoment moment_of(const tch_ext_blocked_moment& moment, int64_t numel) {
  constexpr int64_t BLOCK = BlockedMoment::BLOCK;
  check("codes of a moment", *moment.codes, at::kByte, numel);
  check("greatest magnitudes of a moment", *moment.absmax, at::kFloat, (numel + BLOCK - 1) / BLOCK);
  check("map of a moment", *moment.map, at::kFloat, 256);
  check("middles of a map", *moment.middles, at::kFloat, 256);
  check("least codes of a map", *moment.least_codes, at::kByte, 1 << 16);
  return {moment.codes->mutable_data_ptr<uint8_t>(), moment.absmax->mutable_data_ptr<float>(),
          moment.map->const_data_ptr<float>(), moment.middles->const_data_ptr<float>(),
          moment.least_codes->const_data_ptr<uint8_t>()};
}

// Cached copies of a changed parameter have to be found stale.
void bump_version(const Tensor& x) { x.unsafeGetTensorImpl()->bump_version(); }

}  // namespace
}  // namespace tch_ext

using namespace tch_ext;

extern "C" {

// A step over `count` parameters in one pass over memory.
char* tch_ext_fused_adamw(Tensor* const* params, Tensor* const* grads, Tensor* const* exp_avgs,
                          Tensor* const* exp_avg_sqs, size_t count, const tch_ext_adamw* a) {
  return guard([&] {
    if (count == 0) return;
    c10::NoGradGuard no_grad;
    auto p = tensors(params, count);
    const auto options = p[0].options().dtype(at::kFloat).requires_grad(false);
    std::vector<Tensor> steps(count, at::full({}, static_cast<double>(a->step), options));
    at::_fused_adamw_(p, tensors(grads, count), tensors(exp_avgs, count), tensors(exp_avg_sqs, count), {}, steps, a->lr,
                      a->beta1, a->beta2, a->weight_decay, a->eps, /*amsgrad=*/false, /*maximize=*/false);
    // The operation itself does not.
    for (auto& tensor : p) bump_version(tensor);
  });
}

// A step with both moments in 8 bits.
char* tch_ext_adamw_blocked(const Tensor* param, const Tensor* grad, const tch_ext_blocked_moment* first,
                            const tch_ext_blocked_moment* second, const tch_ext_adamw* a) {
  return guard([&] {
    const int64_t numel = param->numel();
    check("parameter", *param, at::kFloat, numel);
    check("gradient", *grad, at::kFloat, numel);
    if (gpu::takes(*param))
      gpu::adamw_blocked(step_of(*a), *param, *grad, moment_of(*first, numel), moment_of(*second, numel));
    else
      kernels().adamw.blocked(step_of(*a), numel, param->mutable_data_ptr<float>(), grad->const_data_ptr<float>(),
                            moment_of(*first, numel), moment_of(*second, numel));
    bump_version(*param);
  });
}

// A step with parameter, gradient and moments in bf16; `keys` are three.
char* tch_ext_adamw_rounded(const Tensor* param, const Tensor* grad, const Tensor* first, const Tensor* second,
                            const uint64_t* keys, const tch_ext_adamw* a) {
  return guard([&] {
    const int64_t numel = param->numel();
    check("parameter", *param, at::kBFloat16, numel);
    check("gradient", *grad, at::kBFloat16, numel);
    check("first moment", *first, at::kBFloat16, numel);
    check("second moment", *second, at::kBFloat16, numel);
    const auto data = [](const Tensor& x) { return x.mutable_data_ptr<c10::BFloat16>(); };
    if (gpu::takes(*param))
      gpu::adamw_rounded(step_of(*a), *param, *grad, *first, *second, keys);
    else
      kernels().adamw.rounded(step_of(*a), numel, data(*param), grad->const_data_ptr<c10::BFloat16>(), data(*first),
                            data(*second), keys);
    bump_version(*param);
  });
}

}  // extern "C"
