// Dot product, as a split reduction in a fixed order: one partial sum per block, then one block adds them.
#include "reduce.cuh"

template <typename T>
__global__ void dot_chunks(const T* x, const T* y, float* partial, long long N, long long chunk) {
    extern __shared__ float shared[]; // one per thread
    long long start = blockIdx.x * chunk, count = N - start < chunk ? N - start : chunk;
    x += start;
    y += start;
    long long packs = is_aligned(x) && is_aligned(y) ? count / VECTOR<T> : 0;
    float total = 0.0f;
#pragma unroll 4
    for (long long n = threadIdx.x; n < packs; n += blockDim.x) {
        Pack<T> a = ((const Pack<T>*)x)[n], b = ((const Pack<T>*)y)[n];
#pragma unroll
        for (int v = 0; v < VECTOR<T>; ++v) total += to_float(a.at[v]) * to_float(b.at[v]);
    }
    for (long long n = packs * VECTOR<T> + threadIdx.x; n < count; n += blockDim.x)
        total += to_float(x[n]) * to_float(y[n]);
    total = tree_sum(total, shared, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

template <typename T> __global__ void dot_partials(const float* partial, T* out, long long chunks) {
    sum_rows(partial, out, 1, chunks, chunks, blockDim.x);
}
