// Times of a program's CUDA kernels by CUPTI, without a change of the program: a library that CUDA loads.
//
//   g++ -O2 -shared -fPIC -std=c++17 -I.../nvidia/cu13/include gpu_profile.cpp -o libprofile.so .../nvidia/cu13/lib/libcupti.so.13
//   CUDA_INJECTION64_PATH=$PWD/libprofile.so PROFILE_OUT=kernels.txt PROFILE_LAST_MS=700 rlhf ...
//
// At the end of the process PROFILE_OUT has the kernels of CUDA graphs, those after the last graph, and those of the last PROFILE_LAST_MS
// milliseconds: their number, from the first start to the last end, how much of it the GPU was busy, the gaps between two kernels of a
// graph, and the kinds by time.
#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

struct Run {
  int kind;
  uint64_t start, end;
  uint32_t graph;
};

// Never freed: CUPTI calls back while the process ends.
struct State {
  std::mutex lock;
  std::vector<Run> runs;
  std::unordered_map<std::string, int> kinds;
  std::vector<std::string> names;
};
State& state() {
  static auto& all = *new State;
  return all;
}

constexpr size_t BUFFER = 8 << 20;

void CUPTIAPI request(uint8_t** buffer, size_t* size, size_t* records) {
  *buffer = static_cast<uint8_t*>(aligned_alloc(8, BUFFER));
  *size = *buffer ? BUFFER : 0;
  *records = 0;
}

void CUPTIAPI complete(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  auto& all = state();
  const std::lock_guard<std::mutex> held(all.lock);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
    const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
    const auto [place, is_new] = all.kinds.try_emplace(kernel->name, static_cast<int>(all.names.size()));
    if (is_new) all.names.push_back(kernel->name);
    all.runs.push_back({place->second, kernel->start, kernel->end, kernel->graphId});
  }
  free(buffer);
}

// The C++ name of a kernel, without what all of libtorch's have in common.
std::string readable(const std::string& name) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string text = status == 0 ? demangled : name;
  free(demangled);
  for (const std::string part : {"at::native::", "void ", "(anonymous namespace)::"})
    for (size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, part.size());
  return text.substr(0, 150);
}

void print(FILE* out, const char* title, std::vector<Run> runs) {
  if (runs.empty()) return;
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.start < b.start; });
  uint64_t busy = 0, end = 0, gaps = 0, in_row = 0;
  std::map<int, std::pair<uint64_t, int>> by_kind;
  for (size_t i = 0; i < runs.size(); i++) {
    const Run& run = runs[i];
    if (i && run.graph && run.graph == runs[i - 1].graph && run.start > end && run.start - end < 100000) gaps += run.start - end, in_row++;
    const uint64_t from = std::max(run.start, end);
    if (run.end > from) busy += run.end - from;
    end = std::max(end, run.end);
    by_kind[run.kind].first += run.end - run.start;
    by_kind[run.kind].second++;
  }
  fprintf(out, "== %s: %zu kernels, span %.1f ms, busy %.1f ms\n", title, runs.size(), (end - runs[0].start) / 1e6, busy / 1e6);
  if (in_row) fprintf(out, "   gaps between kernels of a graph: %.2f us on average, of %zu\n", gaps / 1e3 / in_row, static_cast<size_t>(in_row));
  std::vector<std::pair<uint64_t, int>> order;
  for (const auto& [kind, sum] : by_kind) order.push_back({sum.first, kind});
  std::sort(order.rbegin(), order.rend());
  uint64_t rest = 0;
  for (size_t i = 0; i < order.size(); i++) {
    const auto [time, kind] = order[i];
    const int count = by_kind[kind].second;
    if (i < 40)
      fprintf(out, "%8.2f ms %7d x %7.1f us  %s\n", time / 1e6, count, time / 1e3 / count, readable(state().names[kind]).c_str());
    else
      rest += time;
  }
  if (rest) fprintf(out, "%8.2f ms others\n", rest / 1e6);
}

void finish() {
  cuptiActivityFlushAll(1);
  const char* path = getenv("PROFILE_OUT");
  FILE* out = path ? fopen(path, "w") : stderr;
  if (!out) return;
  auto& all = state();
  const std::lock_guard<std::mutex> held(all.lock);
  const double last_ms = getenv("PROFILE_LAST_MS") ? atof(getenv("PROFILE_LAST_MS")) : 0;
  uint64_t end = 0, last_graph = 0;
  for (const Run& run : all.runs) {
    end = std::max(end, run.end);
    if (run.graph) last_graph = std::max(last_graph, run.end);
  }
  std::vector<Run> in_graphs, after, last;
  for (const Run& run : all.runs) {
    if (run.graph) in_graphs.push_back(run);
    if (last_graph && run.start > last_graph) after.push_back(run);
    if (run.start + static_cast<uint64_t>(last_ms * 1e6) > end) last.push_back(run);
  }
  print(out, "in graphs", in_graphs);
  print(out, "after the last graph", after);
  print(out, "last part", last);
  if (all.runs.empty()) fprintf(out, "no kernels\n");
  if (path) fclose(out);
}

}  // namespace

extern "C" int InitializeInjection() {
  state().runs.reserve(1 << 20);
  cuptiActivityRegisterCallbacks(request, complete);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  atexit(finish);
  return 1;
}
