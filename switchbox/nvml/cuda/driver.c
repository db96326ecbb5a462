//go:build cgo && linux

#include "driver.h"

#include <dlfcn.h>

#define DEFINE(name, symbol, params, args)                                                                             \
  static cu_result(*at_##name) params;                                                                                 \
  cu_result cuda_##name params { return at_##name args; }
FUNCTIONS(DEFINE)
#undef DEFINE

const char *cuda_load(const char *library, const char **symbol) {
  *symbol = NULL;
  // Bound at once: a library that lacks what it needs itself is refused here, and does not end the process later.
  void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle)
    return dlerror();
#define LOOK_UP(name, sym, params, args)                                                                               \
  if (!dlsym(handle, #sym)) {                                                                                          \
    *symbol = #sym;                                                                                                    \
    return "missing";                                                                                                  \
  }
  FUNCTIONS(LOOK_UP) // all of them before one is used: what was loaded before stays whole
#undef LOOK_UP
#define TAKE(name, sym, params, args) at_##name = (cu_result(*) params)dlsym(handle, #sym);
  FUNCTIONS(TAKE)
#undef TAKE
  return NULL;
}
