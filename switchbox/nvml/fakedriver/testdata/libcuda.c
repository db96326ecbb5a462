// A CUDA driver without a GPU: device memory is the host's, a stream is a virtual clock. What it does wrong is read from
// the environment at every call:
//   FAKE_GPUS=4              devices, at 0000:10:00.0, 0000:11:00.0, ... (4)
//   FAKE_CUDA_FREE_MB=200    free memory of each
//   FAKE_CUDA_MBPS=400000    what copies reach
//   FAKE_CUDA_SLOW=0>1=8000  what copies from 0 to 1 reach
//   FAKE_CUDA_CORRUPT=0>1    copies from 0 to 1 damage a byte
//   FAKE_CUDA_NO_PEER=1      no device reaches another one
//   FAKE_CUDA_BLIND=1        copies do not show in NVLink's counters
//   FAKE_CUDA_HANG=cuInit    this function, or 0>1, never returns
//   FAKE_CUDA_CRASH=cuInit   this function, or 0>1, ends the process by SIGSEGV
//   FAKE_CUDA_FAIL=cuInit=999  this function says this
// With OLD defined it lacks a function.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GPUS 64
typedef unsigned long long ptr;
struct context { int device; };
struct clock { double ms; };
static struct context contexts[GPUS];
static _Thread_local struct context *current;
// What has gone over the links of each device, in bytes; the NVML beside this library reads it.
unsigned long long fake_sent[GPUS], fake_received[GPUS];

static const char *knob(const char *name, const char *otherwise) {
  const char *v = getenv(name);
  return v && *v ? v : otherwise;
}
static int gpus(void) { return atoi(knob("FAKE_GPUS", "4")); }
static int says(const char *name, const char *what) { return strcmp(knob(name, ""), what) == 0; }

static int misbehave(const char *what) {
  if (says("FAKE_CUDA_HANG", what))
    for (;;)
      pause();
  if (says("FAKE_CUDA_CRASH", what))
    raise(SIGSEGV);
  char name[64] = "";
  int code = 0;
  if (sscanf(knob("FAKE_CUDA_FAIL", ""), "%63[^=]=%d", name, &code) == 2 && strcmp(name, what) == 0)
    return code;
  return 0;
}
#define BEGIN                                                                                                          \
  do {                                                                                                                 \
    int code = misbehave(__func__);                                                                                    \
    if (code)                                                                                                          \
      return code;                                                                                                     \
  } while (0)
#define CURRENT                                                                                                        \
  BEGIN;                                                                                                               \
  if (!current)                                                                                                        \
    return 201

int cuInit(unsigned flags) {
  BEGIN;
  return gpus() ? 0 : 100;
}
int cuDriverGetVersion(int *v) {
  BEGIN;
  *v = 12040;
  return 0;
}
int cuGetErrorName(int code, const char **name) {
  switch (code) {
  case 2: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0;
  case 100: *name = "CUDA_ERROR_NO_DEVICE"; return 0;
  case 101: *name = "CUDA_ERROR_INVALID_DEVICE"; return 0;
  case 201: *name = "CUDA_ERROR_INVALID_CONTEXT"; return 0;
  case 704: *name = "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"; return 0;
  case 802: *name = "CUDA_ERROR_SYSTEM_NOT_READY"; return 0;
  }
  *name = NULL;
  return 1;
}
int cuDeviceGetCount(int *n) {
  BEGIN;
  *n = gpus();
  return 0;
}
int cuDeviceGetByPCIBusId(int *dev, const char *bus) {
  BEGIN;
  unsigned domain, number;
  if (sscanf(bus, "%x:%x:", &domain, &number) != 2 || number < 0x10 || (int)number >= 0x10 + gpus())
    return 101;
  *dev = number - 0x10;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **ctx, int dev) {
  BEGIN;
  contexts[dev].device = dev;
  *ctx = &contexts[dev];
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int dev) { return 0; }
int cuCtxSetCurrent(void *ctx) {
  BEGIN;
  current = ctx;
  return 0;
}
int cuCtxSynchronize(void) {
  CURRENT;
  return 0;
}
int cuDeviceCanAccessPeer(int *can, int dev, int peer) {
  BEGIN;
  *can = !*knob("FAKE_CUDA_NO_PEER", "");
  return 0;
}
int cuCtxEnablePeerAccess(void *peer, unsigned flags) {
  CURRENT;
  static char enabled[GPUS][GPUS];
  char *pair = &enabled[current->device][((struct context *)peer)->device];
  if (*pair)
    return 704;
  *pair = 1;
  return 0;
}
int cuMemGetInfo_v2(size_t *free, size_t *total) {
  CURRENT;
  *free = (size_t)atol(knob("FAKE_CUDA_FREE_MB", "200")) << 20;
  *total = (size_t)80 << 30;
  return 0;
}
int cuMemAlloc_v2(ptr *p, size_t bytes) {
  CURRENT;
  *p = (ptr)malloc(bytes);
  return *p ? 0 : 2;
}
int cuMemFree_v2(ptr p) {
  CURRENT;
  free((void *)p);
  return 0;
}
int cuMemsetD32_v2(ptr p, unsigned word, size_t words) {
  CURRENT;
  for (size_t i = 0; i < words; i++)
    ((unsigned *)p)[i] = word;
  return 0;
}
int cuMemcpyHtoD_v2(ptr to, const void *from, size_t bytes) {
  CURRENT;
  memcpy((void *)to, from, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void *to, ptr from, size_t bytes) {
  CURRENT;
  memcpy(to, (void *)from, bytes);
  return 0;
}

static double rate(const char *pair) {
  char slow[32] = "";
  double mbps = 0;
  if (sscanf(knob("FAKE_CUDA_SLOW", ""), "%31[^=]=%lf", slow, &mbps) == 2 && strcmp(slow, pair) == 0)
    return mbps;
  return atof(knob("FAKE_CUDA_MBPS", "400000"));
}
static int copy(int a, int b, ptr to, ptr from, size_t bytes, struct clock *stream) {
  char pair[32];
  snprintf(pair, sizeof pair, "%d>%d", a, b);
  int code = misbehave(pair);
  if (code)
    return code;
  if (memcmp((void *)to, (void *)from, 64)) { // the same again needs no work
    memcpy((void *)to, (void *)from, bytes);
    if (says("FAKE_CUDA_CORRUPT", pair))
      ((unsigned char *)to)[bytes / 2 + 3] ^= 0x10;
  }
  if (a != b && !*knob("FAKE_CUDA_BLIND", "")) {
    __atomic_add_fetch(&fake_sent[a], bytes, __ATOMIC_RELAXED);
    __atomic_add_fetch(&fake_received[b], bytes, __ATOMIC_RELAXED);
  }
  stream->ms += bytes / 1e3 / rate(pair);
  return 0;
}
#ifndef OLD
int cuMemcpyPeerAsync(ptr to, void *to_ctx, ptr from, void *from_ctx, size_t bytes, void *stream) {
  CURRENT;
  return copy(((struct context *)from_ctx)->device, ((struct context *)to_ctx)->device, to, from, bytes, stream);
}
#endif
int cuMemcpyDtoDAsync_v2(ptr to, ptr from, size_t bytes, void *stream) {
  CURRENT;
  return copy(current->device, current->device, to, from, bytes, stream);
}
int cuStreamCreate(void **stream, unsigned flags) {
  CURRENT;
  *stream = calloc(1, sizeof(struct clock));
  return 0;
}
int cuStreamSynchronize(void *stream) {
  CURRENT;
  return 0;
}
int cuStreamDestroy_v2(void *stream) {
  free(stream);
  return 0;
}
int cuEventCreate(void **event, unsigned flags) {
  CURRENT;
  *event = calloc(1, sizeof(struct clock));
  return 0;
}
int cuEventRecord(void *event, void *stream) {
  CURRENT;
  *(struct clock *)event = *(struct clock *)stream;
  return 0;
}
int cuEventElapsedTime(float *ms, void *from, void *to) {
  BEGIN;
  *ms = ((struct clock *)to)->ms - ((struct clock *)from)->ms;
  return 0;
}
int cuEventDestroy_v2(void *event) {
  free(event);
  return 0;
}
