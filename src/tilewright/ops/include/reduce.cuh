// Block-level sums.
#pragma once
#include "dtypes.cuh"

// Returns the sum of one value per thread over `lanes` threads, for any number of them. A thread with lane >= lanes only
// takes part in the barriers.
__device__ __forceinline__ float tree_sum(float value, float* shared, int lane, int lanes) {
    if (lane < lanes) shared[lane] = value;
    __syncthreads();
    // Each step adds the values from `half` on to those below it. With half = ceil(width / 2) there are never more above
    // than below, so each is added exactly once; an odd width leaves out the middle one. Rounded up, width reaches 1 from
    // any start. Within a step reads (from `half` on) and writes (below it) do not overlap.
    for (int width = lanes; width > 1;) {
        int half = (width + 1) / 2;
        if (lane < width - half) shared[lane] += shared[lane + half];
        __syncthreads();
        width = half;
    }
    return shared[0];
}

// Returns this lane's partial sum of x[0..N), for any alignment of x: by elements before the first 16-byte boundary and
// after the last, by 16-byte loads between them.
template <typename T> __device__ __forceinline__ float lane_sum(const T* x, long long N, int lane, int lanes) {
    long long head = (16 - (size_t)x % 16) % 16 / sizeof(T);
    if (head > N) head = N;
    long long packs = (N - head) / VECTOR<T>, tail = head + packs * VECTOR<T>;
    const Pack<T>* middle = (const Pack<T>*)(x + head);
    float total = 0.0f;
    for (long long n = lane; n < head; n += lanes) total += to_float(x[n]);
#pragma unroll 4
    for (long long n = lane; n < packs; n += lanes) {
        Pack<T> pack = middle[n];
#pragma unroll
        for (int v = 0; v < VECTOR<T>; ++v) total += to_float(pack.at[v]);
    }
    for (long long n = tail + lane; n < N; n += lanes) total += to_float(x[n]);
    return total;
}

// Sums each row of x [M, N], or its chunks if the grid has several blocks in y. A group of `lanes` threads takes a row;
// the block may have any size >= lanes.
template <typename In, typename Out>
__device__ __forceinline__ void sum_rows(const In* x, Out* out, long long M, long long N, long long chunk, int lanes) {
    extern __shared__ float shared[]; // one per thread
    int groups = blockDim.x / lanes, group = threadIdx.x / lanes;
    int lane = group < groups ? threadIdx.x % lanes : lanes;
    long long row = (long long)blockIdx.x * groups + group, start = blockIdx.y * chunk;
    bool is_active = group < groups && row < M;
    float total = is_active ? lane_sum(x + row * N + start, N - start < chunk ? N - start : chunk, lane, lanes) : 0.0f;
    total = tree_sum(total, shared + group * lanes, lane, lanes);
    if (is_active && lane == 0) out[row * gridDim.y + blockIdx.y] = from_float<Out>(total);
}
