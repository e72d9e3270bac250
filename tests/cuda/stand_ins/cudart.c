/* libcudart.so: a CUDA runtime without a device.
 *
 * Memory is the host's, and counted; copies are done at once; kernels do nothing, but take time on a simulated clock:
 * each stream has a tail (when its queued work ends), and events, queries and waits obey it.
 *
 *   FAKE_CUDA_DEVICES    how many devices (1)
 *   FAKE_CUDA_BYTES      memory of each (16 GiB)
 *   FAKE_CUDA_OTHERS_BYTES  what of it is in use by others: a context, other processes (0)
 *   FAKE_CUDA_KERNEL_NS  how long one kernel takes (1500)
 *   FAKE_CUDA_GFLOPS    how fast matrix products are (100000)
 *   FAKE_CUDA_VERBOSE    1: name each function without an implementation the first time that it is called
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include "device.h"

enum { DEVICES = 16, RANGES = 1 << 16 };

struct CUgraph_st { int ended; unsigned id; size_t count; struct fake_work *works; };
struct CUstream_st { long long tail; int priority, device; unsigned id; struct CUgraph_st *capture; };
struct CUevent_st { long long at; int recorded, timed; struct CUgraph_st *capture; };
struct range { char *start; size_t size; int device; enum cudaMemoryType type; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[RANGES];
static int ranges_used;
static size_t used[DEVICES];
static struct CUstream_st defaults[DEVICES];
static long long last_tail[DEVICES];
static __thread int current;
static __thread cudaError_t last;

static long long env(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoll(text) : otherwise;
}

static int devices(void) { return (int)env("FAKE_CUDA_DEVICES", 1); }
static size_t others(void) { return (size_t)env("FAKE_CUDA_OTHERS_BYTES", 0); }
static size_t capacity(void) { return (size_t)env("FAKE_CUDA_BYTES", 16LL << 30); }
static cudaError_t fail(cudaError_t error) { return last = error; }

struct fake_tracer *fake_tracer;

/* ---- the clock ---- */

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void wait_until(long long at) {
    for (long long left; (left = at - now()) > 0;) {
        struct timespec t = {left / 1000000000, left % 1000000000};
        nanosleep(&t, NULL);
    }
}

static struct CUstream_st *stream_of(cudaStream_t stream) { return (size_t)stream > 2 ? stream : &defaults[current]; }

/* One call of the runtime, as a tracer sees it; a call inside of another is none of its own. */
struct api { int number; unsigned correlation; long long start; };
static __thread unsigned correlation;

static struct api enter(int number) {
    static unsigned calls;
    if (!fake_tracer || correlation) return (struct api){0};
    correlation = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    return (struct api){number, correlation, now()};
}
static void leave(struct api *a) {
    if (!a->correlation) return;
    correlation = 0;
    if (fake_tracer) fake_tracer->api(a->number, a->correlation, a->start, now());
}
#define TRACED(call) __attribute__((cleanup(leave))) struct api traced = enter(FAKE_##call)

/* The graph that is being captured on a stream. Graphs are never freed: streams and events go on to point to them. */
static struct CUgraph_st *capture_of(cudaStream_t stream) {
    struct CUgraph_st *graph = stream_of(stream)->capture;
    return graph && !graph->ended ? graph : NULL;
}

/* Queue work behind what the stream has, or keep it for the graph that is being captured. */
static void queue(struct fake_work work, cudaStream_t stream, long long nanoseconds) {
    struct CUstream_st *s = stream_of(stream);
    struct CUgraph_st *graph = capture_of(stream);
    if (graph) {
        work.end = nanoseconds;
        graph->works = realloc(graph->works, (graph->count + 1) * sizeof work);
        graph->works[graph->count++] = work;
        return;
    }
    pthread_mutex_lock(&lock);
    long long t = now();
    work.start = s->tail > t ? s->tail : t;
    work.end = s->tail = work.start + nanoseconds;
    if (s->tail > last_tail[s->device]) last_tail[s->device] = s->tail;
    pthread_mutex_unlock(&lock);
    work.device = s->device;
    work.stream = s->id ? s->id : 7; /* CUPTI's number of the default stream */
    work.correlation = correlation;
    if (fake_tracer) fake_tracer->work(&work);
}

static cudaError_t launch(int api, const void *function, dim3 grid, dim3 block, cudaStream_t stream) {
    __attribute__((cleanup(leave))) struct api traced = enter(api);
    struct fake_work work = {.kind = FAKE_KERNEL, .function = function, .grid = {grid.x, grid.y, grid.z}, .block = {block.x, block.y, block.z}};
    queue(work, stream, env("FAKE_CUDA_KERNEL_NS", 1500));
    return cudaSuccess;
}

/* Kernels of the other libraries, which have names of their own. */
void fake_cuda_kernel(const char *name, long long nanoseconds, void *stream) {
    __attribute__((cleanup(leave))) struct api traced = enter(FAKE_cudaLaunchKernel);
    struct fake_work work = {.kind = FAKE_KERNEL, .name = name, .grid = {108, 1, 1}, .block = {256, 1, 1}};
    queue(work, stream, nanoseconds);
}
void fake_cuda_product(const char *name, double operations, void *stream) {
    fake_cuda_kernel(name, 2000 + (long long)(operations / env("FAKE_CUDA_GFLOPS", 100000)), stream);
}

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count) { return *count = devices(), cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
    return current = device, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetLastError(void) { cudaError_t e = last; return last = cudaSuccess, e; }
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError"; }
const char *cudaGetErrorString(cudaError_t e) {
    if (e == cudaErrorMemoryAllocation) return "out of memory";
    if (e == cudaErrorInvalidDevice) return "invalid device ordinal";
    return e ? "error of the fake CUDA runtime" : "no error";
}
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int d, int p) { return *can = d != p, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int p, unsigned flags) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) {
    TRACED(cudaDeviceSynchronize);
    return wait_until(last_tail[current]), cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
    return snprintf(id, size, "0000:%02X:00.0", device + 1), cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "NVIDIA A100-SXM4-FAKE");
    memset(p->uuid.bytes, 0x11 * (device + 1), sizeof p->uuid.bytes);
    p->totalGlobalMem = capacity();
    p->major = 8;
    p->minor = 0;
    p->multiProcessorCount = 108;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 166912;
    p->sharedMemPerMultiprocessor = 167936;
    p->l2CacheSize = 40 << 20;
    p->textureAlignment = 512;
    p->maxBlocksPerMultiProcessor = 32;
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->cooperativeLaunch = 1;
    p->pciBusID = device + 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    static const struct { enum cudaDeviceAttr name; int value; } known[] = {
        {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxBlockDimX, 1024}, {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64}, {cudaDevAttrMaxGridDimX, 0x7fffffff}, {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152}, {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 166912}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 167936},
        {cudaDevAttrMultiProcessorCount, 108}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrComputeCapabilityMajor, 8}, {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrMaxRegistersPerBlock, 65536}, {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
        {cudaDevAttrMaxBlocksPerMultiprocessor, 32}, {cudaDevAttrUnifiedAddressing, 1},
        {cudaDevAttrCooperativeLaunch, 1}, {cudaDevAttrConcurrentKernels, 1}, {cudaDevAttrL2CacheSize, 40 << 20},
    };
    *value = 0;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].name == attribute) *value = known[i].value;
    return cudaSuccess;
}

/* ---- memory ---- */

static struct range *find(const void *p) {
    for (int i = 0; i < ranges_used; i++)
        if ((char *)p >= ranges[i].start && (char *)p < ranges[i].start + ranges[i].size) return &ranges[i];
    return NULL;
}

/* Whole pages of 2 MiB, as the driver counts them; not committed before somebody writes to them. */
static cudaError_t take(void **p, size_t size, enum cudaMemoryType type) {
    size_t whole = (size + (2 << 20) - 1) & ~(size_t)((2 << 20) - 1);
    cudaError_t found = cudaErrorMemoryAllocation;
    if (!size) return *p = NULL, cudaSuccess;
    pthread_mutex_lock(&lock);
    int fits = type != cudaMemoryTypeDevice || (whole >= size && used[current] + whole + others() <= capacity());
    if (fits && ranges_used < RANGES) {
        void *made = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made != MAP_FAILED) {
            ranges[ranges_used++] = (struct range){made, whole, current, type};
            if (type == cudaMemoryTypeDevice) used[current] += whole;
            *p = made;
            found = cudaSuccess;
        }
    }
    pthread_mutex_unlock(&lock);
    return found ? fail(found) : found;
}

static cudaError_t give(void *p) {
    pthread_mutex_lock(&lock);
    struct range *r = p ? find(p) : NULL;
    if (r && r->start == p) {
        munmap(r->start, r->size);
        if (r->type == cudaMemoryTypeDevice) used[r->device] -= r->size;
        *r = ranges[--ranges_used];
        p = NULL;
    }
    pthread_mutex_unlock(&lock);
    return p ? fail(cudaErrorInvalidValue) : cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t size) {
    TRACED(cudaMalloc);
    return take(p, size, cudaMemoryTypeDevice);
}
cudaError_t cudaFree(void *p) {
    TRACED(cudaFree);
    return wait_until(last_tail[current]), give(p);
}
cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t s) { return take(p, size, cudaMemoryTypeDevice); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return give(p); }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { return *pool = (cudaMemPool_t)(size_t)(device + 1), cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr a, void *value) { return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr a, void *value) {
    return *(unsigned long long *)value = used[(size_t)pool - 1], cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t size) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *d, size_t n) { return cudaSuccess; }
cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) {
    TRACED(cudaHostAlloc);
    return take(p, size, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void *p) { return give(p); }
cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void *p) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = capacity();
    *free = *total - used[current] - others();
    return cudaSuccess;
}
int fake_cuda_reserve(int device, long long bytes) { /* for libcuda: memory that is mapped elsewhere */
    pthread_mutex_lock(&lock);
    int fits = bytes < 0 || used[device] + (size_t)bytes + others() <= capacity();
    if (fits) used[device] += bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}
size_t fake_cuda_used(int device) { return used[device]; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    pthread_mutex_lock(&lock);
    struct range *r = find(p);
    a->type = r ? r->type : cudaMemoryTypeUnregistered;
    a->device = r ? r->device : -2;
    if (r) a->devicePointer = (void *)p;
    if (r && r->type == cudaMemoryTypeHost) a->hostPointer = (void *)p;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static int kind_of(const void *p) {
    pthread_mutex_lock(&lock);
    struct range *r = find(p);
    int kind = !r ? FAKE_PAGEABLE : r->type == cudaMemoryTypeDevice ? FAKE_DEVICE : FAKE_PINNED;
    pthread_mutex_unlock(&lock);
    return kind;
}

/* 25 GB/s; what is in pageable memory the host waits for. */
static cudaError_t copied(void *to, const void *from, size_t n, cudaStream_t s) {
    struct fake_work work = {.kind = FAKE_COPY, .bytes = n, .from = kind_of(from), .to = kind_of(to)};
    queue(work, s, 1000 + (long long)n / 25);
    if (work.from == FAKE_PAGEABLE || work.to == FAKE_PAGEABLE) wait_until(stream_of(s)->tail);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) {
    TRACED(cudaMemcpyAsync);
    memmove(to, from, n);
    return copied(to, from, n, s);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
    TRACED(cudaMemcpy);
    memmove(to, from, n);
    copied(to, from, n, NULL);
    return wait_until(defaults[current].tail), cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int d, const void *from, int e, size_t n, cudaStream_t s) {
    return cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, s);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t tp, const void *from, size_t fp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t s) {
    for (size_t i = 0; i < h; i++) memmove((char *)to + i * tp, (const char *)from + i * fp, w);
    return copied(to, from, w * h, s);
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) {
    TRACED(cudaMemsetAsync);
    size_t page = 4096, skip = -(size_t)p & (page - 1), whole = n > skip ? (n - skip) & ~(page - 1) : 0;
    if (value == 0 && whole > 16 * page) { /* the kernel gives fresh zeros, and the memory back */
        memset(p, 0, skip);
        madvise((char *)p + skip, whole, MADV_DONTNEED);
        memset((char *)p + skip + whole, 0, n - skip - whole);
    } else
        memset(p, value, n);
    queue((struct fake_work){.kind = FAKE_SET, .bytes = n, .to = FAKE_DEVICE}, s, 1000 + (long long)n / 1000);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int value, size_t n) { return cudaMemsetAsync(p, value, n, NULL); }
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) {
    static char somewhere[1 << 20];
    return *p = somewhere, cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void *to, const void *from, size_t n, size_t at, enum cudaMemcpyKind k) { return cudaSuccess; }

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    static unsigned streams = 12;
    *s = calloc(1, sizeof **s);
    (*s)->id = __atomic_add_fetch(&streams, 1, __ATOMIC_RELAXED);
    (*s)->priority = priority;
    (*s)->device = current;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return free(s), cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { return *priority = stream_of(s)->priority, cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return stream_of(s)->tail > now() ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    TRACED(cudaStreamSynchronize);
    return wait_until(stream_of(s)->tail), cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    struct CUstream_st *stream = stream_of(s);
    if (e->capture && !e->capture->ended) stream->capture = e->capture;
    if (e->recorded && e->at > stream->tail) stream->tail = e->at;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = capture_of(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes,
#if CUDART_VERSION >= 13000
                                     const cudaGraphEdgeData **edges,
#endif
                                     size_t *count) {
    cudaStreamIsCapturing(s, status);
    if (id) *id = capture_of(s) ? capture_of(s)->id : 0;
    if (graph) *graph = capture_of(s);
    if (nodes) *nodes = NULL;
#if CUDART_VERSION >= 13000
    if (edges) *edges = NULL;
#endif
    if (count) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    static unsigned graphs;
    s->capture = calloc(1, sizeof *s->capture);
    s->capture->id = ++graphs;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    *graph = capture_of(s);
    if (!*graph) return fail(cudaErrorIllegalState);
    return (*graph)->ended = 1, cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *run, cudaGraph_t graph, unsigned long long flags) {
    return *run = (cudaGraphExec_t)graph, cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t run, cudaStream_t s) {
    TRACED(cudaGraphLaunch);
    struct CUgraph_st *graph = (struct CUgraph_st *)run;
    for (size_t i = 0; i < graph->count; i++) {
        struct fake_work work = graph->works[i];
        work.graph = graph->id;
        work.node = (unsigned long long)graph->id << 32 | (i + 1);
        queue(work, s, work.end);
    }
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { return *count = graph->count, cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t run) { return cudaSuccess; }
cudaError_t cudaUserObjectCreate(cudaUserObject_t *o, void *p, cudaHostFn_t gone, unsigned n, unsigned flags) { return *o = p, cudaSuccess; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t g, cudaUserObject_t o, unsigned n, unsigned flags) { return cudaSuccess; }
cudaError_t cudaUserObjectRelease(cudaUserObject_t o, unsigned n) { return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *data, unsigned flags) {
    return call(s, cudaSuccess, data), cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *data) { return call(data), cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    *e = calloc(1, sizeof **e);
    (*e)->timed = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return free(e), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    TRACED(cudaEventRecord);
    long long t = now(), tail = stream_of(s)->tail;
    e->at = tail > t ? tail : t;
    e->capture = capture_of(s);
    return e->recorded = 1, cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) {
    TRACED(cudaEventQuery);
    return e->recorded && e->at > now() ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    TRACED(cudaEventSynchronize);
    return e->recorded ? wait_until(e->at) : (void)0, cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    if (!start->timed || !end->timed || !start->recorded || !end->recorded) return fail(cudaErrorInvalidResourceHandle);
    if (cudaEventQuery(start) || cudaEventQuery(end)) return fail(cudaErrorNotReady);
    return *ms = (float)((end->at - start->at) / 1e6), cudaSuccess;
}

/* ---- kernels ---- */

static struct name { const char *host, *name; } *names;
static size_t names_used;

static __thread struct { dim3 grid, block; size_t shared; void *stream; } call;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    call.grid = grid, call.block = block, call.shared = shared, call.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = call.grid, *block = call.block, *shared = call.shared, *(void **)stream = call.stream;
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a, void *b,
                            void *c, void *d, int *e) {
    static size_t room;
    if (names_used == room) names = realloc(names, (room = room ? 2 * room : 1 << 14) * sizeof *names);
    names[names_used++] = (struct name){host, name};
}
static int by_host(const void *a, const void *b) {
    const char *x = ((const struct name *)a)->host, *y = ((const struct name *)b)->host;
    return (x > y) - (x < y);
}
const char *fake_cuda_name(const void *function) {
    static size_t sorted;
    if (sorted != names_used) qsort(names, sorted = names_used, sizeof *names, by_host);
    struct name key = {function, NULL}, *found = bsearch(&key, names, names_used, sizeof *names, by_host);
    return found ? found->name : NULL;
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext, size_t size, int constant, int global) {}
char __cudaInitModule(void **handle) { return 1; }
cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function) { return *out = (cudaKernel_t)function, cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void **args, size_t shared, cudaStream_t s) {
    return launch(FAKE_cudaLaunchKernel, f, g, b, s);
}
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **args, size_t shared, cudaStream_t s) {
    return launch(FAKE_cudaLaunchKernel, f, g, b, s);
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **args, size_t shared, cudaStream_t s) {
    return launch(FAKE_cudaLaunchKernel, f, g, b, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
    return launch(FAKE_cudaLaunchKernelExC, f, c->gridDim, c->blockDim, c->stream);
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int value) { return cudaSuccess; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute a, int value, int d) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->ptxVersion = a->binaryVersion = 80;
    a->maxDynamicSharedSizeBytes = 166912;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) { return *n = 4, cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) {
    return *n = 4, cudaSuccess;
}

/* ---- the driver's functions, which torch looks up by name ---- */

static int no_such_driver_function(void) { return 801; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    *function = driver ? dlsym(driver, symbol) : NULL;
    if (!*function) {
        if (getenv("FAKE_CUDA_VERBOSE")) fprintf(stderr, "fakecuda: driver: %s\n", symbol);
        *function = (void *)no_such_driver_function;
    }
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
