// Rows brought to one size, and the gradients of that. A cluster of blocks holds a row in registers, so each row is
// read once and written once; backward also keeps the sums over its rows there. Rows are whole 16-byte packs.
#include "rows.cuh"

constexpr int LARGEST_BLOCK = 512, LARGEST_CLUSTER = 8; // threads, blocks
constexpr int SLOTS = LARGEST_BLOCK / WARP * LARGEST_CLUSTER, HALF = WARP / 2;

// Where the warps of a cluster leave two sums for each other, any number of times. Every block has slots for them all.
// Turns alternate between two sets: a warp that writes a set again has seen the turn between, for which every warp had
// to be done with reading this set. A slot written from afar counts its bytes on the barrier of the block that owns it.
struct Turns {
    float (*slots)[2][SLOTS];
    unsigned long long* barriers;
    unsigned turn = 0;

    __device__ __forceinline__ Turns() {
        __shared__ float all_slots[2][2][SLOTS];
        __shared__ unsigned long long all_barriers[2];
        slots = all_slots;
        barriers = all_barriers;
#if __CUDA_ARCH__ >= 900
        if (cluster_blocks() == 1) return;
        if (threadIdx.x == 0) {
            for (int n = 0; n < 2; n++)
                asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&barriers[n])) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
    }

    // Returns when every block of the cluster is ready for the first turn.
    __device__ __forceinline__ void open() {
#if __CUDA_ARCH__ >= 900
        if (cluster_blocks() > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }

    // The sums of a and of b over all threads of the cluster. Half of a warp's lanes see to each.
    __device__ __forceinline__ float2 sum(float a, float b) {
        int lane = threadIdx.x % WARP, kind = lane / HALF, part = lane % HALF;
        int warps = blockDim.x / WARP, blocks = cluster_blocks();
        float value = (kind ? b : a) + __shfl_xor_sync(~0u, kind ? a : b, HALF);
        value = across_half(value);
        float* mine = &slots[turn % 2][kind][cluster_rank() * warps + threadIdx.x / WARP];
        if (blocks == 1) {
            if (part == 0) *mine = value;
            __syncthreads();
        } else {
            send(value, mine);
        }
        value = 0.0f;
#pragma unroll 1
        for (int n = part; n < blocks * warps; n += HALF) value += slots[turn % 2][kind][n];
        value = across_half(value);
        turn++;
        return {__shfl_sync(~0u, value, 0), __shfl_sync(~0u, value, HALF)};
    }

  private:
    static __device__ __forceinline__ float across_half(float value) {
#pragma unroll
        for (int step = HALF / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
        return value;
    }

    // To the same slot of every block of the cluster; returns when all warps' values have come here.
    __device__ __forceinline__ void send(float value, float* slot) {
#if __CUDA_ARCH__ >= 900
        int part = threadIdx.x % HALF, warps = blockDim.x / WARP, blocks = cluster_blocks();
        unsigned barrier = shared_address(&barriers[turn % 2]);
        if (threadIdx.x == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier),
                         "r"(blocks * warps * 2 * (int)sizeof(float))
                         : "memory");
        if (part < blocks)
            asm volatile("{\n"
                         ".reg .b32 there, counter;\n"
                         "mapa.shared::cluster.u32 there, %0, %2;\n"
                         "mapa.shared::cluster.u32 counter, %1, %2;\n"
                         "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [counter];\n"
                         "}" ::"r"(shared_address(slot)),
                         "r"(barrier), "r"(part), "f"(value)
                         : "memory");
        asm volatile("{\n"
                     ".reg .pred done;\n"
                     "again_%=:\n"
                     "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                     "@!done bra again_%=;\n"
                     "}" ::"r"(barrier),
                     "r"(turn / 2 % 2)
                     : "memory");
#endif
    }
};

// Elements of a thread, packed as they lie in memory.
template <typename T, int COUNT> struct Held {
    Words words[COUNT / VECTOR<T>];

    __device__ __forceinline__ float at(int n) const {
        return element<T>(words[n / VECTOR<T>].at[n % VECTOR<T> / IN_WORD<T>], n % IN_WORD<T>);
    }

    // Calls `use(element, n)` for each.
    template <typename Use> __device__ __forceinline__ void each(Use use) const {
#pragma unroll
        for (int n = 0; n < COUNT; n++) use(at(n), n);
    }

    // Makes element n `make(n)`.
    template <typename Make> __device__ __forceinline__ void fill(Make make) {
#pragma unroll
        for (int n = 0; n < COUNT; n += IN_WORD<T>) {
            float low = make(n), high = IN_WORD<T> > 1 ? make(n + 1) : 0.0f;
            words[n / VECTOR<T>].at[n % VECTOR<T> / IN_WORD<T>] = word_of<T>(low, high);
        }
    }

    // Keeps the elements packed until they are used again; the compiler would rather keep them as floats.
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int p = 0; p < COUNT / VECTOR<T>; p++)
#pragma unroll
            for (int w = 0; w < 4; w++) asm volatile("" : "+r"(words[p].at[w]));
    }
};

// A load where `is_there`, at the place in the program where it is written. Rows go past the first cache, which is for
// the weights.
template <bool OF_ROWS> __device__ __forceinline__ void load_words(const void* pointer, bool is_there, Words& words) {
    if (OF_ROWS)
        asm volatile("{\n"
                     ".reg .pred is_there;\n"
                     "setp.ne.s32 is_there, %5, 0;\n"
                     "@is_there ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                     "}"
                     : "+r"(words.at[0]), "+r"(words.at[1]), "+r"(words.at[2]), "+r"(words.at[3])
                     : "l"(pointer), "r"((int)is_there));
    else
        asm volatile("{\n"
                     ".reg .pred is_there;\n"
                     "setp.ne.s32 is_there, %5, 0;\n"
                     "@is_there ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                     "}"
                     : "+r"(words.at[0]), "+r"(words.at[1]), "+r"(words.at[2]), "+r"(words.at[3])
                     : "l"(pointer), "r"((int)is_there));
}

// The columns of a thread, the same ones of every row. The blocks of a cluster take pieces of a row, one after the
// other, their threads packs in turn.
template <typename T, int EACH> struct Columns {
    static constexpr int COUNT = EACH * VECTOR<T>;
    int start, end; // where this thread's first pack begins, and where this block's piece ends

    __device__ __forceinline__ Columns(int N) {
        int blocks = cluster_blocks(), piece = (N / VECTOR<T> + blocks - 1) / blocks, first = cluster_rank() * piece;
        start = (first + threadIdx.x) * VECTOR<T>;
        end = (first + piece) * VECTOR<T>;
        if (end > N) end = N;
    }

    __device__ __forceinline__ int first(int e) const { return start + e * (int)blockDim.x * VECTOR<T>; }

    // Whether element n of a thread is in the row.
    __device__ __forceinline__ bool has(int n) const { return first(n / VECTOR<T>) < end; }

    // What is past the end of the row stays as it is.
    __device__ __forceinline__ void load(const T* row, bool is_there, Held<T, COUNT>& held) const {
#pragma unroll
        for (int e = 0; e < EACH; e++) load_words<true>(row + first(e), is_there && first(e) < end, held.words[e]);
    }

    __device__ __forceinline__ void store(T* row, const Held<T, COUNT>& held) const {
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (first(e) < end) *reinterpret_cast<Words*>(row + first(e)) = held.words[e];
    }

    // Those of pack e; without weights all are `other`.
    template <typename W>
    __device__ __forceinline__ Held<W, VECTOR<T>> weights(const W* all, int e, float other) const {
        Held<W, VECTOR<T>> held;
        held.fill([=](int) { return other; });
#pragma unroll
        for (int p = 0; p < VECTOR<T> / VECTOR<W>; p++)
            load_words<false>(all + first(e) + p * VECTOR<W>, all && first(e) < end, held.words[p]);
        return held;
    }

    __device__ __forceinline__ void store(float* row, const float (&sums)[COUNT]) const {
        if (!row) return;
#pragma unroll
        for (int n = 0; n < COUNT; n += VECTOR<float>)
            if (has(n))
                *reinterpret_cast<float4*>(row + first(n / VECTOR<T>) + n % VECTOR<T>) =
                    float4{sums[n], sums[n + 1], sums[n + 2], sums[n + 3]};
    }
};

// Threads of a block at most, and how many such blocks a multiprocessor takes: 64 to 128 registers a thread.
template <int EACH> constexpr int FORWARD_BLOCK = EACH == 4 ? LARGEST_BLOCK / 2 : LARGEST_BLOCK;
template <typename T, typename W, int EACH>
constexpr int FORWARD_BLOCKS = EACH == 4 ? 3 : EACH < 4 && sizeof(W) == sizeof(T) ? 2 : 1;

// y = (x - mean) / sqrt(mean (x - mean)² + eps) (offset + w) + b; with ADDS of s = x + r, which is written too.
template <typename T, typename W, int EACH, bool IS_RMS, bool ADDS>
__global__ void __launch_bounds__(FORWARD_BLOCK<EACH>, FORWARD_BLOCKS<T, W, EACH>)
    norm_fwd(const T* x, const T* r, const W* w, const W* b, T* y, T* s, long long N, float eps, float offset) {
    constexpr int COUNT = Columns<T, EACH>::COUNT;
    constexpr bool EARLY = EACH <= 2; // the weights, too, before the sums; else registers are worth more
    Turns turns;
    Columns<T, EACH> columns(N);
    long long row = blockIdx.x / cluster_blocks() * N;
    float share = 1.0f / N, mean = 0.0f, squares = 0.0f;
    Held<T, COUNT> xs = {}, ys;
    columns.load(x + row, true, xs);
    if (ADDS) {
        Held<T, COUNT> rs = {};
        columns.load(r + row, true, rs);
        ys.fill([&](int n) { return xs.at(n) + rs.at(n); });
        columns.store(s + row, xs = ys);
    }
    Held<W, VECTOR<T>> ws[EACH], bs[EACH];
    auto fetch_weights = [&](int e) {
        ws[e] = columns.weights(w, e, 1.0f);
        if (!IS_RMS) bs[e] = columns.weights(b, e, 0.0f);
    };
#pragma unroll
    for (int e = 0; EARLY && e < EACH; e++) fetch_weights(e);
    if (!w) offset = 0.0f;
    turns.open();
    if (!IS_RMS) {
        xs.each([&](float x, int) { mean += x; });
        xs.settle();
        mean = turns.sum(mean, 0.0f).x * share;
    }
    xs.each([&](float x, int n) {
        if (IS_RMS || columns.has(n)) squares += (x - mean) * (x - mean);
    });
    xs.settle();
    float scale = rsqrtf(turns.sum(squares, 0.0f).x * share + eps);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        if (!EARLY) fetch_weights(e);
        Held<T, VECTOR<T>> pack;
        pack.fill([&](int n) {
            float normed = (xs.at(e * VECTOR<T> + n) - mean) * scale * (ws[e].at(n) + offset);
            return IS_RMS ? normed : normed + bs[e].at(n);
        });
        ys.words[e] = pack.words[0];
    }
    columns.store(y + row, ys);
}

// dx, plus ds with ADDS, and this cluster's shares of dw and db, [clusters, N]. Each cluster takes rows at the same
// distance; while it works on one, the next is on its way.
template <typename T, typename W, int EACH, bool IS_RMS, bool ADDS>
__global__ void __launch_bounds__(LARGEST_BLOCK, EACH > 1 ? 1 : 2)
    norm_bwd(const T* x, const W* w, const T* dy, const T* ds, T* dx, float* dw, float* db, long long M, long long N,
             float eps, float offset) {
    constexpr int COUNT = Columns<T, EACH>::COUNT;
    Turns turns;
    Columns<T, EACH> columns(N);
    int cluster = blockIdx.x / cluster_blocks(), clusters = gridDim.x / cluster_blocks();
    long long at = cluster * N, step = clusters * N, end = M * N;
    float share = 1.0f / N, ws[COUNT], dws[COUNT] = {}, dbs[COUNT] = {};
    if (!w) offset = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++)
        columns.weights(w, e, 1.0f).each([&](float weight, int n) {
            ws[e * VECTOR<T> + n] = weight + offset;
            asm volatile("" : "+f"(ws[e * VECTOR<T> + n])); // made once
        });
    Held<T, COUNT> next_x = {}, next_dy = {};
    columns.load(x + at, true, next_x);
    columns.load(dy + at, true, next_dy);
    turns.open();
    for (; at < end; at += step) {
        Held<T, COUNT> xs = next_x, dys = next_dy, dss, dxs;
        bool goes_on = at + step < end;
        columns.load(x + at + step, goes_on, next_x);
        columns.load(dy + at + step, goes_on, next_dy);
        if (ADDS) columns.load(ds + at, true, dss);
        float mean = 0.0f, g_mean = 0.0f, squares = 0.0f, gx = 0.0f;
        if (!IS_RMS) {
            xs.each([&](float x, int n) {
                mean += x;
                g_mean += dys.at(n) * ws[n];
            });
            xs.settle();
            dys.settle();
            float2 sums = turns.sum(mean, g_mean);
            mean = sums.x * share;
            g_mean = sums.y * share;
        }
        xs.each([&](float x, int n) {
            if (!IS_RMS && !columns.has(n)) return;
            squares += (x - mean) * (x - mean);
            gx += dys.at(n) * ws[n] * (x - mean);
        });
        xs.settle();
        dys.settle();
        float2 sums = turns.sum(squares, gx);
        float scale = rsqrtf(sums.x * share + eps), along = sums.y * share * scale * scale;
        float away = -g_mean * scale;
        dxs.fill([&](int n) {
            float g = dys.at(n), h = (xs.at(n) - mean) * scale;
            dws[n] += g * h;
            if (!IS_RMS) dbs[n] += g;
            g = g * ws[n] * scale + away - h * along;
            return ADDS ? g + dss.at(n) : g;
        });
        columns.store(dx + at, dxs);
    }
    columns.store(dw ? dw + cluster * N : dw, dws);
    if (!IS_RMS) columns.store(db ? db + cluster * N : db, dbs);
}
