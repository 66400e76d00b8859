// Row sums in a fixed order: whole rows, or a split reduction over chunks of rows.
#include "reduce.cuh"

template <typename T>
__global__ void sum_whole(const T* x, T* y, long long M, long long N, long long lanes) {
    sum_rows(x, y, M, N, N, lanes);
}

template <typename T>
__global__ void sum_chunks(const T* x, float* partial, long long M, long long N, long long chunk) {
    sum_rows(x, partial, M, N, chunk, blockDim.x);
}

template <typename T> __global__ void sum_partials(const float* partial, T* y, long long M, long long chunks) {
    sum_rows(partial, y, M, chunks, chunks, blockDim.x);
}
