// Softmax of each row, or its logarithm: one read, one write. A thread block cluster holds the row, or with LANES, that many
// threads of a warp do. SHIFTED: rows that are read may differ in their alignment from those that are written.
#include "rows.cuh"

constexpr int NO_ROW = -1024; // a number of elements: nothing is loaded or stored

template <int LANES> __device__ __forceinline__ long long row_number() {
    return LANES ? (long long)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES : cluster_number();
}

template <typename T, int VECTORS, int LANES, bool SHIFTED, bool LOG>
__global__ void __launch_bounds__(LANES ? 256 : MAX_THREADS)
softmax_fwd(const T* x, T* y, long long M, long long N, long long stride_xm, long long per_block, long long align) {
    long long row = row_number<LANES>();
    x += row * stride_xm;
    y += row * N;
    RowPart<T, VECTORS, LANES, SHIFTED> part(y, {row < M ? (int)N : NO_ROW, (int)per_block, (int)align});
    float m, total = 0.0f;
    if constexpr (LANES > 0) {
        part.request(x, -INFINITY);
        part.settle(-INFINITY);
        m = warp_max(part.max(), LANES);
        part.each([&](float x, int) { total += exp_approx(x - m); });
        total = warp_sum(total, LANES);
    } else {
        Exchange<> exchange;
        part.request(x, -INFINITY);
        exchange.open();
        part.settle(-INFINITY);
        m = part.max();
        float shift = MaxAndSum::shift(m);
        part.keep_packed();
        part.each([&](float x, int) { total += exp_approx(x - shift); });
        part.keep_packed();
        float2 found = exchange.combine<MaxAndSum>({m, total});
        m = found.x, total = found.y;
    }
    float scale = 1.0f / total, log_sum = logf(total);
    part.write(y, [=](float x, int) { return LOG ? x - m - log_sum : exp_approx(x - m) * scale; });
}

template <typename T, int VECTORS, int LANES, bool SHIFTED, bool LOG>
__global__ void __launch_bounds__(LANES ? 256 : MAX_THREADS)
softmax_bwd(const T* y, const T* dy, T* dx, long long M, long long N, long long per_block, long long align) {
    long long row = row_number<LANES>();
    y += row * N;
    dy += row * N;
    dx += row * N;
    RowPart<T, VECTORS, LANES, SHIFTED> outputs(dx, {row < M ? (int)N : NO_ROW, (int)per_block, (int)align});
    RowPart<T, VECTORS, LANES, SHIFTED> grads = outputs;
    float total = 0.0f;
    auto add = [&](float out, float grad) { total += LOG ? grad : out * grad; };
    if constexpr (LANES > 0) {
        outputs.request(y, 0.0f);
        grads.request(dy, 0.0f);
        outputs.settle(0.0f);
        grads.settle(0.0f);
        outputs.with(grads, add);
        total = warp_sum(total, LANES);
    } else {
        Exchange<> exchange;
        outputs.request(y, 0.0f);
        grads.request(dy, 0.0f);
        exchange.open();
        outputs.settle(0.0f);
        grads.settle(0.0f);
        outputs.with(grads, add);
        outputs.keep_packed();
        grads.keep_packed();
        total = exchange.combine<Sum>({total, 0.0f}).x;
    }
    grads.write(dx, outputs, [=](float grad, float out) {
        return LOG ? grad - exp_approx(out) * total : out * (grad - total);
    });
}

extern __shared__ __align__(16) unsigned char tiles[];

// Calls `use(index, is_valid)` with the index of each row of a tile, the same number of times for all LANES of a row.
template <int LANES, typename Use> __device__ __forceinline__ void each_row(int rows, Use use) {
    for (int start = 0; start < rows; start += blockDim.x / LANES) {
        int row = start + threadIdx.x / LANES;
        use(row, row < rows);
    }
}

// Short rows that start inside vectors: a block copies `rows` of them to shared memory as contiguous vectors. There, LANES
// threads take a row, of which each holds EACH elements.
template <typename T, int EACH, int LANES, bool LOG>
__global__ void __launch_bounds__(128) softmax_short_fwd(const T* x, T* y, long long M, long long N, long long rows) {
    long long first = blockIdx.x * rows;
    int count = min((long long)rows, M - first), lane = threadIdx.x % LANES;
    T* tile = (T*)tiles;
    copy_in(tile, x + first * N, count * N);
    wait_for_copies();
    each_row<LANES>(count, [&](int row, bool is_valid) {
        T* at = tile + row * (int)N;
        int end = is_valid ? N : 0;
        float held[EACH], m = -INFINITY, total = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int n = e * LANES + lane;
            held[e] = n < end ? to_float(at[n]) : -INFINITY;
            m = fmaxf(m, held[e]);
        }
        m = warp_max(m, LANES);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            float value = exp_approx(held[e] - m);
            total += value;
            if (!LOG) held[e] = value;
        }
        total = warp_sum(total, LANES);
        float scale = LOG ? logf(total) : 1.0f / total;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int n = e * LANES + lane;
            if (n < end) at[n] = from_float<T>(LOG ? held[e] - m - scale : held[e] * scale);
        }
    });
    __syncthreads();
    copy_out(y + first * N, tile, count * N);
}

template <typename T, int EACH, int LANES, bool LOG>
__global__ void __launch_bounds__(128)
softmax_short_bwd(const T* y, const T* dy, T* dx, long long M, long long N, long long rows) {
    long long first = blockIdx.x * rows;
    int count = min((long long)rows, M - first), lane = threadIdx.x % LANES;
    T *outputs = (T*)tiles, *grads = outputs + rows * N;
    copy_in(outputs, y + first * N, count * N);
    copy_in(grads, dy + first * N, count * N);
    wait_for_copies();
    each_row<LANES>(count, [&](int row, bool is_valid) {
        int start = row * (int)N, end = is_valid ? N : 0;
        float out[EACH], grad[EACH], total = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int n = e * LANES + lane;
            out[e] = n < end ? to_float(outputs[start + n]) : 0.0f;
            grad[e] = n < end ? to_float(grads[start + n]) : 0.0f;
            total += LOG ? grad[e] : out[e] * grad[e];
        }
        total = warp_sum(total, LANES);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int n = e * LANES + lane;
            float value = LOG ? grad[e] - exp_approx(out[e]) * total : out[e] * (grad[e] - total);
            if (n < end) grads[start + n] = from_float<T>(value);
        }
    });
    __syncthreads();
    copy_out(dx + first * N, grads, count * N);
}
