// Bounds how long libgomp's threads spin at barriers, for programs that ask for it.
//
// libgomp reads GOMP_SPINCOUNT once, in its own constructor, before `main`. A preinit function of the program runs before
// every constructor: it starts the program again with the variable set, which costs the mapping of the libraries (some
// milliseconds) and not their initialisation. The linker takes this file only into programs that refer to its symbol.

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
    // Set by the user, or by us before the restart.
    if (is(envp[count], "GOMP_SPINCOUNT") || is(envp[count], "OMP_WAIT_POLICY")) return;
  }
  // The path itself, as /proc/self/exe would become the process's name.
  char path[PATH_MAX];
  ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
  if (length <= 0) return;
  path[length] = 0;
  // No allocator: nothing has been initialised yet.
  auto** environment = static_cast<char**>(__builtin_alloca((count + 2) * sizeof(char*)));
  memcpy(environment, envp, count * sizeof(char*));
  environment[count] = const_cast<char*>(kVariable);
  environment[count + 1] = nullptr;
  // Where it fails, the program runs as it is.
  execve(path, argv, environment);
}

__attribute__((section(".preinit_array"), used)) void (*preinit)(int, char**, char**) = bound_spinning;

}  // namespace

// The count in force, or null: what libgomp was given.
extern "C" const char* tch_ext_spin_count() { return getenv("GOMP_SPINCOUNT"); }
