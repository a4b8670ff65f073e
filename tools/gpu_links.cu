/* gpu_links.cu - what the links of two GPUs of one host give (docs/kernels/links.md): copies by copy engines, from another
 * process' memory, a fold, pinned host memory. For a person to run; nothing links it.
 *
 *   gpu_links 01|10|both SECONDS BYTES    copies between GPU 0 and 1
 *   gpu_links ipc|fold|host 1 BYTES */
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define C(x)                                               \
    do {                                                   \
        cudaError_t e = (x);                               \
        if (e) {                                           \
            printf("%s: %s\n", #x, cudaGetErrorString(e)); \
            exit(1);                                       \
        }                                                  \
    } while (0)
static double now() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}
__global__ void fold(float *y, const float *a, const float *b, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n / 4; i += (size_t)gridDim.x * blockDim.x) {
        float4 v = ((float4 *)y)[i];
        const float4 p = ((const float4 *)a)[i], q = ((const float4 *)b)[i];
        v.x = (v.x + p.x) + q.x;
        v.y = (v.y + p.y) + q.y;
        v.z = (v.z + p.z) + q.z;
        v.w = (v.w + p.w) + q.w;
        ((float4 *)y)[i] = v;
    }
}
int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: gpu_links 01|10|both|ipc|fold|host SECONDS BYTES\n");
        return 2;
    }
    const char *mode = argv[1];
    const double secs = atof(argv[2]);
    const size_t n = (size_t)atof(argv[3]);
    if (!strcmp(mode, "ipc")) {
        int p[2], q[2];
        char c;
        cudaIpcMemHandle_t h;
        if (pipe(p) || pipe(q)) return 1;
        if (fork() == 0) {
            C(cudaSetDevice(1));
            if (read(p[0], &h, sizeof h) != sizeof h) _exit(1);
            void *src, *dst;
            C(cudaMalloc(&dst, n));
            double t = now();
            C(cudaIpcOpenMemHandle(&src, h, cudaIpcMemLazyEnablePeerAccess));
            printf("ipc open %.1f ms\n", (now() - t) * 1e3);
            cudaStream_t s;
            C(cudaStreamCreate(&s));
            for (int k = 0; k < 3; k++) C(cudaMemcpyAsync(dst, src, n, cudaMemcpyDefault, s));
            C(cudaStreamSynchronize(s));
            t = now();
            for (int k = 0; k < 20; k++) C(cudaMemcpyAsync(dst, src, n, cudaMemcpyDefault, s));
            C(cudaStreamSynchronize(s));
            printf("ipc pull %zu bytes: %.1f GB/s\n", n, 20.0 * n / (now() - t) / 1e9);
            fflush(stdout);
            size_t small = 4096;
            t = now();
            for (int k = 0; k < 1000; k++) {
                C(cudaMemcpyAsync(dst, src, small, cudaMemcpyDefault, s));
                C(cudaStreamSynchronize(s));
            }
            printf("ipc pull 4 KB: %.1f us\n", (now() - t) * 1e3);
            fflush(stdout);
            if (write(q[1], "x", 1) != 1) _exit(1);
            _exit(0);
        }
        C(cudaSetDevice(0));
        void *m;
        C(cudaMalloc(&m, n));
        C(cudaMemset(m, 1, n));
        C(cudaDeviceSynchronize());
        C(cudaIpcGetMemHandle(&h, m));
        if (write(p[1], &h, sizeof h) != sizeof h) return 1;
        if (read(q[0], &c, 1) != 1) return 1;
        wait(NULL);
        return 0;
    }
    if (!strcmp(mode, "fold")) {
        float *y, *a, *b;
        C(cudaMalloc((void **)&y, n));
        C(cudaMalloc((void **)&a, n));
        C(cudaMalloc((void **)&b, n));
        fold<<<1056, 512>>>(y, a, b, n / 4);
        C(cudaDeviceSynchronize());
        double t = now();
        for (int k = 0; k < 20; k++) fold<<<1056, 512>>>(y, a, b, n / 4);
        C(cudaDeviceSynchronize());
        printf("fold of two, %zu bytes: %.0f GB/s of traffic\n", n, 20.0 * 4 * n / (now() - t) / 1e9);
        return 0;
    }
    if (!strcmp(mode, "host")) {
        void *h, *d;
        C(cudaMalloc(&d, n));
        double t = now();
        C(cudaHostAlloc(&h, n, 0));
        printf("pinning %.2f GB: %.2f s\n", n / 1e9, now() - t);
        t = now();
        C(cudaMemcpy(h, d, n, cudaMemcpyDeviceToHost));
        printf("device to host: %.1f GB/s\n", n / (now() - t) / 1e9);
        return 0;
    }
    void *a[2], *b[2];
    cudaStream_t s[2];
    int can;
    for (int i = 0; i < 2; i++) {
        C(cudaSetDevice(i));
        C(cudaDeviceCanAccessPeer(&can, i, !i));
        if (!can) printf("no peer access %d\n", i);
        C(cudaDeviceEnablePeerAccess(!i, 0));
        C(cudaMalloc(&a[i], n));
        C(cudaMalloc(&b[i], n));
        C(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
    }
    const bool d01 = mode[0] == '0' || mode[0] == 'b', d10 = mode[0] == '1' || mode[0] == 'b';
    long done = 0;
    const double t = now();
    while (now() - t < secs) { // the receiver pulls
        for (int k = 0; k < 4; k++) {
            if (d01) C(cudaMemcpyPeerAsync(b[1], 1, a[0], 0, n, s[1]));
            if (d10) C(cudaMemcpyPeerAsync(b[0], 0, a[1], 1, n, s[0]));
        }
        C(cudaSetDevice(0));
        C(cudaStreamSynchronize(s[0]));
        C(cudaSetDevice(1));
        C(cudaStreamSynchronize(s[1]));
        done += 4;
    }
    printf("%s %zu bytes: %.1f GB/s each way\n", mode, n, (double)done * n / (now() - t) / 1e9);
}
