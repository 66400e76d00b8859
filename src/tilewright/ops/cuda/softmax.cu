// Softmax, or its logarithm, of each row. A row is read once and written once: a cluster of blocks holds it. Each row has
// a cluster; or, as a stream of rows that are whole packs, clusters stay, with the next rows on their way.
#include "rows.cuh"

template <bool LOG, typename Part, typename T>
__device__ __forceinline__ void softmax(Part& part, Exchange<>& exchange, T* y) {
    float m = part.max(), by = MaxAndSum::shift(m), total = 0.0f;
    part.settle();
    part.each([&](float x, int) { total += exp_of(x - by); });
    part.settle();
    float2 found = exchange.combine<MaxAndSum>({m, total});
    float scale = 1.0f / found.y, log_sum = logf(found.y);
    part.write(y, [=](float x, int) { return LOG ? x - found.x - log_sum : exp_of(x - found.x) * scale; });
}

template <bool LOG, typename Part, typename T>
__device__ __forceinline__ void gradient(Part& outputs, Part& grads, Exchange<>& exchange, T* dx) {
    float total = 0.0f;
    outputs.with(grads, [&](float out, float grad) { total += LOG ? grad : out * grad; });
    outputs.settle();
    grads.settle();
    total = exchange.combine<Sum>({total, 0.0f}).x;
    grads.write(dx, outputs, [=](float grad, float out) {
        return LOG ? grad - exp_of(out) * total : out * (grad - total);
    });
}

template <typename T, int EACH, bool LOG>
__global__ void __launch_bounds__(MOST_THREADS) softmax_fwd(const T* x, T* y, long long, long long N, long long piece, long long align) {
    Exchange<> exchange;
    long long start = cluster_number() * N;
    RowPart<T, EACH, true> part(x + start, {(int)N, (int)piece, (int)align});
    part.load(x + start, -INFINITY);
    exchange.open();
    softmax<LOG>(part, exchange, y + start);
}

template <typename T, int EACH, int STAGES, bool LOG>
__global__ void __launch_bounds__(MOST_THREADS) softmax_fwd_stream(const T* x, T* y, long long M, long long N, long long piece, long long align) {
    Exchange<> exchange;
    RowPart<T, EACH, false> part(x, {(int)N, (int)piece, (int)align});
    Stream<T, 1, STAGES> stream({x}, M, N, part.before(), part.length(), launch_memory());
    exchange.open();
    while (stream.has_row()) {
        long long start = stream.row * N;
        stream.wait();
        part.take(stream.piece(0), -INFINITY);
        stream.advance();
        softmax<LOG>(part, exchange, y + start);
    }
}

template <typename T, int EACH, bool LOG>
__global__ void __launch_bounds__(MOST_THREADS)
softmax_bwd(const T* y, const T* dy, T* dx, long long, long long N, long long piece, long long align) {
    Exchange<> exchange;
    long long start = cluster_number() * N;
    RowPart<T, EACH, true> outputs(y + start, {(int)N, (int)piece, (int)align}), grads = outputs; // cut alike
    outputs.load(y + start, 0.0f);
    grads.load(dy + start, 0.0f);
    exchange.open();
    gradient<LOG>(outputs, grads, exchange, dx + start);
}

template <typename T, int EACH, int STAGES, bool LOG>
__global__ void __launch_bounds__(MOST_THREADS)
softmax_bwd_stream(const T* y, const T* dy, T* dx, long long M, long long N, long long piece, long long align) {
    Exchange<> exchange;
    RowPart<T, EACH, false> outputs(y, {(int)N, (int)piece, (int)align}), grads = outputs;
    Stream<T, 2, STAGES> stream({y, dy}, M, N, outputs.before(), outputs.length(), launch_memory());
    exchange.open();
    while (stream.has_row()) {
        long long start = stream.row * N;
        stream.wait();
        outputs.take(stream.piece(0), 0.0f);
        grads.take(stream.piece(1), 0.0f);
        stream.advance();
        gradient<LOG>(outputs, grads, exchange, dx + start);
    }
}
