// y = x wᵀ + bias, then ReLU if `relu`. A block computes a 128 x 128 tile of y: 32 columns of x and w at a time are
// staged in shared memory as fp32, and each of 256 threads accumulates 8 x 8 sums in registers.
#include "dtypes.cuh"

constexpr int TILE = 128, DEPTH = 32, THREADS = 256, SIDE = 16, SUMS = TILE / SIDE;
constexpr int STRIDE = DEPTH + 4; // padded: eight rows of a float4 column are then in eight different groups of banks

// Loads rows [row, row + TILE) and columns [k, k + DEPTH) of `from` [count, K]; zero out of bounds.
template <typename T>
__device__ __forceinline__ void load_tile(
    float (&tile)[TILE][STRIDE], const T* from, long long row, long long count, long long k, long long K, bool vectorized
) {
    constexpr int PACKS = DEPTH / VECTOR<T>;
    for (int i = threadIdx.x; i < TILE * PACKS; i += THREADS) {
        int r = i / PACKS, c = i % PACKS * VECTOR<T>;
        const T* source = from + (row + r) * K + k + c;
        long long left = row + r < count ? K - k - c : 0;
        Pack<T> pack;
        if (vectorized && left > 0)
            pack = *reinterpret_cast<const Pack<T>*>(source);
        else
            for (int j = 0; j < VECTOR<T>; j++) pack.at[j] = j < left ? source[j] : from_float<T>(0.0f);
        for (int j = 0; j < VECTOR<T>; j++) tile[r][c + j] = to_float(pack.at[j]);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) linear_fwd(
    const T* x, const T* weight, const T* bias, T* y, long long M, long long N, long long K, long long relu
) {
    alignas(16) __shared__ float x_tile[TILE][STRIDE], weight_tile[TILE][STRIDE];
    long long tiles_n = (N + TILE - 1) / TILE;
    long long start_m = blockIdx.x / tiles_n * TILE, start_n = blockIdx.x % tiles_n * TILE;
    int thread_m = threadIdx.x / SIDE, thread_n = threadIdx.x % SIDE;
    // Then every 16-byte access is aligned, and none crosses the end of a row.
    bool vectorized = K % VECTOR<T> == 0 && is_aligned(x) && is_aligned(weight);

    float sum[SUMS][SUMS] = {};
    for (long long k = 0; k < K; k += DEPTH) {
        load_tile(x_tile, x, start_m, M, k, K, vectorized);
        load_tile(weight_tile, weight, start_n, N, k, K, vectorized);
        __syncthreads();
        for (int c = 0; c < DEPTH; c += 4) {
            float4 a[SUMS];
#pragma unroll
            for (int i = 0; i < SUMS; i++) a[i] = *reinterpret_cast<float4*>(&x_tile[thread_m + SIDE * i][c]);
#pragma unroll
            for (int j = 0; j < SUMS; j++) {
                float4 b = *reinterpret_cast<float4*>(&weight_tile[thread_n + SIDE * j][c]);
#pragma unroll
                for (int i = 0; i < SUMS; i++) { // one by one, so that each is a single FMA
                    sum[i][j] += a[i].x * b.x;
                    sum[i][j] += a[i].y * b.y;
                    sum[i][j] += a[i].z * b.z;
                    sum[i][j] += a[i].w * b.w;
                }
            }
        }
        __syncthreads(); // every thread has read the tiles
    }

#pragma unroll
    for (int j = 0; j < SUMS; j++) {
        long long n = start_n + thread_n + SIDE * j;
        if (n >= N) continue;
        float b = to_float(bias[n]);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            long long m = start_m + thread_m + SIDE * i;
            float value = sum[i][j] + b;
            if (m < M) y[m * N + n] = from_float<T>(relu && value < 0.0f ? 0.0f : value);
        }
    }
}
