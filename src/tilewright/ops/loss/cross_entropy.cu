// Cross entropy of each row of logits with its target, and the gradient of the logits, which may overwrite them. A thread
// block cluster holds the row: one read, one write.
#include "rows.cuh"

#define NAN __int_as_float(0x7fc00000)

constexpr int NO_CLASS = -1, IGNORED = -2;

__device__ __forceinline__ int class_of(long long target, long long ignore_index, long long N) {
    return target == ignore_index ? IGNORED : target >= 0 && target < N ? (int)target : NO_CLASS;
}

// divisor, dloss and stats may be null. `stats` takes the log-sum-exp of each row and the derivative of the loss by it,
// from which backward can compute another gradient.
template <typename T, int VECTORS>
__global__ void __launch_bounds__(MAX_THREADS)
cross_entropy_both(const T* x, const long long* target, const float* divisor, const float* dloss, float* losses,
                   float* stats, T* dx, long long stride_dloss, long long M, long long N, long long ignore_index,
                   float z_loss, long long per_block, long long align) {
    Exchange<> exchange;
    int row = cluster_number();
    x += row * N;
    dx += row * N;
    RowPart<T, VECTORS> part(x, {(int)N, (int)per_block, (int)align});
    part.request(x, -INFINITY);
    exchange.open();
    // All other loads are issued before the exchange, which hides their latency.
    int y = class_of(target[row], ignore_index, N);
    bool is_counted = y != IGNORED, is_class = y >= 0, is_mine = is_class && part.holds(y);
    float at_target = is_mine ? to_float(x[y]) : 0.0f; // no other thread writes it
    part.settle(-INFINITY);
    float scale = (dloss ? dloss[row * stride_dloss] : 1.0f) / (divisor ? *divisor : 1.0f);
    float m = part.max(), local_shift = MaxAndSum::shift(m), total = 0.0f;
    part.keep_packed();
    part.each([&](float x, int) { total += exp_approx(x - local_shift); });
    part.keep_packed();
    float2 found = exchange.combine<MaxAndSum>({m, total});
    float shift = MaxAndSum::shift(found.x), lse = found.x + logf(found.y);
    float slope = is_class ? 1.0f + 2.0f * z_loss * lse : NAN;
    float factor = scale * slope / found.y;
    if (is_mine || (threadIdx.x == 0 && cluster_rank() == 0 && !is_class)) {
        losses[row] = !is_counted ? 0.0f : is_class ? lse - at_target + z_loss * lse * lse : NAN;
        if (stats) {
            stats[row] = is_counted ? lse : 0.0f;
            stats[M + row] = is_counted ? slope : 0.0f;
        }
    }
    part.write(dx, [=](float x, int) { return is_counted ? exp_approx(x - shift) * factor : 0.0f; });
    // After this thread's store of the vector that contains it.
    if (is_mine) dx[y] = from_float<T>(exp_approx(at_target - shift) * factor - scale);
}
