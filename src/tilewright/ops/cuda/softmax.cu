// Softmax, or its logarithm, of each row. A row is read once and written once: a cluster of blocks holds it.
#include "rows.cuh"

template <typename T, int EACH, bool LOG, bool EDGES>
__global__ void __launch_bounds__(MOST_THREADS) softmax_fwd(const T* x, T* y, long long N) {
    Exchange exchange;
    long long start = blockIdx.x / cluster_blocks() * N;
    RowPart<T, EACH, EDGES> part(x + start, N);
    part.load(x + start, -INFINITY);
    float m = part.max(), by = MaxAndSum::shift(m), total = 0.0f;
    part.settle();
    part.each([&](float x, int) { total += exp_of(x - by); });
    part.settle();
    float2 found = exchange.combine<MaxAndSum>({m, total});
    float scale = 1.0f / found.y, log_sum = logf(found.y);
    part.write(y + start, [=](float x, int) { return LOG ? x - found.x - log_sum : exp_of(x - found.x) * scale; });
}

template <typename T, int EACH, bool LOG, bool EDGES>
__global__ void __launch_bounds__(MOST_THREADS) softmax_bwd(const T* y, const T* dy, T* dx, long long N) {
    Exchange exchange;
    long long start = blockIdx.x / cluster_blocks() * N;
    RowPart<T, EACH, EDGES> outputs(y + start, N), grads(dy + start, N);
    outputs.load(y + start, 0.0f);
    grads.load(dy + start, 0.0f);
    float total = 0.0f;
    outputs.with(grads, [&](float out, float grad) { total += LOG ? grad : out * grad; });
    outputs.settle();
    grads.settle();
    total = exchange.combine<Sum>({total, 0.0f}).x;
    grads.write(dx + start, outputs, [=](float grad, float out) {
        return LOG ? grad - exp_of(out) * total : out * (grad - total);
    });
}
