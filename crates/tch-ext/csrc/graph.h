// CUDA graphs: work of a GPU that is recorded once and queued again as a whole. They need CUDA's headers and are therefore in the
// CUDA library (graph.cpp); shim.cpp finds them there by name.
#pragma once

namespace tch_ext {

// The functions of the CUDA library; each returns an error as `guard` does.
struct GraphFunctions {
  // Directs this thread's work on GPU `device` into a new graph, which records it and does not run it.
  char* (*begin)(int device, void** graph);
  // Ends the recording; with `keep` the graph can be replayed.
  char* (*end)(void* graph, bool keep);
  // Queues the recorded work on this thread's stream.
  char* (*replay)(void* graph);
  void (*free)(void* graph);
};

// Name of the CUDA library, beside libtorch's.
constexpr const char* CUDA_LIBRARY = "libtch_ext_cuda.so";

// Name of the library's variable of this type.
constexpr const char* GRAPH_FUNCTIONS = "tch_ext_graph_functions";

}  // namespace tch_ext
