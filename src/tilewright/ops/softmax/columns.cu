// Softmax over the middle dimension of x [outers, N, inners], or its logarithm: one read, one write. A thread takes PACK
// neighbors of VECTORS positions along the dimension; `across` threads take neighboring packs, the others of a block and
// the blocks of a cluster further positions. TRANSPOSED: the result is [outers, inners, N].
#include "rows.cuh"

// PACK neighboring elements, packed.
template <typename T, int PACK> struct Few {
    static constexpr int BYTES = PACK * sizeof(T), WORDS = BYTES < 4 ? 1 : BYTES / 4;
    unsigned at[WORDS];

    __device__ __forceinline__ float get(int n) const { return element<T>(at[n / PER_WORD<T>], n % PER_WORD<T>); }

    __device__ __forceinline__ void fill(float value) {
#pragma unroll
        for (int w = 0; w < WORDS; w++) at[w] = word_of<T>(value, value);
    }

    __device__ __forceinline__ void load(const T* from) {
        unsigned long long policy = evict_last_policy();
        if constexpr (BYTES == 16)
            asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                         : "=r"(at[0]), "=r"(at[1]), "=r"(at[2]), "=r"(at[3])
                         : "l"(from), "l"(policy));
        else if constexpr (BYTES == 8)
            asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                         : "=r"(at[0]), "=r"(at[1])
                         : "l"(from), "l"(policy));
        else if constexpr (BYTES == 4)
            asm volatile("ld.global.L1::no_allocate.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(at[0]) : "l"(from), "l"(policy));
        else
            asm volatile("{\n.reg .u16 half;\nld.global.L1::no_allocate.L2::cache_hint.u16 half, [%1], %2;\n"
                         "mov.b32 %0, {half, half};\n}" : "=r"(at[0]) : "l"(from), "l"(policy));
    }

    __device__ __forceinline__ void store(T* to) const {
        if constexpr (BYTES == 16)
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]));
        else if constexpr (BYTES == 8) asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(at[0]), "r"(at[1]));
        else if constexpr (BYTES == 4) asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(at[0]));
        else asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"((unsigned short)at[0]));
    }

    __device__ __forceinline__ void maximum(const Few& other) {
#pragma unroll
        for (int w = 0; w < WORDS; w++) at[w] = larger<T>(at[w], other.at[w]);
    }

    __device__ __forceinline__ Few from_lane(int apart) const {
        Few found;
#pragma unroll
        for (int w = 0; w < WORDS; w++) found.at[w] = __shfl_xor_sync(~0u, at[w], apart);
        return found;
    }

    // As RowPart's: the compiler would keep floats, and spill.
    __device__ __forceinline__ void keep_packed() {
#pragma unroll
        for (int w = 0; w < WORDS; w++) asm volatile("" : "+r"(at[w]));
    }

    // Replaces each element by `make(element, n)`.
    template <typename Make> __device__ __forceinline__ void change(Make make) {
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            float made[2] = {0.0f, 0.0f};
#pragma unroll
            for (int n = 0; n < PER_WORD<T>; n++)
                if (w * PER_WORD<T> + n < PACK) made[n] = make(element<T>(at[w], n), w * PER_WORD<T> + n);
            at[w] = word_of<T>(made[0], made[1]);
        }
    }
};

// The addresses of the elements of this thread.
template <int PACK, int VECTORS, int GROUP = 1> struct Column {
    long long outer, inner; // indices of the first of PACK neighbors
    int across, column;     // packs that the block takes, and which one of them is this thread's
    int step, begin, end;   // threads that share a column; positions of the block, and of the end of the dimension

    __device__ __forceinline__ Column(long long outers, int N, long long inners, int across) : across(across) {
        long long packs = inners / PACK, number = (long long)cluster_number() * across + threadIdx.x % across;
        outer = number / packs;
        inner = number % packs * PACK;
        column = threadIdx.x % across;
        step = blockDim.x / across;
        begin = cluster_rank() * step * VECTORS;
        end = outer < outers ? N : 0;
    }

    // Returns the position along the dimension of the thread's vector e. A thread takes GROUP neighbors.
    __device__ __forceinline__ int position(int e) const {
        return begin + (e / GROUP * step + threadIdx.x / across) * GROUP + e % GROUP;
    }
};

// Reduces PACK values of each column over the warps and blocks that share it; the lanes of a warp hold the same ones.
// `shared` has room for them for each warp, or each `across` threads if those are more, and for each block of a cluster.
template <typename Fold, int PACK> struct ColumnExchange {
    float2* shared;

    __device__ __forceinline__ ColumnExchange(float2* room) : shared(room) {
#if __CUDA_ARCH__ >= 900
        if (cluster_blocks() > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    }

    __device__ __forceinline__ void combine(float2 (&values)[PACK], int across) {
        int size = max(across, WARP), groups = blockDim.x / size, columns = across * PACK, column = threadIdx.x % across;
        if (groups == 1 && cluster_blocks() == 1) return;
        if (across >= WARP || threadIdx.x % WARP < across) {
#pragma unroll
            for (int p = 0; p < PACK; p++) shared[threadIdx.x / size * columns + column * PACK + p] = values[p];
        }
        __syncthreads();
#if __CUDA_ARCH__ >= 900
        if (cluster_blocks() > 1) {
            float2* of_blocks = shared + groups * columns;
            asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
            for (int c = threadIdx.x; c < columns; c += blockDim.x) {
                float2 value = Fold::over(shared + c, groups, columns);
                unsigned here = shared_address(&of_blocks[cluster_rank() * columns + c]);
                for (unsigned block = 0; block < cluster_blocks(); block++)
                    asm volatile("{\n"
                                 ".reg .b32 there;\n"
                                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                                 "st.shared::cluster.v2.f32 [there], {%2, %3};\n"
                                 "}" ::"r"(here),
                                 "r"(block), "f"(value.x), "f"(value.y)
                                 : "memory");
            }
            asm volatile("barrier.cluster.arrive.release.aligned;\n"
                         "barrier.cluster.wait.acquire.aligned;" ::: "memory");
            for (int c = threadIdx.x; c < columns; c += blockDim.x)
                shared[c] = Fold::over(of_blocks + c, cluster_blocks(), columns);
        } else
#endif
            for (int c = threadIdx.x; c < columns; c += blockDim.x) shared[c] = Fold::over(shared + c, groups, columns);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < PACK; p++) values[p] = shared[column * PACK + p];
    }
};

extern __shared__ __align__(16) float2 exchange_room[];

// Stores what the threads of a block hold to y [columns, N], through shared memory, so that accesses are along N.
template <typename T, int PACK, int VECTORS>
__device__ __forceinline__ void store_transposed(T* y, const Few<T, PACK> (&held)[VECTORS],
                                                 const Column<PACK, VECTORS, VECTOR<T>>& at, int N, long long all) {
    constexpr int GROUP = VECTOR<T>;
    T* room = (T*)exchange_room;
    int length = at.step * VECTORS, pitch = length + GROUP * max(1, 8 / at.across); // no two lanes in the same bank
    __syncthreads();
#pragma unroll
    for (int e = 0; e < VECTORS; e += GROUP) {
#pragma unroll
        for (int p = 0; p < PACK; p++) {
            Words words;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                unsigned low = held[e + w * PER_WORD<T>].at[p / PER_WORD<T>];
                unsigned high = held[e + (w + 1) * PER_WORD<T> - 1].at[p / PER_WORD<T>];
                words.at[w] = PER_WORD<T> == 1 ? low : __byte_perm(low, high, p % 2 ? 0x7632 : 0x5410);
            }
            *(Words*)(room + (p * at.across + at.column) * pitch + at.position(e) - at.begin) = words;
        }
    }
    __syncthreads();
    int columns = at.across * PACK, lane = threadIdx.x % WARP;
    long long first = (long long)cluster_number() * columns;
    length = min(length, N - at.begin);
    for (int c = threadIdx.x / WARP; c < columns; c += blockDim.x / WARP) {
        if (first + c >= all) break;
        T* to = y + (first + c) * N + at.begin;
        const T* from = room + (c % PACK * at.across + c / PACK) * pitch;
        if (N % GROUP == 0)
            for (int n = lane * GROUP; n < length; n += WARP * GROUP) store_words(to + n, *(const Words*)(from + n));
        else
            for (int n = lane; n < length; n += WARP) to[n] = from[n];
    }
}

template <typename T, int PACK, int VECTORS, bool TRANSPOSED, bool LOG>
__global__ void __launch_bounds__(512)
softmax_columns_fwd(const T* x, T* y, long long outers, long long N, long long inners, long long stride_xo,
                    long long stride_xn, long long across) {
    ColumnExchange<MaxAndSum, PACK> exchange(exchange_room);
    Column<PACK, VECTORS, TRANSPOSED ? VECTOR<T> : 1> at(outers, N, inners, across);
    x += at.outer * stride_xo + at.inner;
    Few<T, PACK> held[VECTORS], largest;
#pragma unroll
    for (int e = 0; e < VECTORS; e++) {
        held[e].fill(-INFINITY);
        if (at.position(e) < at.end) held[e].load(x + at.position(e) * stride_xn);
    }
    largest.fill(-INFINITY);
#pragma unroll
    for (int e = 0; e < VECTORS; e++) largest.maximum(held[e]);
    for (int step = WARP / 2; step >= across; step /= 2) largest.maximum(largest.from_lane(step));
    float2 found[PACK];
#pragma unroll
    for (int p = 0; p < PACK; p++) found[p] = {largest.get(p), 0.0f};
#pragma unroll
    for (int e = 0; e < VECTORS; e++) {
#pragma unroll
        for (int p = 0; p < PACK; p++) found[p].y += exp_approx(held[e].get(p) - MaxAndSum::shift(found[p].x));
    }
#pragma unroll
    for (int e = 0; e < VECTORS; e++) held[e].keep_packed();
    for (int step = WARP / 2; step >= across; step /= 2) {
#pragma unroll
        for (int p = 0; p < PACK; p++) found[p].y += __shfl_xor_sync(~0u, found[p].y, step);
    }
    exchange.combine(found, across);
#pragma unroll
    for (int p = 0; p < PACK; p++) found[p].y = LOG ? logf(found[p].y) : __fdividef(1.0f, found[p].y);
    if (!TRANSPOSED) y += at.outer * N * inners + at.inner;
#pragma unroll
    for (int e = 0; e < VECTORS; e++) {
        held[e].change([&](float x, int p) {
            return LOG ? x - found[p].x - found[p].y : exp_approx(x - found[p].x) * found[p].y;
        });
        if (!TRANSPOSED && at.position(e) < at.end) held[e].store(y + at.position(e) * inners);
    }
    if constexpr (TRANSPOSED) store_transposed<T, PACK, VECTORS>(y, held, at, N, outers * inners);
}

template <typename T, int PACK, int VECTORS, bool LOG>
__global__ void __launch_bounds__(512)
softmax_columns_bwd(const T* y, const T* dy, T* dx, long long outers, long long N, long long inners, long long across) {
    ColumnExchange<Sum, PACK> exchange(exchange_room);
    Column<PACK, VECTORS> at(outers, N, inners, across);
    long long start = at.outer * N * inners + at.inner;
    Few<T, PACK> outputs[VECTORS], grads[VECTORS];
#pragma unroll
    for (int e = 0; e < VECTORS; e++) {
        outputs[e].fill(0.0f);
        grads[e].fill(0.0f);
        if (at.position(e) < at.end) {
            outputs[e].load(y + start + at.position(e) * inners);
            grads[e].load(dy + start + at.position(e) * inners);
        }
    }
    float2 found[PACK];
#pragma unroll
    for (int p = 0; p < PACK; p++) found[p] = {0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < VECTORS; e++) {
#pragma unroll
        for (int p = 0; p < PACK; p++) found[p].x += LOG ? grads[e].get(p) : outputs[e].get(p) * grads[e].get(p);
    }
    for (int step = WARP / 2; step >= across; step /= 2) {
#pragma unroll
        for (int p = 0; p < PACK; p++) found[p].x += __shfl_xor_sync(~0u, found[p].x, step);
    }
    exchange.combine(found, across);
#pragma unroll
    for (int e = 0; e < VECTORS; e++) {
        grads[e].change([&](float grad, int p) {
            float out = outputs[e].get(p);
            return LOG ? grad - exp_approx(out) * found[p].x : out * (grad - found[p].x);
        });
        if (at.position(e) < at.end) grads[e].store(dx + start + at.position(e) * inners);
    }
}
