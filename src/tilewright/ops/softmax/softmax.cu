// Softmax of each row, or its logarithm. A thread block cluster holds the row: one read, one write.
#include "rows.cuh"

template <typename T, int VECTORS, bool LOG>
__global__ void __launch_bounds__(MAX_THREADS)
softmax_fwd(const T* x, T* y, long long N, long long per_block, long long align) {
    Exchange<> exchange;
    long long start = cluster_number() * N;
    RowPart<T, VECTORS> part(x + start, {(int)N, (int)per_block, (int)align});
    part.load(x + start, -INFINITY);
    exchange.open();
    float m = part.max(), local_shift = MaxAndSum::shift(m), total = 0.0f;
    part.keep_packed();
    part.each([&](float x, int) { total += exp_approx(x - local_shift); });
    part.keep_packed();
    float2 found = exchange.combine<MaxAndSum>({m, total});
    float scale = 1.0f / found.y, log_sum = logf(found.y);
    part.write(y + start, [=](float x, int) { return LOG ? x - found.x - log_sum : exp_approx(x - found.x) * scale; });
}

template <typename T, int VECTORS, bool LOG>
__global__ void __launch_bounds__(MAX_THREADS)
softmax_bwd(const T* y, const T* dy, T* dx, long long N, long long per_block, long long align) {
    Exchange<> exchange;
    long long start = cluster_number() * N;
    RowPart<T, VECTORS> outputs(y + start, {(int)N, (int)per_block, (int)align}), grads = outputs; // the same split
    outputs.load(y + start, 0.0f);
    grads.load(dy + start, 0.0f);
    exchange.open();
    float total = 0.0f;
    outputs.with(grads, [&](float out, float grad) { total += LOG ? grad : out * grad; });
    outputs.keep_packed();
    grads.keep_packed();
    total = exchange.combine<Sum>({total, 0.0f}).x;
    grads.write(dx + start, outputs, [=](float grad, float out) {
        return LOG ? grad - exp_approx(out) * total : out * (grad - total);
    });
}
