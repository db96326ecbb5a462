// The few functions of the CUDA driver API that a copy between two GPUs needs. The library is opened at run time, so the
// prototypes are declared here, as the driver's interface documents them, and no CUDA header is needed to build.
#pragma once
#include <stddef.h>

typedef int cu_result;
typedef int cu_device;
typedef unsigned long long cu_ptr;
typedef void *cu_handle; // of a context, a stream or an event

// FUNCTIONS lists them: name here, symbol in the library, parameters, and how they are passed on.
#define FUNCTIONS(X)                                                                                                   \
  X(init, cuInit, (unsigned flags), (flags))                                                                           \
  X(driver_version, cuDriverGetVersion, (int *version), (version))                                                     \
  X(error_name, cuGetErrorName, (cu_result code, const char **name), (code, name))                                     \
  X(device_count, cuDeviceGetCount, (int *count), (count))                                                             \
  X(device_by_bus, cuDeviceGetByPCIBusId, (cu_device * dev, const char *bus), (dev, bus))                              \
  X(context_retain, cuDevicePrimaryCtxRetain, (cu_handle * ctx, cu_device dev), (ctx, dev))                            \
  X(context_release, cuDevicePrimaryCtxRelease_v2, (cu_device dev), (dev))                                             \
  X(context_set, cuCtxSetCurrent, (cu_handle ctx), (ctx))                                                              \
  X(context_wait, cuCtxSynchronize, (void), ())                                                                        \
  X(can_access, cuDeviceCanAccessPeer, (int *can, cu_device dev, cu_device peer), (can, dev, peer))                    \
  X(enable_access, cuCtxEnablePeerAccess, (cu_handle peer, unsigned flags), (peer, flags))                             \
  X(memory_info, cuMemGetInfo_v2, (size_t *free, size_t *total), (free, total))                                        \
  X(allocate, cuMemAlloc_v2, (cu_ptr *p, size_t bytes), (p, bytes))                                                    \
  X(release, cuMemFree_v2, (cu_ptr p), (p))                                                                            \
  X(set_words, cuMemsetD32_v2, (cu_ptr p, unsigned word, size_t words), (p, word, words))                              \
  X(from_host, cuMemcpyHtoD_v2, (cu_ptr to, const void *from, size_t bytes), (to, from, bytes))                        \
  X(to_host, cuMemcpyDtoH_v2, (void *to, cu_ptr from, size_t bytes), (to, from, bytes))                                \
  X(copy_peer, cuMemcpyPeerAsync,                                                                                      \
    (cu_ptr to, cu_handle to_ctx, cu_ptr from, cu_handle from_ctx, size_t bytes, cu_handle stream),                    \
    (to, to_ctx, from, from_ctx, bytes, stream))                                                                       \
  X(copy_within, cuMemcpyDtoDAsync_v2, (cu_ptr to, cu_ptr from, size_t bytes, cu_handle stream),                       \
    (to, from, bytes, stream))                                                                                         \
  X(stream_create, cuStreamCreate, (cu_handle * stream, unsigned flags), (stream, flags))                              \
  X(stream_wait, cuStreamSynchronize, (cu_handle stream), (stream))                                                    \
  X(stream_destroy, cuStreamDestroy_v2, (cu_handle stream), (stream))                                                  \
  X(event_create, cuEventCreate, (cu_handle * event, unsigned flags), (event, flags))                                  \
  X(event_record, cuEventRecord, (cu_handle event, cu_handle stream), (event, stream))                                 \
  X(event_elapsed, cuEventElapsedTime, (float *ms, cu_handle from, cu_handle to), (ms, from, to))                      \
  X(event_destroy, cuEventDestroy_v2, (cu_handle event), (event))

#define DECLARE(name, symbol, params, args) cu_result cuda_##name params;
FUNCTIONS(DECLARE)
#undef DECLARE

// cuda_load opens the library and looks up every function. It returns NULL, or why it cannot be used: a text that
// holds until the next call. *symbol is the name of the first missing function, or NULL.
const char *cuda_load(const char *library, const char **symbol);
