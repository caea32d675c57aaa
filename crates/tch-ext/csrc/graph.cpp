#include "graph.h"

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "common.h"

namespace {

// Held while a graph is recorded, freed or replayed: libtorch has a list of all graphs that threads would change at once.
std::recursive_mutex& graphs() {
  static auto& lock = *new std::recursive_mutex;
  return lock;
}

struct Graph {
  at::cuda::CUDAGraph graph;
  // The thread's stream, while another is recorded.
  std::optional<c10::cuda::CUDAStream> stream;
};

// Directs the thread's work into `graph`. Other threads may use the GPU meanwhile.
void start(at::cuda::CUDAGraph& graph, const c10::cuda::CUDAStream& stream, at::cuda::MempoolId_t memory) {
  const auto before = c10::cuda::getCurrentCUDAStream(stream.device_index());
  // Work that is queued may still use memory that the recording takes.
  before.synchronize();
  c10::cuda::setCurrentCUDAStream(stream);
  try {
    graph.capture_begin(memory, cudaStreamCaptureModeThreadLocal);
  } catch (...) {
    c10::cuda::setCurrentCUDAStream(before);
    throw;
  }
}

// The place of a GPU's recordings.
struct Place {
  // The default stream cannot be recorded.
  c10::cuda::CUDAStream stream;
  // A graph of one small operation, which is never replayed: its memory is that of all others, so that a graph takes what those before it
  // have freed. libtorch keeps such memory only while a graph has it.
  at::cuda::CUDAGraph first;
};

Place& place_of(c10::DeviceIndex device) {
  // Never freed: when the process ends, CUDA may be gone before.
  static auto& places = *new std::map<c10::DeviceIndex, std::unique_ptr<Place>>;
  auto& place = places[device];
  if (!place) {
    std::unique_ptr<Place> made(new Place{c10::cuda::getStreamFromPool(false, device), {}});
    const auto before = c10::cuda::getCurrentCUDAStream(device);
    start(made->first, made->stream, {0, 0});
    at::zeros({1}, at::TensorOptions(at::Device(at::kCUDA, device)));
    made->first.capture_end();
    c10::cuda::setCurrentCUDAStream(before);
    place = std::move(made);
  }
  return *place;
}

char* begin(int device, void** out) {
  return tch_ext::guard([&] {
    std::unique_lock held(graphs());
    auto made = std::make_unique<Graph>();
    Place& place = place_of(static_cast<c10::DeviceIndex>(device));
    const auto stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device));
    start(made->graph, place.stream, place.first.pool());
    made->stream = stream;
    *out = made.release();
    held.release();  // until the recording ends
  });
}

char* end(void* raw, bool keep) {
  return tch_ext::guard([&] {
    const std::unique_lock held(graphs(), std::adopt_lock);
    auto* graph = static_cast<Graph*>(raw);
    std::exception_ptr error;
    try {
      graph->graph.capture_end();
    } catch (...) {
      error = std::current_exception();
    }
    c10::cuda::setCurrentCUDAStream(*graph->stream);
    if (error && keep) std::rethrow_exception(error);
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
