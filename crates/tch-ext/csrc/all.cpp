// The shim as one source file. libtorch's headers take 6 to 10 seconds in each file that includes them: 11 files took 99 seconds,
// all of them in one take 22. Names in unnamed namespaces are therefore shared between the files.
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
