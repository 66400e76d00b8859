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

// Where the warps of a cluster leave a value for each other, once a kernel: every block has a slot for each of them. A slot
// that is written also counts down a barrier of the block that owns it, so nobody waits for more than what it needs.
struct Exchange {
    float2* slots;
    unsigned long long* counter;

    __device__ __forceinline__ Exchange() {
        __shared__ float2 all_slots[MOST_BLOCKS * MOST_THREADS / WARP];
        __shared__ unsigned long long barrier;
        slots = all_slots;
        counter = &barrier;
#if __CUDA_ARCH__ >= 900
        if (cluster_blocks() == 1) return;
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(counter)) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
    }

    // Combines one value of every thread of the cluster; each gets the result. `Fold` combines two, and has a neutral one.
    template <typename Fold> __device__ __forceinline__ float2 combine(float2 value) {
        int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, blocks = cluster_blocks();
        float2* mine = &slots[cluster_rank() * warps + warp];
        value = across_warp<Fold>(value);
        if (blocks == 1) {
            if (lane == 0) *mine = value;
            __syncthreads();
        } else {
            send(value, mine);
        }
        value = Fold::neutral();
        for (int n = lane; n < blocks * warps; n += WARP) value = Fold::of(value, slots[n]);
        return across_warp<Fold>(value);
    }

  private:
    // To the same slot of every block of the cluster; returns when all warps' values have come here.
    __device__ __forceinline__ void send(float2 value, float2* slot) {
#if __CUDA_ARCH__ >= 900
        int lane = threadIdx.x % WARP, warps = blockDim.x / WARP, blocks = cluster_blocks();
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); // every block is ready
        if (threadIdx.x == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(counter)),
                         "r"(blocks * warps * (int)sizeof(float2))
                         : "memory");
        if (lane < blocks)
            asm volatile("{\n"
                         ".reg .b32 there, counter;\n"
                         "mapa.shared::cluster.u32 there, %0, %2;\n"
                         "mapa.shared::cluster.u32 counter, %1, %2;\n"
                         "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [counter];\n"
                         "}" ::"r"(shared_address(slot)),
                         "r"(shared_address(counter)), "r"(lane), "f"(value.x), "f"(value.y)
                         : "memory");
        asm volatile("{\n"
                     ".reg .pred done;\n"
                     "again_%=:\n"
                     "mbarrier.try_wait.parity.shared.b64 done, [%0], 0;\n"
                     "@!done bra again_%=;\n"
                     "}" ::"r"(shared_address(counter))
                     : "memory");
#endif
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

// This thread's part of a row of N. The blocks of a cluster take pieces of it, one after the other, their threads packs in
// turn. With EDGES rows begin anywhere and end anywhere: packs lie on 16-byte boundaries, and of the first and the last
// only the elements of the row count. Without, a pack is in the row or past its end.
template <typename T, int EACH, bool EDGES> struct RowPart {
    Words packs[EACH];
    int start, end; // elements of the row: where this thread's first pack begins, and where this block's piece ends

    __device__ __forceinline__ RowPart(const T* row, int N) {
        int shift = EDGES ? (int)((unsigned long long)row % 16 / sizeof(T)) : 0;
        int all = (N + shift + VECTOR<T> - 1) / VECTOR<T>, blocks = cluster_blocks();
        int piece = (all + blocks - 1) / blocks, first = cluster_rank() * piece;
        start = (first + threadIdx.x) * VECTOR<T> - shift;
        end = (first + piece) * VECTOR<T> - shift;
        if (end > N) end = N;
    }

    // Whether this thread has the element of that index.
    __device__ __forceinline__ bool holds(int at) const {
        int from = start - (int)threadIdx.x * VECTOR<T>; // where this block's piece begins
        return at >= from && at < end && (at - from) / VECTOR<T> % (int)blockDim.x == threadIdx.x;
    }

    // Elements outside of the row are `other`.
    __device__ __forceinline__ void load(const T* row, float other) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            if (is_whole(e)) {
                packs[e] = *reinterpret_cast<const Words*>(row + first(e));
                continue;
            }
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float pair[2];
#pragma unroll
                for (int n = 0; n < IN_WORD<T>; n++) {
                    int at = first(e) + w * IN_WORD<T> + n;
                    pair[n] = EDGES && at >= 0 && at < end ? to_float(row[at]) : other;
                }
                packs[e].at[w] = word_of<T>(pair[0], pair[1]);
            }
        }
    }

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

    // Keeps the elements packed until they are used again; the compiler would rather keep them as floats, and spill.
    __device__ __forceinline__ void settle() {
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
            if (is_whole(e)) *reinterpret_cast<Words*>(row + first(e)) = pack;
            if (is_whole(e) || !EDGES) continue;
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
        return EDGES ? first(e) >= 0 && first(e) + VECTOR<T> <= end : first(e) < end;
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
