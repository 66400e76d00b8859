// A row in the registers of a thread block cluster: each thread holds VECTORS vectors of 16 bytes, each block a part of
// the row, and the blocks exchange partial results through distributed shared memory. A single block is a cluster of
// one, on any GPU.
#pragma once
#include "dtypes.cuh"

constexpr int MAX_THREADS = 1024, MAX_BLOCKS = 16, WARP = 32;

__device__ __forceinline__ float warp_max(float value, int lanes = WARP) {
    for (int step = lanes / 2; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

__device__ __forceinline__ float warp_sum(float value, int lanes = WARP) {
    for (int step = lanes / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return (unsigned)__cvta_generic_to_shared(pointer);
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ unsigned cluster_blocks() {
    unsigned blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}
#else
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ unsigned cluster_blocks() { return 1; }
#endif

// %clusterid is computed through a float, and wrong from 2^24 on. Cluster sizes are powers of two.
__device__ __forceinline__ unsigned cluster_number() { return blockIdx.x >> (31 - __clz(cluster_blocks())); }
__device__ __forceinline__ unsigned clusters() { return gridDim.x >> (31 - __clz(cluster_blocks())); }

// The blocks that hold a row: a cluster, or a single block, which is then known at compile time.
template <bool ONE_BLOCK> struct RowBlocks {
    static __device__ __forceinline__ unsigned blocks() { return ONE_BLOCK ? 1 : cluster_blocks(); }
    static __device__ __forceinline__ unsigned rank() { return ONE_BLOCK ? 0 : cluster_rank(); }
    static __device__ __forceinline__ unsigned number() { return ONE_BLOCK ? blockIdx.x : cluster_number(); }
    static __device__ __forceinline__ unsigned count() { return ONE_BLOCK ? gridDim.x : clusters(); }
};

__device__ __forceinline__ void init_barrier(const void* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Makes the barrier's phase wait for that many bytes.
__device__ __forceinline__ void expect_bytes(const void* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}

__device__ __forceinline__ void wait_for(const void* barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again_%=:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra again_%=;\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
#endif
}

// Exchanges values between the warps of a cluster, any number of times. Every block has slots for all warps, in two sets
// that alternate between rounds: a warp that writes a set again has completed the round in between, before which every
// warp finished reading this set. A remote store counts its bytes on the barrier of the block that owns the slot, so a
// block waits only for the values that it needs.
template <int SLOTS = MAX_BLOCKS * MAX_THREADS / WARP, bool ONE_BLOCK = false> struct Exchange {
    using Row = RowBlocks<ONE_BLOCK>;
    float2 (*slots)[SLOTS];
    unsigned long long* barriers;
    unsigned round = 0;

    __device__ __forceinline__ Exchange() {
        __shared__ float2 all_slots[2][SLOTS];
        __shared__ unsigned long long all_barriers[2];
        slots = all_slots;
        barriers = all_barriers;
#if __CUDA_ARCH__ >= 900
        if (Row::blocks() == 1) return;
        if (threadIdx.x == 0) {
            init_barrier(&barriers[0]);
            init_barrier(&barriers[1]);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        // Relaxed, since other blocks depend only on the fence above: a release would stall every thread on a GPU-wide
        // fence before it loads its part of the row.
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    }

    // Waits until every block of the cluster is ready for the first round.
    __device__ __forceinline__ void open() {
#if __CUDA_ARCH__ >= 900
        if (Row::blocks() > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }

    // Reduces one value per thread over the cluster; every thread gets the result. `Fold` combines two values, and has a
    // neutral one.
    template <typename Fold> __device__ __forceinline__ float2 combine(float2 value) {
        const float2* all = exchange(Fold::over_warp(value));
        value = Fold::neutral();
        for (int n = threadIdx.x % WARP; n < warps(); n += WARP) value = Fold::of(value, all[n]);
        return Fold::over_warp(value);
    }

    // Sends the value of this warp to all blocks; returns the values of all warps of the cluster, in the order of blocks.
    __device__ __forceinline__ const float2* exchange(float2 value) {
        int lane = threadIdx.x % WARP, set = round % 2, blocks = Row::blocks();
        float2* mine = &slots[set][Row::rank() * (blockDim.x / WARP) + threadIdx.x / WARP];
        if (blocks == 1) {
            if (lane == 0) *mine = value;
            __syncthreads();
        } else {
            expect_all();
#if __CUDA_ARCH__ >= 900
            if (lane < blocks)
                asm volatile("{\n"
                             ".reg .b32 there, counter;\n"
                             "mapa.shared::cluster.u32 there, %0, %2;\n"
                             "mapa.shared::cluster.u32 counter, %1, %2;\n"
                             "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [counter];\n"
                             "}" ::"r"(shared_address(mine)),
                             "r"(shared_address(&barriers[set])), "r"(lane), "f"(value.x), "f"(value.y)
                             : "memory");
#endif
            wait_for(&barriers[set], round / 2 % 2);
        }
        round++;
        return slots[set];
    }

    // Returns the number of warps of the cluster.
    __device__ __forceinline__ int warps() const { return Row::blocks() * blockDim.x / WARP; }

    // Returns the sums of a and of b over all threads of the cluster. Each half of a warp computes one of them.
    __device__ __forceinline__ float2 sum(float a, float b) {
        int lane = threadIdx.x % WARP, kind = lane / HALF, part = lane % HALF;
        int warps = blockDim.x / WARP, blocks = Row::blocks();
        float value = (kind ? b : a) + __shfl_xor_sync(~0u, kind ? a : b, HALF);
        value = half_warp_sum(value);
        float* all = &slots[round % 2][0].x + kind;
        float* mine = &all[2 * (Row::rank() * warps + threadIdx.x / WARP)];
        if (blocks == 1) {
            if (part == 0) *mine = value;
            __syncthreads();
        } else {
            expect_all();
#if __CUDA_ARCH__ >= 900
            if (part < blocks)
                asm volatile("{\n"
                             ".reg .b32 there, counter;\n"
                             "mapa.shared::cluster.u32 there, %0, %2;\n"
                             "mapa.shared::cluster.u32 counter, %1, %2;\n"
                             "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [counter];\n"
                             "}" ::"r"(shared_address(mine)),
                             "r"(shared_address(&barriers[round % 2])), "r"(part), "f"(value)
                             : "memory");
#endif
            wait_for(&barriers[round % 2], round / 2 % 2);
        }
        value = 0.0f;
#pragma unroll 1
        for (int n = part; n < blocks * warps; n += HALF) value += all[2 * n];
        value = half_warp_sum(value);
        round++;
        return {__shfl_sync(~0u, value, 0), __shfl_sync(~0u, value, HALF)};
    }

  private:
    static constexpr int HALF = WARP / 2;

    static __device__ __forceinline__ float half_warp_sum(float value) {
#pragma unroll
        for (int step = HALF / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
        return value;
    }

    // Expects one value from every warp of the cluster.
    __device__ __forceinline__ void expect_all() {
        if (threadIdx.x == 0) expect_bytes(&barriers[round % 2], warps() * (int)sizeof(float2));
    }
};

// The elements of a 32-bit register: one float, or two of the half types.
template <typename T> constexpr int PER_WORD = 4 / sizeof(T);

template <typename T> __device__ __forceinline__ float element(unsigned word, int n);
template <> __device__ __forceinline__ float element<float>(unsigned word, int) { return __uint_as_float(word); }
template <> __device__ __forceinline__ float element<bfloat16>(unsigned word, int n) {
    return __uint_as_float(n ? word & 0xffff0000u : word << 16);
}
template <> __device__ __forceinline__ float element<half>(unsigned word, int n) {
    return to_float(half{(unsigned short)(n ? word >> 16 : word)});
}

// Returns the larger one of each pair of elements; a NaN is ignored.
template <typename T> __device__ __forceinline__ unsigned larger(unsigned a, unsigned b);
template <> __device__ __forceinline__ unsigned larger<float>(unsigned a, unsigned b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}
template <> __device__ __forceinline__ unsigned larger<bfloat16>(unsigned a, unsigned b) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
template <> __device__ __forceinline__ unsigned larger<half>(unsigned a, unsigned b) {
    asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}

template <typename T> __device__ __forceinline__ unsigned word_of(float low, float high);
template <> __device__ __forceinline__ unsigned word_of<float>(float low, float) { return __float_as_uint(low); }
template <> __device__ __forceinline__ unsigned word_of<bfloat16>(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
template <> __device__ __forceinline__ unsigned word_of<half>(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

struct alignas(16) Words {
    unsigned at[4];
};

// Loads 16 bytes if in bounds; volatile, so that the compiler does not move the load. Data that is read ONCE bypasses L1.
template <bool ONCE = true>
__device__ __forceinline__ void load_words(const void* pointer, bool in_bounds, Words& words) {
#define LOAD_WORDS(HINT)                                                                                                \
    asm volatile("{\n"                                                                                                  \
                 ".reg .pred in_bounds;\n"                                                                              \
                 "setp.ne.s32 in_bounds, %5, 0;\n"                                                                      \
                 "@in_bounds ld.global" HINT ".L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6;\n"                     \
                 "}"                                                                                                    \
                 : "+r"(words.at[0]), "+r"(words.at[1]), "+r"(words.at[2]), "+r"(words.at[3])                           \
                 : "l"(pointer), "r"((int)in_bounds), "l"(evict_last_policy()))
    if (ONCE) LOAD_WORDS(".L1::no_allocate");
    else LOAD_WORDS("");
#undef LOAD_WORDS
}

// Copies 16 bytes to shared memory asynchronously, until `cp.async.wait_all`; zeros if out of bounds.
__device__ __forceinline__ void copy_words(Words* to, const void* pointer, bool in_bounds) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(to)),
                 "l"(pointer), "r"(in_bounds ? 16 : 0), "l"(evict_last_policy())
                 : "memory");
}

// Stores 16 bytes in one access; the compiler may split the assignment of a struct into four.
__device__ __forceinline__ void store_words(void* pointer, const Words& words) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(words.at[0]), "r"(words.at[1]),
                 "r"(words.at[2]), "r"(words.at[3]));
}

// Returns the 16 bytes at an offset of `bytes` in `low`, which `high` follows.
__device__ __forceinline__ Words bytes_from(const Words& low, const Words& high, int bytes) {
    unsigned all[8];
#pragma unroll
    for (int w = 0; w < 8; w++) all[w] = w < 4 ? low.at[w] : high.at[w - 4];
    if (bytes & 8) {
#pragma unroll
        for (int w = 0; w < 6; w++) all[w] = all[w + 2];
    }
    if (bytes & 4) {
#pragma unroll
        for (int w = 0; w < 5; w++) all[w] = all[w + 1];
    }
    Words found;
#pragma unroll
    for (int w = 0; w < 4; w++) found.at[w] = __funnelshift_r(all[w], all[w + 1], bytes % 4 * 8);
    return found;
}

// The split of a row of N elements over a cluster: `per_block` elements for each block, counted from the last multiple of
// `align` bytes before the row.
struct RowSplit {
    int N, per_block, align;
};

// This thread's part of a row, which may start and end at any address. The threads of a block take its vectors in turn,
// which are aligned to 16 bytes; the first and the last one of a row may be partially out of bounds. With LANES, this many
// threads of a warp take a row, instead of a cluster.
//
// SHIFTED: the row is loaded from addresses that differ from those of this part modulo 16 bytes. Then a warp takes
// neighboring vectors, and each is put together from two that are loaded, its own and that of the next lane.
template <typename T, int VECTORS, int LANES = 0, bool SHIFTED = false> struct RowPart {
    static constexpr int GROUP = LANES ? LANES : WARP;
    Words packs[VECTORS], next; // `next` follows the last vector of the group
    int start, end;             // offsets in the row: of this thread's first vector, and of the end of this block's part
    int bytes;                  // of which each vector begins after the start of the one that is loaded

    __device__ __forceinline__ RowPart(const T* row, RowSplit split) {
        int shift = (int)((unsigned long long)row & (split.align - 1)) / (int)sizeof(T);
        int first = (LANES ? 0 : cluster_rank() * split.per_block) - shift;
        start = first + slot() * VECTOR<T>;
        end = min(first + split.per_block, split.N);
    }

    // Returns whether this thread holds the element of that index.
    __device__ __forceinline__ bool holds(int at) const {
        return at >= block_start() && at < end && (at - block_start()) / VECTOR<T> % lanes() == lane();
    }

    // Requests the part; `settle` waits for it. Edges are whole vectors, which cross no page.
    __device__ __forceinline__ void request(const T* row, float other) {
        unsigned filler = word_of<T>(other, other);
        if (SHIFTED) {
            bytes = (int)((unsigned long long)(row + start) % 16);
            next = {filler, filler, filler, filler};
            if (lane() % GROUP == GROUP - 1) request_vector(row, first(VECTORS - 1) + VECTOR<T>, next);
        }
#pragma unroll
        for (int e = 0; e < VECTORS; e++) {
            packs[e] = {filler, filler, filler, filler};
            request_vector(row, first(e), packs[e]);
        }
    }

    // Makes the requested elements available; those outside of the row are `other`.
    __device__ __forceinline__ void settle(float other) {
        unsigned filler = word_of<T>(other, other);
#pragma unroll
        for (int e = 0; e < VECTORS; e++) {
            if (SHIFTED) {
                Words following;
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    unsigned mine = e + 1 < VECTORS && lane() % GROUP == 0 ? packs[e + 1].at[w] : packs[e].at[w];
                    following.at[w] = __shfl_sync(~0u, mine, (lane() + 1) % GROUP, GROUP);
                }
                if (e + 1 == VECTORS && lane() % GROUP == GROUP - 1) following = next;
                packs[e] = bytes_from(packs[e], following, bytes);
            }
            if (SHIFTED ? is_full(e) : !is_partial(e)) continue;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                unsigned mask = 0;
#pragma unroll
                for (int n = 0; n < PER_WORD<T>; n++)
                    if (is_in_row(first(e) + w * PER_WORD<T> + n)) mask |= ~0u >> (32 - 8 * (int)sizeof(T)) << (16 * n);
                packs[e].at[w] = (packs[e].at[w] & mask) | (filler & ~mask);
            }
        }
    }

    // Returns the offset of this block's part in the row.
    __device__ __forceinline__ int block_start() const { return start - slot() * VECTOR<T>; }

    __device__ __forceinline__ float max() const {
        unsigned largest = packs[0].at[0];
#pragma unroll
        for (int e = 0; e < VECTORS; e++) {
            Words pack = packs[e];
#pragma unroll
            for (int w = 0; w < 4; w++) largest = larger<T>(largest, pack.at[w]);
        }
        return fmaxf(element<T>(largest, 0), element<T>(largest, PER_WORD<T> - 1));
    }

    // Keeps the elements packed until they are used again, and recomputes addresses; the compiler would keep floats and
    // addresses in registers, and spill.
    __device__ __forceinline__ void keep_packed() {
        asm volatile("" : "+r"(start));
#pragma unroll
        for (int e = 0; e < VECTORS; e++)
#pragma unroll
            for (int w = 0; w < 4; w++) asm volatile("" : "+r"(packs[e].at[w]));
    }

    // Calls `use(element, index)` for each element.
    template <typename Use> __device__ __forceinline__ void each(Use use) const {
#pragma unroll
        for (int e = 0; e < VECTORS; e++) {
            if (is_skipped(e)) continue;
            Words pack = packs[e];
#pragma unroll
            for (int n = 0; n < VECTOR<T>; n++)
                use(element<T>(pack.at[n / PER_WORD<T>], n % PER_WORD<T>), e * VECTOR<T> + n);
        }
    }

    // Calls `use(element, element of the other part)` for each element.
    template <typename Use> __device__ __forceinline__ void with(const RowPart& other, Use use) const {
        other.each([&](float theirs, int n) {
            int e = n / VECTOR<T>, v = n % VECTOR<T>;
            use(element<T>(packs[e].at[v / PER_WORD<T>], v % PER_WORD<T>), theirs);
        });
    }

    // Stores `make(element, index)` for each element.
    template <typename Make> __device__ __forceinline__ void write(T* row, Make make) const {
#pragma unroll
        for (int e = 0; e < VECTORS; e++) {
            if (is_skipped(e)) continue;
            Words pack = packs[e];
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float made[2];
#pragma unroll
                for (int n = 0; n < PER_WORD<T>; n++)
                    made[n] = make(element<T>(pack.at[w], n), e * VECTOR<T> + w * PER_WORD<T> + n);
                pack.at[w] = word_of<T>(made[0], made[1]);
            }
            if (is_full(e)) store_words(row + first(e), pack);
            if (is_partial(e)) store_partially(row, first(e), pack);
        }
    }

    // Stores `make(element, element of the other part)` for each element.
    template <typename Make> __device__ __forceinline__ void write(T* row, const RowPart& other, Make make) const {
        write(row, [&](float mine, int n) {
            int e = n / VECTOR<T>, v = n % VECTOR<T>;
            return make(mine, element<T>(other.packs[e].at[v / PER_WORD<T>], v % PER_WORD<T>));
        });
    }

  private:
    static __device__ __forceinline__ int lane() { return LANES ? threadIdx.x % LANES : threadIdx.x; }
    static __device__ __forceinline__ int lanes() { return LANES ? LANES : blockDim.x; }

    // Returns the number of this thread's first vector in the part of the block.
    static __device__ __forceinline__ int slot() {
        return SHIFTED ? lane() / GROUP * GROUP * VECTORS + lane() % GROUP : lane();
    }

    __device__ __forceinline__ int first(int e) const {
        return start + e * (SHIFTED ? GROUP : lanes()) * VECTOR<T>;
    }

    __device__ __forceinline__ bool is_in_row(int at) const { return at >= 0 && at < end; }

    __device__ __forceinline__ bool is_full(int e) const {
        return first(e) >= 0 && first(e) + VECTOR<T> <= end;
    }

    // Returns whether a vector is partially in the row.
    __device__ __forceinline__ bool is_partial(int e) const {
        return !is_full(e) && first(e) + VECTOR<T> > 0 && first(e) < end;
    }

    // Returns whether a vector is known to lie behind the row. Not asked of those that rarely do.
    __device__ __forceinline__ bool is_skipped(int e) const {
        return e > 0 && (SHIFTED || e == VECTORS - 1) && first(e) >= end;
    }

    // Loads the 16 bytes that contain the element of that index, if they contain one of the row.
    __device__ __forceinline__ void request_vector(const T* row, int at, Words& words) const {
        int from = SHIFTED ? at - bytes / (int)sizeof(T) : at;
        load_words(row + from, from < end && from + VECTOR<T> > 0, words);
    }

    // Stores the elements of a vector that are in the row, in pairs where both are.
    __device__ __forceinline__ void store_partially(T* row, int at, const Words& pack) const {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            int here = at + w * PER_WORD<T>, there = here + PER_WORD<T> - 1;
            if (is_in_row(here) && is_in_row(there)) *(unsigned*)(row + here) = pack.at[w];
            else if (is_in_row(here)) row[here] = from_float<T>(element<T>(pack.at[w], 0));
            else if (is_in_row(there)) row[there] = from_float<T>(element<T>(pack.at[w], PER_WORD<T> - 1));
        }
    }
};

// Requests rows that start at a multiple of 16 bytes for shared memory. `wait_for_copies` waits for all of a block.
template <typename T> __device__ __forceinline__ void copy_in(T* tile, const T* from, int elements) {
    for (int n = threadIdx.x * VECTOR<T>; n < elements; n += blockDim.x * VECTOR<T>)
        copy_words((Words*)(tile + n), from + n, true); // the last vector may be partial, but crosses no page
}

__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}

template <typename T> __device__ __forceinline__ void copy_out(T* to, const T* tile, int elements) {
    for (int n = threadIdx.x * VECTOR<T>; n < elements; n += blockDim.x * VECTOR<T>) {
        if (n + VECTOR<T> <= elements) store_words(to + n, *(const Words*)(tile + n));
        else
            for (int rest = n; rest < elements; rest++) to[rest] = tile[rest];
    }
}

constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * LOG2_E); }

// Softmax's reduction: the maximum of values x, and the sum of exp(x - maximum).
struct MaxAndSum {
    // The maximum comes first, so that a thread rescales its sum once.
    static __device__ __forceinline__ float2 over_warp(float2 value) {
        float m = warp_max(value.x);
        return {m, warp_sum(value.y * exp_approx(value.x - shift(m)))};
    }

    static __device__ __forceinline__ float2 neutral() { return {-INFINITY, 0.0f}; }

    // A maximum of -inf must not be subtracted, since -inf + inf is NaN.
    static __device__ __forceinline__ float shift(float m) { return m == -INFINITY ? 0.0f : m; }

    static __device__ __forceinline__ float2 of(float2 a, float2 b) {
        float m = fmaxf(a.x, b.x), shift_by = shift(m);
        return {m, a.y * exp_approx(a.x - shift_by) + b.y * exp_approx(b.x - shift_by)};
    }

    // Combines `count` values in shared memory, `apart` elements from each other.
    static __device__ __forceinline__ float2 over(const float2* values, int count, int apart) {
        float m = -INFINITY, total = 0.0f;
        for (int n = 0; n < count; n++) m = fmaxf(m, values[n * apart].x);
        for (int n = 0; n < count; n++) total += values[n * apart].y * exp_approx(values[n * apart].x - shift(m));
        return {m, total};
    }
};

// The sum of the first of two values.
struct Sum {
    static __device__ __forceinline__ float2 over_warp(float2 value) { return {warp_sum(value.x), 0.0f}; }
    static __device__ __forceinline__ float2 neutral() { return {0.0f, 0.0f}; }
    static __device__ __forceinline__ float2 of(float2 a, float2 b) { return {a.x + b.x, 0.0f}; }
    static __device__ __forceinline__ float2 over(const float2* values, int count, int apart) {
        float total = 0.0f;
        for (int n = 0; n < count; n++) total += values[n * apart].x;
        return {total, 0.0f};
    }
};
