// Bounds the spinning of libgomp's threads at barriers, for programs that request it.
//
// libgomp reads GOMP_SPINCOUNT once, in its constructor, before `main`. A preinit function runs before all
// constructors: it restarts the program with the variable set, which costs the mapping of the libraries (some
// milliseconds), but not their initialization. The linker includes this file only in programs that refer to its
// symbol.

#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>

namespace {

constexpr char kVariable[] = "GOMP_SPINCOUNT=" TCH_EXT_SPIN_COUNT;

bool is(const char* entry, const char* name) {
  size_t length = strlen(name);
  return strncmp(entry, name, length) == 0 && entry[length] == '=';
}

void bound_spinning(int, char** argv, char** envp) {
  size_t count = 0;
  for (; envp[count] != nullptr; count++) {
    // Set by the user, or before the restart.
    if (is(envp[count], "GOMP_SPINCOUNT") || is(envp[count], "OMP_WAIT_POLICY")) return;
  }
  // The resolved path: with /proc/self/exe the process would be named `exe`.
  char path[PATH_MAX];
  ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
  if (length <= 0) return;
  path[length] = 0;
  // No allocator: nothing has been initialized yet.
  auto** environment = static_cast<char**>(__builtin_alloca((count + 2) * sizeof(char*)));
  memcpy(environment, envp, count * sizeof(char*));
  environment[count] = const_cast<char*>(kVariable);
  environment[count + 1] = nullptr;
  // If it fails, the program continues without the bound.
  execve(path, argv, environment);
}

__attribute__((section(".preinit_array"), used)) void (*preinit)(int, char**, char**) = bound_spinning;

}  // namespace

// Returns the count that libgomp has read, or null.
extern "C" const char* tch_ext_spin_count() { return getenv("GOMP_SPINCOUNT"); }
