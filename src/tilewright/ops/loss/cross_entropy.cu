// Cross entropy of each row of logits with its target, and the gradient of it, which may take the place of the logits. A
// row is read once and written once: a cluster of blocks holds it.
#include "rows.cuh"

#define NOT_A_NUMBER __int_as_float(0x7fc00000)

constexpr int NO_CLASS = -1, IGNORED = -2;

__device__ __forceinline__ int class_of(long long target, long long ignored, long long N) {
    return target == ignored ? IGNORED : target >= 0 && target < N ? (int)target : NO_CLASS;
}

// Where a pointer is null there is nothing to divide or multiply by, or to leave: `stats` are the logarithm of the sum and
// the loss's slope in it, for another gradient later.
template <typename T, int EACH>
__global__ void __launch_bounds__(MOST_THREADS)
cross_entropy_both(const T* x, const long long* target, const float* divisor, const float* dloss, float* losses,
                   float* stats, T* dx, long long stride_dloss, long long M, long long N, long long ignored,
                   float z_loss, long long piece, long long align) {
    Exchange<> exchange;
    int row = cluster_number();
    x += row * N;
    dx += row * N;
    RowPart<T, EACH> part(x, {(int)N, (int)piece, (int)align});
    part.load(x, -INFINITY);
    exchange.open();
    // All that is read besides the row is asked for before the exchange: after it every thread would wait.
    int y = class_of(target[row], ignored, N);
    bool counts = y != IGNORED, is_class = y >= 0, is_mine = is_class && part.holds(y);
    float at_target = is_mine ? to_float(x[y]) : 0.0f; // nobody but this thread writes there
    float scale = (dloss ? dloss[row * stride_dloss] : 1.0f) / (divisor ? *divisor : 1.0f);
    float m = part.max(), by = MaxAndSum::shift(m), total = 0.0f;
    part.settle();
    part.each([&](float x, int) { total += exp_of(x - by); });
    part.settle();
    float2 found = exchange.combine<MaxAndSum>({m, total});
    float shift = MaxAndSum::shift(found.x), lse = found.x + logf(found.y);
    float slope = is_class ? 1.0f + 2.0f * z_loss * lse : NOT_A_NUMBER;
    float factor = scale * slope / found.y;
    if (is_mine || (threadIdx.x == 0 && cluster_rank() == 0 && !is_class)) {
        losses[row] = !counts ? 0.0f : is_class ? lse - at_target + z_loss * lse * lse : NOT_A_NUMBER;
        if (stats) {
            stats[row] = counts ? lse : 0.0f;
            stats[M + row] = counts ? slope : 0.0f;
        }
    }
    part.write(dx, [=](float x, int) { return counts ? exp_of(x - shift) * factor : 0.0f; });
    // After this thread's own store there.
    if (is_mine) dx[y] = from_float<T>(exp_of(at_target - shift) * factor - scale);
}
