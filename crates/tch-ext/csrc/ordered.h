// Sums in a fixed order on a GPU, where libtorch's faster ways add in any order: two runs then have the same bits.
#pragma once

#include <ATen/ATen.h>

namespace tch_ext {

// Whether they are asked for, by RLHF_SUMS=ordered.
bool orders_sums();

// While it lives, libtorch's operations on the GPU of `x` use their ordered forms, if these are asked for, and fail if they have none. It holds
// around one operation at a time: many others have no such form.
class OrderedSums {
 public:
  explicit OrderedSums(const at::Tensor& x) : on_(x.is_cuda() && orders_sums()) {
    if (!on_) return;
    auto& context = at::globalContext();
    // Uninitialized memory would be filled, each time.
    fills_ = context.deterministicFillUninitializedMemory();
    context.setDeterministicFillUninitializedMemory(false);
    context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  }
  ~OrderedSums() {
    if (!on_) return;
    auto& context = at::globalContext();
    context.setDeterministicAlgorithms(false, false);
    context.setDeterministicFillUninitializedMemory(fills_);
  }
  OrderedSums(const OrderedSums&) = delete;
  OrderedSums& operator=(const OrderedSums&) = delete;

 private:
  bool on_, fills_ = false;
};

// The arguments of flash attention over packed sequences beside its tensors.
struct FlashOptions {
  int64_t width;
  bool causal;
  double scale;
  std::optional<int64_t> left, right;
};

// Flash attention whose backward pass adds in order.
at::Tensor ordered_flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& starts,
                                   const FlashOptions& options);

}  // namespace tch_ext
