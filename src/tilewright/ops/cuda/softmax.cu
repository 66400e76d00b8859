// Softmax of each row, one block a row. The first pass finds the maximum and the sum together, the second writes.
// Both move 16 bytes a thread where the row allows it, one element elsewhere.
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

// A maximum of -inf means only -inf was seen: shifting by it would make NaN of -inf + inf.
__device__ __forceinline__ float shift_of(float m) { return m == -INFINITY ? 0.0f : m; }

template <typename T, int WIDTH> __device__ __forceinline__ void forward_row(const T* x, T* y, long long N) {
    using Part = Pack<T, WIDTH>;
    const Part* source = reinterpret_cast<const Part*>(x);
    float m = -INFINITY, total = 0.0f;
    for (long long n = threadIdx.x; n < N / WIDTH; n += blockDim.x) {
        Part part = source[n];
        float grown = m;
        for (int i = 0; i < WIDTH; i++) grown = fmaxf(grown, to_float(part.at[i]));
        float shift = shift_of(grown);
        total *= __expf(m - shift);
        for (int i = 0; i < WIDTH; i++) total += __expf(to_float(part.at[i]) - shift);
        m = grown;
    }
    float row_max = block_reduce<true>(m);
    float scale = 1.0f / block_reduce<false>(total * __expf(m - shift_of(row_max)));
    for (long long n = threadIdx.x; n < N / WIDTH; n += blockDim.x) {
        Part part = source[n];
        for (int i = 0; i < WIDTH; i++) part.at[i] = from_float<T>(__expf(to_float(part.at[i]) - row_max) * scale);
        reinterpret_cast<Part*>(y)[n] = part;
    }
}

template <typename T, int WIDTH> __device__ __forceinline__ void backward_row(const T* y, const T* dy, T* dx, long long N) {
    using Part = Pack<T, WIDTH>;
    const Part *outputs = reinterpret_cast<const Part*>(y), *grads = reinterpret_cast<const Part*>(dy);
    float total = 0.0f;
    for (long long n = threadIdx.x; n < N / WIDTH; n += blockDim.x) {
        Part a = outputs[n], b = grads[n];
        for (int i = 0; i < WIDTH; i++) total += to_float(a.at[i]) * to_float(b.at[i]);
    }
    float inner = block_reduce<false>(total);
    for (long long n = threadIdx.x; n < N / WIDTH; n += blockDim.x) {
        Part a = outputs[n], b = grads[n];
        for (int i = 0; i < WIDTH; i++) a.at[i] = from_float<T>(to_float(a.at[i]) * (to_float(b.at[i]) - inner));
        reinterpret_cast<Part*>(dx)[n] = a;
    }
}

template <typename T> __global__ void softmax_fwd(const T* x, T* y, long long N) {
    x += blockIdx.x * N;
    y += blockIdx.x * N;
    if (N % VECTOR<T> == 0 && aligned(x) && aligned(y))
        forward_row<T, VECTOR<T>>(x, y, N);
    else
        forward_row<T, 1>(x, y, N);
}

template <typename T> __global__ void softmax_bwd(const T* y, const T* dy, T* dx, long long N) {
    y += blockIdx.x * N;
    dy += blockIdx.x * N;
    dx += blockIdx.x * N;
    if (N % VECTOR<T> == 0 && aligned(y) && aligned(dy) && aligned(dx))
        backward_row<T, VECTOR<T>>(y, dy, dx, N);
    else
        backward_row<T, 1>(y, dy, dx, N);
}
