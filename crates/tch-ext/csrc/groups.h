// Declarations shared by the shim and the CUDA library.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

struct GroupSettings {
  const char* host;
  uint16_t port;
  bool serves;  // this process runs the store's server
  const char* prefix;
  int rank, size;
  int64_t timeout_ms, rendezvous_ms;
};

// The function of the CUDA library (nccl.cpp): a backend on GPU `device` whose ranks meet in `store`.
using NcclFactory = c10::intrusive_ptr<c10d::Backend> (*)(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                           int device, int64_t timeout_ms);
constexpr const char* NCCL_FACTORY = "tch_ext_nccl_backend";
