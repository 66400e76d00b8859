// Softmax of each row: one block a row, one read for the maximum and the sum together, one for the result.
#include "dtypes.cuh"

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Any block of whole warps: each warp leaves its value in shared memory, then every warp reduces all of them.
template <bool IS_MAX> __device__ __forceinline__ float block_reduce(float x) {
    __shared__ float partial[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = IS_MAX ? warp_max(x) : warp_sum(x);
    __syncthreads(); // the values of an earlier reduction have been read
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    float neutral = IS_MAX ? -INFINITY : 0.0f;
    x = lane < warps ? partial[lane] : neutral;
    return IS_MAX ? warp_max(x) : warp_sum(x);
}

template <typename T> __global__ void softmax_fwd(const T* x, T* y, long long N) {
    x += blockIdx.x * N;
    y += blockIdx.x * N;
    float m = -INFINITY, total = 0.0f;
    for (long long n = threadIdx.x; n < N; n += blockDim.x) {
        float value = to_float(x[n]), grown = fmaxf(m, value);
        float shift = grown == -INFINITY ? 0.0f : grown; // only -inf so far: no NaN from -inf + inf
        total = total * __expf(m - shift) + __expf(value - shift);
        m = grown;
    }
    float row_max = block_reduce<true>(m);
    float shift = row_max == -INFINITY ? 0.0f : row_max;
    float scale = 1.0f / block_reduce<false>(total * __expf(m - shift));
    for (long long n = threadIdx.x; n < N; n += blockDim.x) y[n] = from_float<T>(__expf(to_float(x[n]) - row_max) * scale);
}

template <typename T> __global__ void softmax_bwd(const T* y, const T* dy, T* dx, long long N) {
    y += blockIdx.x * N;
    dy += blockIdx.x * N;
    dx += blockIdx.x * N;
    float total = 0.0f;
    for (long long n = threadIdx.x; n < N; n += blockDim.x) total += to_float(y[n]) * to_float(dy[n]);
    float inner = block_reduce<false>(total);
    for (long long n = threadIdx.x; n < N; n += blockDim.x)
        dx[n] = from_float<T>(to_float(y[n]) * (to_float(dy[n]) - inner));
}
