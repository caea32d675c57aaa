// The shim as one source file: libtorch's headers take 6 to 10 seconds of a core in each file that includes them. Its 11 files took 99 seconds
// apart, and take 22 here. Names in unnamed namespaces are therefore shared between the files. A file that is not listed is not compiled.
#include "shim.cpp"

#include "groups.cpp"
#include "joint.cpp"
#include "mixing.cpp"
#include "offload.cpp"
#include "ops.cpp"
#include "optim.cpp"
#include "ordered.cpp"
#include "shared.cpp"

#include "gpu/emulate.cpp"
#include "gpu/gpu.cpp"
