#include "graph.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "common.h"

namespace {

using at::cuda::CUDAGraph;
using c10::cuda::CUDAStream;

// Held while a graph is recorded, freed or replayed: libtorch has a list of all graphs that threads would change at once.
std::recursive_mutex& graphs() {
  static auto& lock = *new std::recursive_mutex;
  return lock;
}

// The recordings of a GPU share a stream, as the default stream cannot be recorded, and memory: a graph takes what those before it have
// freed.
struct Place {
  c10::DeviceIndex device;
  CUDAStream stream;
  at::cuda::MempoolId_t memory;
  // A graph of one small operation, which is never replayed: libtorch keeps memory only while a graph has it.
  CUDAGraph first;
};

struct Graph {
  CUDAGraph graph;
  Place* place;
  // The thread's stream, while another is recorded.
  std::optional<CUDAStream> before;
};

// Ends a recording that failed: otherwise libtorch would go on to take memory for it. It may not have begun, or have ended.
void abandon(const Place& place, const CUDAStream& before) {
  c10::cuda::setCurrentCUDAStream(before);
  try {
    c10::cuda::CUDACachingAllocator::endAllocateToPool(place.device, place.memory);
  } catch (...) {
  }
  try {
    at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(place.memory);
  } catch (...) {
  }
}

// Directs the thread's work into `graph`, and returns the thread's stream. Other threads may use the GPU meanwhile.
CUDAStream start(CUDAGraph& graph, const Place& place) {
  const auto before = c10::cuda::getCurrentCUDAStream();
  // Work that is queued may still use memory that the recording takes.
  before.synchronize();
  c10::cuda::setCurrentCUDAStream(place.stream);
  try {
    graph.capture_begin(place.memory, cudaStreamCaptureModeThreadLocal);
  } catch (...) {
    abandon(place, before);
    throw;
  }
  return before;
}

void stop(CUDAGraph& graph, const Place& place, const CUDAStream& before) {
  try {
    graph.capture_end();
  } catch (...) {
    abandon(place, before);
    throw;
  }
  c10::cuda::setCurrentCUDAStream(before);
}

// The place of the thread's GPU.
Place& place_of(c10::DeviceIndex device) {
  // Never freed: when the process ends, CUDA may be gone before.
  static auto& places = *new std::map<c10::DeviceIndex, std::unique_ptr<Place>>;
  auto& place = places[device];
  if (!place) {
    std::unique_ptr<Place> made(
        new Place{device, c10::cuda::getStreamFromPool(false, device), at::cuda::graph_pool_handle(), CUDAGraph()});
    const auto before = start(made->first, *made);
    try {
      at::zeros({1}, at::TensorOptions(at::Device(at::kCUDA, device)));
    } catch (...) {
      try {
        stop(made->first, *made, before);
      } catch (...) {
      }
      throw;
    }
    stop(made->first, *made, before);
    place = std::move(made);
  }
  return *place;
}

char* begin(int number, void** out) {
  return tch_ext::guard([&] {
    const auto device = static_cast<c10::DeviceIndex>(number);
    std::unique_lock held(graphs());
    const c10::cuda::CUDAGuard on(device);
    auto made = std::make_unique<Graph>();
    made->place = &place_of(device);
    made->before = start(made->graph, *made->place);
    *out = made.release();
    held.release();  // until the recording ends
  });
}

char* end(void* raw, bool keep) {
  return tch_ext::guard([&] {
    const std::unique_lock held(graphs(), std::adopt_lock);
    auto* graph = static_cast<Graph*>(raw);
    const c10::cuda::CUDAGuard on(graph->place->device);
    try {
      stop(graph->graph, *graph->place, *graph->before);
    } catch (...) {
      if (keep) throw;
    }
  });
}

char* replay(void* raw) {
  return tch_ext::guard([&] {
    const std::lock_guard held(graphs());
    static_cast<Graph*>(raw)->graph.replay();
  });
}

void free_graph(void* raw) {
  const std::lock_guard held(graphs());
  delete static_cast<Graph*>(raw);
}

}  // namespace

extern "C" {
extern const tch_ext::GraphFunctions tch_ext_graph_functions;
const tch_ext::GraphFunctions tch_ext_graph_functions{begin, end, replay, free_graph};
}
