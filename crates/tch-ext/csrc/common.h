// Helpers shared by the files of the shim.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <exception>
#include <optional>
#include <vector>

namespace tch_ext {

// Runs `body`; returns nullptr, or the message of its exception, to be freed with `tch_ext_free`.
template <typename F>
char* guard(F&& body) {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& e) {
    return strdup(e.what_without_backtrace());
  } catch (const std::exception& e) {
    return strdup(e.what());
  } catch (...) {
    return strdup("unknown C++ exception");
  }
}

inline std::vector<at::Tensor> tensors(at::Tensor* const* items, size_t count) {
  std::vector<at::Tensor> out;
  out.reserve(count);
  for (size_t i = 0; i < count; i++) out.push_back(*items[i]);
  return out;
}

// Optional arguments: autograd functions do not accept undefined tensors.
using MaybeTensor = std::optional<at::Tensor>;
inline at::Tensor value_of(const MaybeTensor& tensor) { return tensor ? *tensor : at::Tensor(); }
inline at::Tensor value_of(const at::Tensor* tensor) { return tensor ? *tensor : at::Tensor(); }
inline MaybeTensor maybe(const at::Tensor* tensor) { return tensor ? MaybeTensor(*tensor) : std::nullopt; }

// Calls `f` with a value of the type that `dtype` names, one of those that the kernels take.
template <typename F>
void for_dtype(at::ScalarType dtype, const char* what, const F& f) {
  if (dtype == at::kFloat) return f(float{});
  if (dtype == at::kBFloat16) return f(c10::BFloat16{});
  TORCH_CHECK(false, what, ": expected f32 or bf16, found ", dtype);
}

}  // namespace tch_ext
