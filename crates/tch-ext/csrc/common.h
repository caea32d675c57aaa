// Helpers shared by the files of the shim.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <exception>
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

}  // namespace tch_ext
