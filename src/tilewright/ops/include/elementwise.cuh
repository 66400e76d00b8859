// Elementwise operations.
#pragma once
#include "dtypes.cuh"

constexpr int PACKS = 2; // 16-byte loads in flight per thread and input

// out[n] = f({in[0][n], in[1][n], ...}), for any grid and block. Full blocks of aligned tensors use 16-byte accesses,
// with all loads before the first use; the rest is accessed by elements.
template <int INPUTS, typename T, typename F>
__device__ __forceinline__ void map(const T* const (&in)[INPUTS], T* out, long long N, F f) {
    bool vectorized = is_aligned(out);
    for (int i = 0; i < INPUTS; ++i) vectorized &= is_aligned(in[i]);
    long long width = (long long)blockDim.x * PACKS * VECTOR<T>;
    for (long long start = blockIdx.x * width; start < N; start += gridDim.x * width) {
        if (vectorized && start + width <= N) {
            Pack<T> packs[PACKS][INPUTS];
#pragma unroll
            for (int p = 0; p < PACKS; ++p)
#pragma unroll
                for (int i = 0; i < INPUTS; ++i)
                    packs[p][i] = load_pack((const Pack<T>*)(in[i] + start) + p * blockDim.x + threadIdx.x);
#pragma unroll
            for (int p = 0; p < PACKS; ++p) {
                Pack<T> result;
#pragma unroll
                for (int v = 0; v < VECTOR<T>; ++v) {
                    float values[INPUTS];
#pragma unroll
                    for (int i = 0; i < INPUTS; ++i) values[i] = to_float(packs[p][i].at[v]);
                    result.at[v] = from_float<T>(f(values));
                }
                ((Pack<T>*)(out + start))[p * blockDim.x + threadIdx.x] = result;
            }
        } else {
            long long end = start + width < N ? start + width : N;
            for (long long n = start + threadIdx.x; n < end; n += blockDim.x) {
                float values[INPUTS];
#pragma unroll
                for (int i = 0; i < INPUTS; ++i) values[i] = to_float(in[i][n]);
                out[n] = from_float<T>(f(values));
            }
        }
    }
}
