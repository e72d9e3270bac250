/* libcublas.so, and with -DLT libcublasLt.so: products that take time and compute nothing. */
#include <stdlib.h>
#include <string.h>
#include "device.h"

static const char *gemm(int type) { /* CUDA_R_16F, CUDA_R_16BF; else 32 bits, without tensor cores */
    return type == 2 ? "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_nn"
         : type == 14 ? "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn" : "ampere_sgemm_128x64_nn";
}

#ifndef LT
struct handle { void *stream; int math, pointers; };

int cublasCreate_v2(struct handle **h) { return *h = calloc(1, sizeof **h), 0; }
int cublasDestroy_v2(struct handle *h) { return free(h), 0; }
int cublasSetStream_v2(struct handle *h, void *stream) { return h->stream = stream, 0; }
int cublasSetMathMode(struct handle *h, int mode) { return h->math = mode, 0; }
int cublasGetMathMode(struct handle *h, int *mode) { return *mode = h->math, 0; }
int cublasSetPointerMode_v2(struct handle *h, int mode) { return h->pointers = mode, 0; }
int cublasGetPointerMode_v2(struct handle *h, int *mode) { return *mode = h->pointers, 0; }
int cublasSetWorkspace_v2(struct handle *h, void *p, size_t n) { return 0; }

int cublasGemmEx(struct handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int type) {
    return fake_cuda_product(gemm(type), 2.0 * m * n * k, h->stream), 0;
}
int cublasGemmStridedBatchedEx(struct handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int type,
                               int lda, long long sa, const void *b, int tb2, int ldb, long long sb, const void *beta, void *c,
                               int tc, int ldc, long long sc, int count) {
    return fake_cuda_product(gemm(type), 2.0 * m * n * k * count, h->stream), 0;
}
#define PRODUCT(name) \
    int name(struct handle *h, int ta, int tb, int m, int n, int k) { return fake_cuda_product(gemm(0), 2.0 * m * n * k, h->stream), 0; }
PRODUCT(cublasSgemmEx) PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2) PRODUCT(cublasCgemm_v2) PRODUCT(cublasZgemm_v2)
PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasDgemmStridedBatched)
#define SMALL(name) \
    int name(struct handle *h) { return fake_cuda_product("gemv", 0, h->stream), 0; }
SMALL(cublasSgemv_v2) SMALL(cublasDgemv_v2) SMALL(cublasDotEx) SMALL(cublasSdot_v2)
#else
struct result { unsigned long long algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };

struct layout { int type; unsigned long long rows, columns; };

size_t cublasLtGetVersion(void) { return 130100; }
#define MADE(name) \
    int name(void **made) { return *made = calloc(1, 64), 0; }
#define GONE(name) \
    int name(void *made) { return free(made), 0; }
#define NOTHING(name) \
    int name(void) { return 0; }
MADE(cublasLtMatmulDescCreate) MADE(cublasLtMatmulPreferenceCreate)
GONE(cublasLtMatmulDescDestroy) GONE(cublasLtMatrixLayoutDestroy) GONE(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulDescSetAttribute) NOTHING(cublasLtMatrixLayoutSetAttribute) NOTHING(cublasLtMatmulPreferenceSetAttribute)
int cublasLtMatrixLayoutCreate(struct layout **l, int type, unsigned long long rows, unsigned long long columns, long long ld) {
    *l = malloc(sizeof **l);
    **l = (struct layout){type, rows, columns};
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *preference, int asked,
                                   struct result *results, int *found) {
    memset(results, 0, sizeof *results);
    return *found = 1, 0;
}
int cublasLtMatmul(void *h, void *op, const void *alpha, const void *a, void *al, const void *b, void *bl, const void *beta,
                   const void *c, void *cl, void *d, void *dl, const void *algorithm, void *workspace, size_t size, void *stream) {
    const struct layout *left = al, *out = dl; /* operation left out: the product's inner size is left's other side */
    double inner = left->rows == out->rows ? left->columns : left->rows;
    return fake_cuda_product(gemm(left->type), 2.0 * out->rows * out->columns * inner, stream), 0;
}
#endif
