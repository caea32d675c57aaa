// Products of ops.cpp for other files. None makes a graph.
#pragma once

#include <ATen/ATen.h>

#include <optional>

namespace tch_ext {

// x matrix^T + bias, by the fastest way that there is for these sizes.
at::Tensor linear_product(const at::Tensor& x, const at::Tensor& matrix, const std::optional<at::Tensor>& bias);

// a b.
at::Tensor matrix_product(const at::Tensor& a, const at::Tensor& b);

// The gradient of a leaf, for accumulation in place; created if necessary.
at::Tensor& gradient_of(const at::Tensor& leaf);

// gradient += a b, in the dtype of the gradient.
void add_matrix_product(const at::Tensor& gradient, const at::Tensor& a, const at::Tensor& b);

}  // namespace tch_ext
