// Softmax, or its logarithm, of each row. A row is read once and written once: a cluster of blocks holds it in registers.
#include "rows.cuh"

template <typename T, int EACH, bool LOG, bool EDGES>
__global__ void __launch_bounds__(EACH > 8 ? MOST_THREADS / 2 : MOST_THREADS) softmax_fwd(const T* x, T* y, long long N) {
    constexpr bool KEEPS = !LOG && EACH * VECTOR<T> <= 32; // exponentials in registers; more of them are made again
    Exchange exchange;
    long long start = blockIdx.x / cluster_blocks() * N;
    RowPart<T, EACH, EDGES> part(x + start, N);
    part.load(x + start, -INFINITY);
    float m = part.max(), by = MaxAndSum::shift(m), total = 0.0f;
    float exps[EACH * VECTOR<T>];
    part.each([&](float x, int n) { total += exps[n] = exp_of(x - by); });
    if (!KEEPS) part.settle();
    float2 found = exchange.combine<MaxAndSum>({m, total});
    float scale = 1.0f / found.y, log_sum = logf(found.y), rescale = exp_of(by - MaxAndSum::shift(found.x)) * scale;
    part.map([&](float x, int n) {
        return LOG ? x - found.x - log_sum : KEEPS ? exps[n] * rescale : exp_of(x - found.x) * scale;
    });
    part.store(y + start);
}

template <typename T, int EACH, bool LOG, bool EDGES>
__global__ void __launch_bounds__(EACH > 4 ? MOST_THREADS / 2 : MOST_THREADS) softmax_bwd(const T* y, const T* dy, T* dx, long long N) {
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
    grads.map(outputs, [=](float grad, float out) { return LOG ? grad - exp_of(out) * total : out * (grad - total); });
    grads.store(dx + start);
}
