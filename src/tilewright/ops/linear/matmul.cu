// c = a b, in fp32: the two first kernels that everyone writes. a [M, K] and b [K, N] have any strides, c [M, N] is
// contiguous.
#include "dtypes.cuh"

constexpr int SIDE = 16, THREADS = SIDE * SIDE;
constexpr int TILE = 64, DEPTH = 16, SUMS = TILE / SIDE;

// One thread per element of c: every element of a is loaded N times, and every element of b M times.
template <typename T>
__global__ void __launch_bounds__(THREADS) matmul_naive(
    const T* a, const T* b, T* c, long long M, long long N, long long K, long long stride_am, long long stride_ak,
    long long stride_bk, long long stride_bn
) {
    long long m = blockIdx.x * (long long)SIDE + threadIdx.x / SIDE, n = blockIdx.y * SIDE + threadIdx.x % SIDE;
    if (m >= M || n >= N) return;
    float sum = 0.0f;
    for (long long k = 0; k < K; k++)
        sum += to_float(a[m * stride_am + k * stride_ak]) * to_float(b[k * stride_bk + n * stride_bn]);
    c[m * N + n] = from_float<T>(sum);
}

// A block computes a TILE x TILE tile of c. Slices of a and b, DEPTH deep, pass through shared memory, so that every
// element is loaded once per tile; each thread keeps SUMS x SUMS sums in registers, so that every value read from shared
// memory is used SUMS times.
template <typename T>
__global__ void __launch_bounds__(THREADS) matmul_tiled(
    const T* a, const T* b, T* c, long long M, long long N, long long K, long long stride_am, long long stride_ak,
    long long stride_bk, long long stride_bn
) {
    __shared__ float a_tile[DEPTH][TILE + 1], b_tile[DEPTH][TILE + 1]; // padded: either index may be the fast one
    long long start_m = blockIdx.x * (long long)TILE, start_n = blockIdx.y * (long long)TILE;
    int thread_m = threadIdx.x / SIDE, thread_n = threadIdx.x % SIDE;
    bool a_by_rows = stride_ak == 1, b_by_rows = stride_bn == 1;

    float sums[SUMS][SUMS] = {};
    for (long long start_k = 0; start_k < K; start_k += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) { // neighbours load neighbours: coalesced
            int m = a_by_rows ? i / DEPTH : i % TILE, k = a_by_rows ? i % DEPTH : i / TILE;
            bool inside = start_m + m < M && start_k + k < K;
            a_tile[k][m] = inside ? to_float(a[(start_m + m) * stride_am + (start_k + k) * stride_ak]) : 0.0f;
        }
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
            int n = b_by_rows ? i % TILE : i / DEPTH, k = b_by_rows ? i / TILE : i % DEPTH;
            bool inside = start_n + n < N && start_k + k < K;
            b_tile[k][n] = inside ? to_float(b[(start_k + k) * stride_bk + (start_n + n) * stride_bn]) : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < DEPTH; k++) {
            float a_values[SUMS], b_values[SUMS];
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                a_values[i] = a_tile[k][thread_m + SIDE * i];
                b_values[i] = b_tile[k][thread_n + SIDE * i];
            }
#pragma unroll
            for (int i = 0; i < SUMS; i++)
#pragma unroll
                for (int j = 0; j < SUMS; j++) sums[i][j] += a_values[i] * b_values[j];
        }
        __syncthreads(); // every thread has read the slices
    }

#pragma unroll
    for (int i = 0; i < SUMS; i++)
#pragma unroll
        for (int j = 0; j < SUMS; j++) {
            long long m = start_m + thread_m + SIDE * i, n = start_n + thread_n + SIDE * j;
            if (m < M && n < N) c[m * N + n] = from_float<T>(sums[i][j]);
        }
}
