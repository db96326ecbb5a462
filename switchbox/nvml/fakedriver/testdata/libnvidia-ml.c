// An NVML without a GPU. What its devices are like is read from the environment at every call:
//   FAKE_GPUS=4               devices, at 0000:10:00.0, 0000:11:00.0, ... (4)
//   FAKE_NVML_INIT=18         nvmlInit says this
//   FAKE_NVML_HANDLE=16       there is no handle of device 1: asking for it says this
//   FAKE_NVML_LINKS=18        links of each device, all to a switch (18)
//   FAKE_NVML_DOWN=1:5        link 5 of device 1 is down
//   FAKE_NVML_FABRIC=2        state of every device's fabric (3, completed)
//   FAKE_NVML_FABRIC_V=2      newest structure that nvmlDeviceGetGpuFabricInfoV takes (3)
//   FAKE_NVML_CLIQUE=7        the devices belong to a cluster, as this clique
//   FAKE_NVML_HEALTH=0x10     health mask of the fabric
//   FAKE_NVML_P2P=5           status of every pair (0, OK)
//   FAKE_NVML_USED_MB=100     memory in use
//   FAKE_NVML_HOT=3           the clocks of device 3 are held down by its temperature
//   FAKE_NVML_MIG=1           every device is divided
//   FAKE_NVML_XID=79          device 0 has this error when it has copied something
//   FAKE_NVML_HANG=nvmlDeviceGetUUID   this function never returns
//   FAKE_NVML_CRASH=nvmlInit_v2        this function ends the process by SIGSEGV
// With OLD defined it has the functions of a very old driver only, with ANCIENT not even those that start it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NOT_SUPPORTED 3
#define INVALID_ARGUMENT 2
struct device { int index; };
static struct device devices[64];

static long number(const char *name, long otherwise) {
  const char *v = getenv(name);
  return v && *v ? strtol(v, NULL, 0) : otherwise;
}
static int says(const char *name, const char *what) {
  const char *v = getenv(name);
  return v && strcmp(v, what) == 0;
}
static void misbehave(const char *function) {
  if (says("FAKE_NVML_HANG", function))
    for (;;)
      pause();
  if (says("FAKE_NVML_CRASH", function))
    raise(SIGSEGV);
}
#define BEGIN misbehave(__func__)

const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : code == 16 ? "GPU requires reset" : "an error of the fake"; }

#ifndef ANCIENT
int nvmlInit_v2(void) {
  BEGIN;
  for (int i = 0; i < 64; i++)
    devices[i].index = i;
  return number("FAKE_NVML_INIT", 0);
}
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  snprintf(version, length, "550.54.15");
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned *n) {
  BEGIN;
  *n = number("FAKE_GPUS", 4);
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, struct device **d) {
  BEGIN;
  *d = &devices[i];
  return i == 1 ? number("FAKE_NVML_HANDLE", 0) : 0;
}
int nvmlDeviceGetName(struct device *d, char *name, unsigned length) {
  snprintf(name, length, "Fake H100");
  return 0;
}
int nvmlDeviceGetUUID(struct device *d, char *uuid, unsigned length) {
  BEGIN;
  snprintf(uuid, length, "GPU-%08x", d->index);
  return 0;
}
struct pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
};
int nvmlDeviceGetPciInfo_v3(struct device *d, struct pci *p) {
  memset(p, 0, sizeof *p);
  p->bus = 0x10 + d->index;
  return 0;
}
#endif

#if !defined(OLD) && !defined(ANCIENT)
int nvmlDeviceGetIndex(struct device *d, unsigned *i) {
  *i = d->index;
  return 0;
}
int nvmlDeviceGetModuleId(struct device *d, unsigned *id) {
  *id = d->index + 1;
  return 0;
}
int nvmlDeviceGetMigMode(struct device *d, unsigned *current, unsigned *pending) {
  *current = *pending = number("FAKE_NVML_MIG", 0);
  return 0;
}
static int hot(struct device *d) { return d->index == number("FAKE_NVML_HOT", -1); }
int nvmlDeviceGetClockInfo(struct device *d, int type, unsigned *mhz) {
  *mhz = hot(d) ? 1095 : 1980;
  return 0;
}
int nvmlDeviceGetTemperature(struct device *d, int sensor, unsigned *celsius) {
  *celsius = hot(d) ? 91 : 62;
  return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *d, unsigned long long *reasons) {
  *reasons = hot(d) ? 0x48 : 4;
  return 0;
}
struct memory2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
int nvmlDeviceGetMemoryInfo_v2(struct device *d, struct memory2 *m) {
  m->total = 80ull << 30;
  m->used = (unsigned long long)number("FAKE_NVML_USED_MB", 4) << 20;
  return 0;
}
int nvmlDeviceGetNvLinkState(struct device *d, unsigned link, int *active) {
  BEGIN;
  if (link >= number("FAKE_NVML_LINKS", 18))
    return INVALID_ARGUMENT;
  char name[16];
  snprintf(name, sizeof name, "%d:%u", d->index, link);
  *active = !says("FAKE_NVML_DOWN", name);
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(struct device *d, unsigned link, int *type) {
  *type = 2;
  return 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *d, unsigned link, struct pci *p) {
  memset(p, 0, sizeof *p);
  p->bus = link % 4;
  return 0;
}
int nvmlDeviceGetP2PStatus(struct device *a, struct device *b, int capability, int *status) {
  *status = number("FAKE_NVML_P2P", 0);
  return 0;
}

// traffic is what the CUDA library beside this one says that it has copied.
static unsigned long long traffic(const char *counters, int device) {
  void *cuda = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  unsigned long long *bytes = cuda ? dlsym(cuda, counters) : NULL;
  return bytes ? bytes[device] : 0;
}
struct field {
  unsigned id, scope;
  long long timestamp, latency;
  int type, result;
  unsigned long long value;
};
int nvmlDeviceGetFieldValues(struct device *d, int n, struct field *f) {
  BEGIN;
  for (int i = 0; i < n; i++) {
    f[i].type = 3;
    f[i].result = 0;
    switch (f[i].id) {
    case 138: f[i].value = traffic("fake_sent", d->index) >> 10; break;
    case 139: f[i].value = traffic("fake_received", d->index) >> 10; break;
    case 161: case 162: case 163: case 230: f[i].value = 0; break;
    case 164: f[i].value = 26562; break;
    default: f[i].result = NOT_SUPPORTED;
    }
  }
  return 0;
}
struct fabric {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
  unsigned char summary; // of version 3
};
int nvmlDeviceGetGpuFabricInfoV(struct device *d, struct fabric *f) {
  BEGIN;
  if (f->version >> 24 > number("FAKE_NVML_FABRIC_V", 3))
    return NOT_SUPPORTED;
  f->state = number("FAKE_NVML_FABRIC", 3);
  f->status = 0;
  f->health = number("FAKE_NVML_HEALTH", 0);
  f->clique = number("FAKE_NVML_CLIQUE", 0);
  if (f->clique)
    memset(f->cluster, 0xab, sizeof f->cluster);
  return 0;
}
int nvmlEventSetCreate(void **set) {
  *set = &devices;
  return 0;
}
int nvmlEventSetFree(void *set) { return 0; }
int nvmlDeviceRegisterEvents(struct device *d, unsigned long long types, void *set) { return 0; }
struct event {
  struct device *device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};
int nvmlEventSetWait_v2(void *set, struct event *e, unsigned timeout) {
  static int told;
  if (told || !number("FAKE_NVML_XID", 0) || !traffic("fake_sent", 0))
    return 10;
  told = 1;
  memset(e, 0, sizeof *e);
  e->device = &devices[0];
  e->type = 8;
  e->data = number("FAKE_NVML_XID", 0);
  return 0;
}
#endif
