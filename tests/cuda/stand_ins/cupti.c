/* libcupti.so: the records that torch's profiler asks for, of what the fake runtime was told to do. */
#include <cupti.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "device.h"

union record {
    CUpti_Activity any;
    CUpti_ActivityKernel9 kernel;
    CUpti_ActivityMemcpy5 copy;
    CUpti_ActivityMemset4 set;
    CUpti_ActivityAPI api;
    CUpti_ActivityExternalCorrelation external;
};
enum { KINDS = 64, EXTERNALS = 8, DEPTH = 256 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static union record *records;
static size_t records_used, records_room;
static char enabled[KINDS];
static uint8_t *buffer;
static size_t room, most;
static CUpti_BuffersCallbackRequestFunc requested;
static CUpti_BuffersCallbackCompleteFunc completed;
static CUpti_TimestampCallbackFunc clock_of_client;
static long long base_ns;
static uint64_t base_client;
static __thread uint64_t external[EXTERNALS][DEPTH];
static __thread int depth[EXTERNALS];

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void keep(union record record) {
    if (!enabled[record.any.kind]) return;
    pthread_mutex_lock(&lock);
    if (!buffer && requested) requested(&buffer, &room, &most); /* without one the client does not ask for a flush */
    if (records_used == records_room) records = realloc(records, (records_room = records_room ? 2 * records_room : 4096) * sizeof *records);
    records[records_used++] = record;
    pthread_mutex_unlock(&lock);
}

static void on_api(int number, unsigned correlation, long long start, long long end) {
    for (int kind = 0; kind < EXTERNALS; kind++)
        if (depth[kind])
            keep((union record){.external = {.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, .externalKind = kind,
                                             .externalId = external[kind][depth[kind] - 1], .correlationId = correlation}});
    keep((union record){.api = {.kind = CUPTI_ACTIVITY_KIND_RUNTIME, .cbid = number, .start = start, .end = end,
                                .processId = getpid(), .threadId = (uint32_t)pthread_self(), .correlationId = correlation}});
}

static void on_work(const struct fake_work *w) {
    if (w->kind == FAKE_COPY)
        keep((union record){.copy = {.kind = CUPTI_ACTIVITY_KIND_MEMCPY, .srcKind = w->from, .dstKind = w->to, .bytes = w->bytes,
             .copyKind = w->from == FAKE_DEVICE ? (w->to == FAKE_DEVICE ? 8 : 2) : w->to == FAKE_DEVICE ? 1 : 9, .start = w->start,
             .end = w->end, .deviceId = w->device, .contextId = 1, .streamId = w->stream, .correlationId = w->correlation}});
    else if (w->kind == FAKE_SET)
        keep((union record){.set = {.kind = CUPTI_ACTIVITY_KIND_MEMSET, .bytes = w->bytes, .start = w->start, .end = w->end,
             .deviceId = w->device, .contextId = 1, .streamId = w->stream, .correlationId = w->correlation, .memoryKind = w->to}});
    else {
        const char *name = w->name ? w->name : fake_cuda_name(w->function);
        keep((union record){.kernel = {.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, .registersPerThread = 32, .start = w->start,
             .end = w->end, .deviceId = w->device, .contextId = 1, .streamId = w->stream, .gridX = w->grid[0], .gridY = w->grid[1],
             .gridZ = w->grid[2], .blockX = w->block[0], .blockY = w->block[1], .blockZ = w->block[2],
             .correlationId = w->correlation, .graphNodeId = w->node, .graphId = w->graph, .name = name ? name : "kernel without a name"}});
    }
}

static struct fake_tracer tracer = {on_api, on_work};

static size_t size_of(CUpti_ActivityKind kind) {
    return kind == CUPTI_ACTIVITY_KIND_MEMCPY ? sizeof(CUpti_ActivityMemcpy5)
         : kind == CUPTI_ACTIVITY_KIND_MEMSET ? sizeof(CUpti_ActivityMemset4)
         : kind == CUPTI_ACTIVITY_KIND_RUNTIME ? sizeof(CUpti_ActivityAPI)
         : kind == CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION ? sizeof(CUpti_ActivityExternalCorrelation)
         : sizeof(CUpti_ActivityKernel9);
}

CUptiResult cuptiSubscribe(CUpti_SubscriberHandle *s, CUpti_CallbackFunc call, void *data) { return *s = (void *)1, CUPTI_SUCCESS; }
CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle s) { return CUPTI_SUCCESS; }
CUptiResult cuptiEnableCallback(uint32_t on, CUpti_SubscriberHandle s, CUpti_CallbackDomain d, CUpti_CallbackId c) { return CUPTI_SUCCESS; }
CUptiResult cuptiEnableDomain(uint32_t on, CUpti_SubscriberHandle s, CUpti_CallbackDomain d) { return CUPTI_SUCCESS; }
CUptiResult cuptiFinalize(void) { return CUPTI_SUCCESS; }
CUptiResult cuptiGetVersion(uint32_t *version) { return *version = CUPTI_API_VERSION, CUPTI_SUCCESS; }
CUptiResult cuptiGetResultString(CUptiResult r, const char **text) { return *text = "result of the fake CUPTI", CUPTI_SUCCESS; }
CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain d, uint32_t cbid, const char **name) {
#define CASE(call, version) case FAKE_##call: *name = #call "_v" #version; break;
    switch (cbid) {
        CASE(cudaMalloc, 3020) CASE(cudaFree, 3020) CASE(cudaHostAlloc, 3020) CASE(cudaMemcpy, 3020) CASE(cudaMemcpyAsync, 3020)
        CASE(cudaMemsetAsync, 3020) CASE(cudaStreamSynchronize, 3020) CASE(cudaEventRecord, 3020) CASE(cudaEventSynchronize, 3020)
        CASE(cudaEventQuery, 3020) CASE(cudaDeviceSynchronize, 3020) CASE(cudaLaunchKernel, 7000) CASE(cudaLaunchKernelExC, 11060)
        CASE(cudaGraphLaunch, 10000)
        default: *name = "unknown";
    }
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute a, size_t *size, void *value) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId id, uint8_t on) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId id, uint8_t on) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t on) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext c, uint32_t stream, size_t *dropped) { return *dropped = 0, CUPTI_SUCCESS; }
CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc r, CUpti_BuffersCallbackCompleteFunc c) {
    return requested = r, completed = c, CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc clock) {
    clock_of_client = clock;
    base_ns = now();
    base_client = clock ? clock() : 0;
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
    if (kind < KINDS) enabled[kind] = 1;
    return fake_tracer = &tracer, CUPTI_SUCCESS;
}
CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
    if (kind < KINDS) enabled[kind] = 0;
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
    if (depth[kind] < DEPTH) external[kind][depth[kind]++] = id;
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t *id) {
    if (!depth[kind]) return CUPTI_ERROR_QUEUE_EMPTY;
    uint64_t last = external[kind][--depth[kind]];
    if (id) *id = last;
    return CUPTI_SUCCESS;
}

static void to_client(uint64_t *t, double rate) { /* the client's clock, along a line through two readings */
    if (clock_of_client) *t = base_client + (int64_t)(((long long)*t - base_ns) * rate);
}

CUptiResult cuptiActivityFlushAll(uint32_t flag) {
    pthread_mutex_lock(&lock);
    union record *all = records;
    size_t count = records_used, next = 0;
    records = NULL;
    records_used = records_room = 0;
    pthread_mutex_unlock(&lock);
    double rate = clock_of_client ? (double)(clock_of_client() - base_client) / (double)(now() - base_ns) : 1;
    while (requested && (buffer || next < count)) {
        size_t used = 0;
        if (!buffer) requested(&buffer, &room, &most);
        if (!buffer || room < sizeof *all) break;
        for (; next < count && used + sizeof *all <= room; next++) {
            union record *r = &all[next];
            switch (r->any.kind) {
            case CUPTI_ACTIVITY_KIND_MEMCPY: to_client(&r->copy.start, rate), to_client(&r->copy.end, rate); break;
            case CUPTI_ACTIVITY_KIND_MEMSET: to_client(&r->set.start, rate), to_client(&r->set.end, rate); break;
            case CUPTI_ACTIVITY_KIND_RUNTIME: to_client(&r->api.start, rate), to_client(&r->api.end, rate); break;
            case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: break;
            default: to_client(&r->kernel.start, rate), to_client(&r->kernel.end, rate);
            }
            memcpy(buffer + used, r, size_of(r->any.kind));
            used += size_of(r->any.kind);
        }
        uint8_t *full = buffer;
        buffer = NULL;
        completed(NULL, 0, full, room, used);
    }
    free(all);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, CUpti_Activity **record) {
    uint8_t *next = *record ? (uint8_t *)*record + size_of((*record)->kind) : buffer;
    if (next >= buffer + valid) return CUPTI_ERROR_MAX_LIMIT_REACHED;
    return *record = (CUpti_Activity *)next, CUPTI_SUCCESS;
}
