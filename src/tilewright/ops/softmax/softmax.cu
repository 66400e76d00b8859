// Softmax, or its logarithm, of each row. A row is read once and written once: a cluster of blocks holds it.
#include "rows.cuh"

template <typename T, int EACH, bool LOG>
__global__ void __launch_bounds__(MOST_THREADS)
softmax_fwd(const T* x, T* y, long long N, long long piece, long long align) {
    Exchange<> exchange;
    long long start = cluster_number() * N;
    RowPart<T, EACH> part(x + start, {(int)N, (int)piece, (int)align});
    part.load(x + start, -INFINITY);
    exchange.open();
    float m = part.max(), by = MaxAndSum::shift(m), total = 0.0f;
    part.settle();
    part.each([&](float x, int) { total += exp_of(x - by); });
    part.settle();
    float2 found = exchange.combine<MaxAndSum>({m, total});
    float scale = 1.0f / found.y, log_sum = logf(found.y);
    part.write(y + start, [=](float x, int) { return LOG ? x - found.x - log_sum : exp_of(x - found.x) * scale; });
}

template <typename T, int EACH, bool LOG>
__global__ void __launch_bounds__(MOST_THREADS)
softmax_bwd(const T* y, const T* dy, T* dx, long long N, long long piece, long long align) {
    Exchange<> exchange;
    long long start = cluster_number() * N;
    RowPart<T, EACH> outputs(y + start, {(int)N, (int)piece, (int)align}), grads = outputs; // cut alike
    outputs.load(y + start, 0.0f);
    grads.load(dy + start, 0.0f);
    exchange.open();
    float total = 0.0f;
    outputs.with(grads, [&](float out, float grad) { total += LOG ? grad : out * grad; });
    outputs.settle();
    grads.settle();
    total = exchange.combine<Sum>({total, 0.0f}).x;
    grads.write(dx + start, outputs, [=](float grad, float out) {
        return LOG ? grad - exp_of(out) * total : out * (grad - total);
    });
}
