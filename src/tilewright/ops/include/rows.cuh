// A row in the registers of a cluster: each thread holds EACH packs of 16 bytes, each block a share of the row, and the
// blocks of a cluster exchange what they have found through each other's shared memory. One block alone is a cluster of
// one, on any GPU.
#pragma once
#include "dtypes.cuh"

constexpr int MOST_THREADS = 1024, MOST_BLOCKS = 16, WARP = 32;

template <typename Fold> __device__ __forceinline__ float2 across_warp(float2 value) {
    for (int step = WARP / 2; step; step /= 2) {
        float2 other = {__shfl_xor_sync(~0u, value.x, step), __shfl_xor_sync(~0u, value.y, step)};
        value = Fold::of(value, other);
    }
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

// %clusterid would be a product of floats, which is another cluster's from 2^24 on. Clusters are powers of two.
__device__ __forceinline__ unsigned cluster_number() { return blockIdx.x >> (31 - __clz(cluster_blocks())); }
__device__ __forceinline__ unsigned clusters() { return gridDim.x >> (31 - __clz(cluster_blocks())); }

// Who holds a row: the blocks of a cluster, or one block ALONE, which the compiler then knows.
template <bool ALONE> struct Holders {
    static __device__ __forceinline__ unsigned blocks() { return ALONE ? 1 : cluster_blocks(); }
    static __device__ __forceinline__ unsigned rank() { return ALONE ? 0 : cluster_rank(); }
    static __device__ __forceinline__ unsigned number() { return ALONE ? blockIdx.x : cluster_number(); }
    static __device__ __forceinline__ unsigned count() { return ALONE ? gridDim.x : clusters(); }
};

__device__ __forceinline__ void init_barrier(const void* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// That so many bytes are to come before the barrier's phase ends.
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

// Where the warps of a cluster leave values for each other, any number of times. Every block has slots for them all.
// Turns alternate between two sets: a warp that writes a set again has seen the turn between, for which every warp had
// to be done with reading this set. A slot written from afar counts its bytes on the barrier of the block that owns it,
// so nobody waits for more than what it needs.
template <int SLOTS = MOST_BLOCKS * MOST_THREADS / WARP, bool ALONE = false> struct Exchange {
    using Row = Holders<ALONE>;
    float2 (*slots)[SLOTS];
    unsigned long long* barriers;
    unsigned turn = 0;

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
        // Relaxed, since the fence above is all that others must see: a release would have every thread wait here for a
        // fence of the whole GPU before it loads its part of the row.
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    }

    // Returns when every block of the cluster is ready for the first turn.
    __device__ __forceinline__ void open() {
#if __CUDA_ARCH__ >= 900
        if (Row::blocks() > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }

    // Combines one value of every thread of the cluster; each gets the result. `Fold` combines two, and has a neutral one.
    template <typename Fold> __device__ __forceinline__ float2 combine(float2 value) {
        const float2* all = told(across_warp<Fold>(value));
        value = Fold::neutral();
        for (int n = threadIdx.x % WARP; n < warps(); n += WARP) value = Fold::of(value, all[n]);
        return across_warp<Fold>(value);
    }

    // What every warp of the cluster tells the others, block by block.
    __device__ __forceinline__ const float2* told(float2 value) {
        int lane = threadIdx.x % WARP, set = turn % 2, blocks = Row::blocks();
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
            wait_for(&barriers[set], turn / 2 % 2);
        }
        turn++;
        return slots[set];
    }

    // Of the cluster.
    __device__ __forceinline__ int warps() const { return Row::blocks() * blockDim.x / WARP; }

    // The sums of a and of b over all threads of the cluster. Half of a warp's lanes see to each.
    __device__ __forceinline__ float2 sum(float a, float b) {
        int lane = threadIdx.x % WARP, kind = lane / HALF, part = lane % HALF;
        int warps = blockDim.x / WARP, blocks = Row::blocks();
        float value = (kind ? b : a) + __shfl_xor_sync(~0u, kind ? a : b, HALF);
        value = across_half(value);
        float* all = &slots[turn % 2][0].x + kind;
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
                             "r"(shared_address(&barriers[turn % 2])), "r"(part), "f"(value)
                             : "memory");
#endif
            wait_for(&barriers[turn % 2], turn / 2 % 2);
        }
        value = 0.0f;
#pragma unroll 1
        for (int n = part; n < blocks * warps; n += HALF) value += all[2 * n];
        value = across_half(value);
        turn++;
        return {__shfl_sync(~0u, value, 0), __shfl_sync(~0u, value, HALF)};
    }

  private:
    static constexpr int HALF = WARP / 2;

    static __device__ __forceinline__ float across_half(float value) {
#pragma unroll
        for (int step = HALF / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
        return value;
    }

    // A value of every warp of the cluster.
    __device__ __forceinline__ void expect_all() {
        if (threadIdx.x == 0) expect_bytes(&barriers[turn % 2], warps() * (int)sizeof(float2));
    }
};

// Elements as they lie in the words of a register: one float, or two of the half types.
template <typename T> constexpr int IN_WORD = 4 / sizeof(T);

template <typename T> __device__ __forceinline__ float element(unsigned word, int n);
template <> __device__ __forceinline__ float element<float>(unsigned word, int) { return __uint_as_float(word); }
template <> __device__ __forceinline__ float element<bfloat16>(unsigned word, int n) {
    return __uint_as_float(n ? word & 0xffff0000u : word << 16);
}
template <> __device__ __forceinline__ float element<half>(unsigned word, int n) {
    return to_float(half{(unsigned short)(n ? word >> 16 : word)});
}

// The larger of each pair of elements; NaN counts as missing.
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

// A load where `is_there`, at the place in the program where it is written. What is read ONCE leaves the near cache to
// others.
template <bool ONCE = true>
__device__ __forceinline__ void load_words(const void* pointer, bool is_there, Words& words) {
#define LOAD_WORDS(HOW)                                                                                                 \
    asm volatile("{\n"                                                                                                  \
                 ".reg .pred is_there;\n"                                                                               \
                 "setp.ne.s32 is_there, %5, 0;\n"                                                                       \
                 "@is_there ld.global" HOW ".L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6;\n"                       \
                 "}"                                                                                                    \
                 : "+r"(words.at[0]), "+r"(words.at[1]), "+r"(words.at[2]), "+r"(words.at[3])                           \
                 : "l"(pointer), "r"((int)is_there), "l"(kept_longest()))
    if (ONCE) LOAD_WORDS(".L1::no_allocate");
    else LOAD_WORDS("");
#undef LOAD_WORDS
}

// The same to shared memory, some time until `cp.async.wait_all`; zeros where not `is_there`.
__device__ __forceinline__ void copy_words(Words* to, const void* pointer, bool is_there) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(to)),
                 "l"(pointer), "r"(is_there ? 16 : 0), "l"(kept_longest())
                 : "memory");
}

// In one access; of a struct's assignment the compiler may make four.
__device__ __forceinline__ void store_words(void* pointer, const Words& words) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(words.at[0]), "r"(words.at[1]),
                 "r"(words.at[2]), "r"(words.at[3]));
}

// How a row of N lies in a cluster: each block has a piece of so many elements, from the last multiple of `align` bytes
// before the row on.
struct Cut {
    int N, piece, align;
};

// This thread's part of a row, which may begin and end anywhere. The threads of a block take packs of its piece in turn,
// which lie on 16-byte boundaries; of the first and the last only the elements of the row count.
template <typename T, int EACH> struct RowPart {
    Words packs[EACH];
    int start, end; // elements of the row: where this thread's first pack begins, and where this block's piece ends

    __device__ __forceinline__ RowPart(const T* row, Cut cut) {
        int shift = (int)((unsigned long long)row & (cut.align - 1)) / (int)sizeof(T);
        int first = cluster_rank() * cut.piece - shift;
        start = first + threadIdx.x * VECTOR<T>;
        end = min(first + cut.piece, cut.N);
    }

    // Whether this thread has the element of that index.
    __device__ __forceinline__ bool holds(int at) const {
        return at >= before() && at < end && (at - before()) / VECTOR<T> % (int)blockDim.x == threadIdx.x;
    }

    // Elements outside of the row are `other`.
    __device__ __forceinline__ void load(const T* row, float other) {
        unsigned filler = word_of<T>(other, other);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            packs[e] = {filler, filler, filler, filler};
            load_words(row + first(e), is_whole(e), packs[e]);
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            if (!is_cut(e)) continue;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float pair[2];
#pragma unroll
                for (int n = 0; n < IN_WORD<T>; n++) {
                    int at = first(e) + w * IN_WORD<T> + n;
                    pair[n] = at >= 0 && at < end ? to_float(row[at]) : other;
                }
                packs[e].at[w] = word_of<T>(pair[0], pair[1]);
            }
        }
    }

    // Elements of the row before this block's piece.
    __device__ __forceinline__ int before() const { return start - (int)threadIdx.x * VECTOR<T>; }

    __device__ __forceinline__ float max() const {
        unsigned largest = packs[0].at[0];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            Words pack = packs[e];
#pragma unroll
            for (int w = 0; w < 4; w++) largest = larger<T>(largest, pack.at[w]);
        }
        return fmaxf(element<T>(largest, 0), element<T>(largest, IN_WORD<T> - 1));
    }

    // Keeps the elements packed until they are used again, and makes addresses anew; the compiler would rather keep floats
    // and addresses, and spill.
    __device__ __forceinline__ void settle() {
        asm volatile("" : "+r"(start));
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int w = 0; w < 4; w++) asm volatile("" : "+r"(packs[e].at[w]));
    }

    // Calls `use(element, number)` for each element.
    template <typename Use> __device__ __forceinline__ void each(Use use) const {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            Words pack = packs[e];
#pragma unroll
            for (int n = 0; n < VECTOR<T>; n++)
                use(element<T>(pack.at[n / IN_WORD<T>], n % IN_WORD<T>), e * VECTOR<T> + n);
        }
    }

    // Calls `use(element, that of another part)` for each element.
    template <typename Use> __device__ __forceinline__ void with(const RowPart& other, Use use) const {
        other.each([&](float theirs, int n) {
            int e = n / VECTOR<T>, v = n % VECTOR<T>;
            use(element<T>(packs[e].at[v / IN_WORD<T>], v % IN_WORD<T>), theirs);
        });
    }

    // Stores `make(element, number)` for each element.
    template <typename Make> __device__ __forceinline__ void write(T* row, Make make) const {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            Words pack = packs[e];
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float made[2];
#pragma unroll
                for (int n = 0; n < IN_WORD<T>; n++)
                    made[n] = make(element<T>(pack.at[w], n), e * VECTOR<T> + w * IN_WORD<T> + n);
                pack.at[w] = word_of<T>(made[0], made[1]);
            }
            if (is_whole(e)) store_words(row + first(e), pack);
            if (!is_cut(e)) continue;
#pragma unroll
            for (int n = 0; n < VECTOR<T>; n++) {
                int at = first(e) + n;
                if (at >= 0 && at < end) row[at] = from_float<T>(element<T>(pack.at[n / IN_WORD<T>], n % IN_WORD<T>));
            }
        }
    }

    // Stores `make(element, that of another part)` for each element.
    template <typename Make> __device__ __forceinline__ void write(T* row, const RowPart& other, Make make) const {
        write(row, [&](float mine, int n) {
            int e = n / VECTOR<T>, v = n % VECTOR<T>;
            return make(mine, element<T>(other.packs[e].at[v / IN_WORD<T>], v % IN_WORD<T>));
        });
    }

  private:
    __device__ __forceinline__ int first(int e) const { return start + e * (int)blockDim.x * VECTOR<T>; }

    __device__ __forceinline__ bool is_whole(int e) const {
        return first(e) >= 0 && first(e) + VECTOR<T> <= end;
    }

    // Whether some of a pack is in the row, and some is not.
    __device__ __forceinline__ bool is_cut(int e) const {
        return !is_whole(e) && first(e) + VECTOR<T> > 0 && first(e) < end;
    }
};

constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float exp_of(float x) { return exp2_of(x * LOG2_E); }

// What softmax needs of values: their maximum, and the sum of their exponentials less that maximum.
struct MaxAndSum {
    static __device__ __forceinline__ float2 neutral() { return {-INFINITY, 0.0f}; }

    // A maximum of -inf means only -inf was seen: shifting by it would make NaN of -inf + inf.
    static __device__ __forceinline__ float shift(float m) { return m == -INFINITY ? 0.0f : m; }

    static __device__ __forceinline__ float2 of(float2 a, float2 b) {
        float m = fmaxf(a.x, b.x), by = shift(m);
        return {m, a.y * exp_of(a.x - by) + b.y * exp_of(b.x - by)};
    }
};

struct Sum {
    static __device__ __forceinline__ float2 neutral() { return {0.0f, 0.0f}; }
    static __device__ __forceinline__ float2 of(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
};
