/* libcuda.so: the driver's functions that torch looks up, among them those of expandable segments. */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "device.h"

struct piece { size_t size; int device; };

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
int cudaDeviceGetAttribute(int *value, int attribute, int device); /* has the same numbers */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute a, CUdevice d) {
    cudaDeviceGetAttribute(value, a, d);
    if (a == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) *value = 1;
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) { return *flags = 0, *active = 1, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return *c = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { return *c = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *d) { return *d = 0, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult e, const char **text) { return *text = e ? "error of the fake driver" : "no error", CUDA_SUCCESS; }

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) {
    return *size = 2 << 20, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t size, size_t alignment, CUdeviceptr at, unsigned long long flags) {
    void *made = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    return *p = (CUdeviceptr)made, CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t size) { return munmap((void *)p, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t size, const CUmemAllocationProp *p, unsigned long long flags) {
    if (!fake_cuda_reserve(p->location.id, (long long)size)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct piece *made = malloc(sizeof *made);
    *made = (struct piece){size, p->location.id};
    return *h = (CUmemGenericAllocationHandle)made, CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
    struct piece *made = (struct piece *)h;
    fake_cuda_reserve(made->device, -(long long)made->size);
    return free(made), CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags) {
    return mprotect((void *)p, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t size) {
    madvise((void *)p, size, MADV_DONTNEED);
    return mprotect((void *)p, size, PROT_NONE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr p, size_t size, const CUmemAccessDesc *d, size_t n) { return CUDA_SUCCESS; }

/* What triton loads and launches: a function is its name. */
CUresult cuModuleLoadData(CUmodule *m, const void *image) { return *m = (CUmodule)1, CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule *m, const char *path) { return *m = (CUmodule)1, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { return *f = (CUfunction)strdup(name), CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute a, CUfunction f) {
    *value = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                        CUstream s, void **args, void **extra) {
    return fake_cuda_product((const char *)f, 0, s), CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **args, void **extra) {
    return fake_cuda_product((const char *)f, 0, c->hStream), CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute a, CUdeviceptr p) {
    if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)value = p;
    return CUDA_SUCCESS;
}
