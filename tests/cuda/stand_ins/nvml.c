/* libnvidia-ml.so: what torch and nvidia-ml-py ask of a GPU's driver. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "device.h"

struct memory { unsigned long long total, free, used; };
struct utilization { unsigned gpu, memory; };
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "error of the fake NVML"; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 1, 0; }
static int handle(unsigned index, void **h) { return *h = (void *)(size_t)(index + 1), 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **h) { return handle(index, h); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **h) {
    unsigned domain, bus = 1;
    sscanf(id, "%x:%x", &domain, &bus);
    return handle(bus - 1, h);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **h) {
    unsigned byte = 0;
    if (sscanf(uuid, "GPU-%2x", &byte) != 1 || byte % 0x11) return 6; /* not found */
    return handle(byte / 0x11 - 1, h);
}
int nvmlDeviceGetMemoryInfo(void *h, struct memory *m) {
    const char *text = getenv("FAKE_CUDA_BYTES");
    m->total = text && *text ? strtoull(text, NULL, 10) : 16ULL << 30;
    m->used = fake_cuda_used((int)(size_t)h - 1) + (300 << 20); /* a context takes some, too */
    m->free = m->total > m->used ? m->total - m->used : 0;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *h, struct utilization *u) { return u->gpu = 50, u->memory = 10, 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *milliwatts) { return *milliwatts = 100000, 0; }
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *celsius) { return *celsius = 40, 0; }
int nvmlDeviceGetTemperatureV(void *h, struct { unsigned version; int sensor, celsius; } *t) { return t->celsius = 40, 0; }
int nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *count, struct process *p) {
    if (*count < 1) return 7; /* too small */
    *p = (struct process){(unsigned)getpid(), fake_cuda_used((int)(size_t)h - 1), ~0u, ~0u};
    return *count = 1, 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, struct process *p) {
    return nvmlDeviceGetComputeRunningProcesses(h, count, p);
}
int nvmlDeviceGetGpuFabricInfoV(void *h, void *info) { return 3; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned link, void *type) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned link, void *pci) { return 3; }
