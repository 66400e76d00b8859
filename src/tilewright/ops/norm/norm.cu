// RMS norm, layer norm and their gradients. A thread block cluster holds a row in registers, so each row is read once and
// written once; backward also accumulates the weight gradients there. Rows are a multiple of 16 bytes.
#include "rows.cuh"

constexpr int MAX_BLOCK_THREADS = 512, MAX_CLUSTER = 8; // threads, blocks
template <bool ONE_BLOCK> using RowExchange = Exchange<MAX_BLOCK_THREADS / WARP * MAX_CLUSTER, ONE_BLOCK>;

// The elements of a thread, packed as in memory.
template <typename T, int COUNT> struct Elements {
    Words words[COUNT / VECTOR<T>];

    __device__ __forceinline__ float at(int n) const {
        return element<T>(words[n / VECTOR<T>].at[n % VECTOR<T> / PER_WORD<T>], n % PER_WORD<T>);
    }

    // Calls `use(element, n)` for each element.
    template <typename Use> __device__ __forceinline__ void each(Use use) const {
#pragma unroll
        for (int n = 0; n < COUNT; n++) use(at(n), n);
    }

    // Sets element n to `make(n)`.
    template <typename Make> __device__ __forceinline__ void fill(Make make) {
#pragma unroll
        for (int n = 0; n < COUNT; n += PER_WORD<T>) {
            float low = make(n), high = PER_WORD<T> > 1 ? make(n + 1) : 0.0f;
            words[n / VECTOR<T>].at[n % VECTOR<T> / PER_WORD<T>] = word_of<T>(low, high);
        }
    }

    // Keeps the elements packed until they are used again, if there are more vectors than `max_floats`, too many to stay
    // floats.
    __device__ __forceinline__ void keep_packed(int max_floats) {
        if (COUNT / VECTOR<T> <= max_floats) return;
#pragma unroll
        for (int p = 0; p < COUNT / VECTOR<T>; p++)
#pragma unroll
            for (int w = 0; w < 4; w++) asm volatile("" : "+r"(words[p].at[w]));
    }
};

// (x - mean) scale. For half types a single FMA: where it cancels, the inputs had too few digits anyway.
template <typename T> __device__ __forceinline__ float centered(float x, float mean, float scale) {
    return sizeof(T) == 2 ? fmaf(x, scale, -mean * scale) : (x - mean) * scale;
}

// The columns of a thread, the same ones in every row. Each block that holds a row takes a contiguous part of it, and its
// threads take the vectors of that part in turn.
template <typename T, int VECTORS, bool ONE_BLOCK> struct Columns {
    static constexpr int COUNT = VECTORS * VECTOR<T>;
    int start, end; // of this thread's first vector, and of this block's part

    __device__ __forceinline__ Columns(int N) {
        using Row = RowBlocks<ONE_BLOCK>;
        int blocks = Row::blocks(), per_block = (N / VECTOR<T> + blocks - 1) / blocks, first = Row::rank() * per_block;
        start = (first + threadIdx.x) * VECTOR<T>;
        end = (first + per_block) * VECTOR<T>;
        if (end > N) end = N;
    }

    __device__ __forceinline__ int first(int e) const { return start + e * (int)blockDim.x * VECTOR<T>; }

    // Returns whether element n of a thread is in the row.
    __device__ __forceinline__ bool has(int n) const { return first(n / VECTOR<T>) < end; }

    // Loads a row; elements past its end keep their value.
    __device__ __forceinline__ void load(const T* row, bool in_bounds, Elements<T, COUNT>& elements) const {
#pragma unroll
        for (int e = 0; e < VECTORS; e++) load_words(row + first(e), in_bounds && first(e) < end, elements.words[e]);
    }

    __device__ __forceinline__ void store(T* row, const Elements<T, COUNT>& elements) const {
#pragma unroll
        for (int e = 0; e < VECTORS; e++) store(row, e, elements.words[e]);
    }

    __device__ __forceinline__ void store(T* row, int e, const Words& pack) const {
        if (first(e) < end) store_words(row + first(e), pack);
    }

    // Returns the weights of vector e; `other` without weights.
    template <typename W>
    __device__ __forceinline__ Elements<W, VECTOR<T>> weights(const W* all, int e, float other) const {
        Elements<W, VECTOR<T>> elements;
        elements.fill([=](int) { return other; });
#pragma unroll
        for (int p = 0; p < VECTOR<T> / VECTOR<W>; p++)
            load_words<false>(all + first(e) + p * VECTOR<W>, all && first(e) < end, elements.words[p]);
        return elements;
    }

    // Forces addresses to be recomputed; the compiler would keep them in registers, and spill.
    __device__ __forceinline__ void drop_addresses() { asm volatile("" : "+r"(start)); }

    __device__ __forceinline__ void store(float* row, const float (&sums)[COUNT]) const {
        if (!row) return;
#pragma unroll
        for (int n = 0; n < COUNT; n += VECTOR<float>)
            if (has(n))
                *reinterpret_cast<float4*>(row + first(n / VECTOR<T>) + n % VECTOR<T>) =
                    float4{sums[n], sums[n + 1], sums[n + 2], sums[n + 3]};
    }
};

// The largest block, and the number of such blocks per multiprocessor.
template <int VECTORS> constexpr int FORWARD_BLOCK = VECTORS == 4 ? MAX_BLOCK_THREADS / 2 : MAX_BLOCK_THREADS;
template <int VECTORS, bool ADDS> constexpr int FORWARD_BLOCKS = VECTORS == 4 ? 5 - ADDS : VECTORS == 2 ? 3 : 2;

// y = (x - mean) scale (offset + w) + b, scale = 1 / sqrt(mean (x - mean)² + eps); with ADDS of s = x + r, which is
// stored too. With IS_RMS the mean is 0. `stats`, if given, takes (mean, scale) of each row. A cluster has one row; its
// weights are in L1, where a block of the previous row left them.
template <typename T, typename W, int VECTORS, bool IS_RMS, bool ADDS>
__global__ void __launch_bounds__(FORWARD_BLOCK<VECTORS>, (FORWARD_BLOCKS<VECTORS, ADDS>))
    norm_fwd(const T* x, const T* r, const W* w, const W* b, T* y, T* s, float2* stats, long long N, float eps,
             float offset) {
    constexpr int COUNT = Columns<T, VECTORS, false>::COUNT;
    RowExchange<false> exchange;
    Columns<T, VECTORS, false> columns(N);
    long long row = cluster_number(), at = row * N;
    float inv_N = 1.0f / N;
    Elements<T, COUNT> xs = {}, rs = {};
    columns.load(x + at, true, xs);
    if (ADDS) columns.load(r + at, true, rs);
    if (!w) offset = 0.0f;
    exchange.open();
    if (ADDS) {
        Elements<T, COUNT> sums;
        sums.fill([&](int n) { return xs.at(n) + rs.at(n); });
        columns.store(s + at, xs = sums);
    }
    float mean = 0.0f, squares = 0.0f;
    if (!IS_RMS) {
        xs.each([&](float x, int) { mean += x; });
        xs.keep_packed(2);
        mean = exchange.sum(mean, 0.0f).x * inv_N;
    }
    xs.each([&](float x, int n) {
        if (IS_RMS || columns.has(n)) squares += (x - mean) * (x - mean);
    });
    xs.keep_packed(2);
    float scale = rsqrtf(exchange.sum(squares, 0.0f).x * inv_N + eps);
    if (stats && columns.start == 0) stats[row] = {mean, scale};
    columns.drop_addresses();
#pragma unroll
    for (int e = 0; e < VECTORS; e++) {
        auto ws = columns.weights(w, e, 1.0f), bs = IS_RMS ? ws : columns.weights(b, e, 0.0f);
        Elements<T, VECTOR<T>> pack;
        pack.fill([&](int n) {
            float normed = centered<T>(xs.at(e * VECTOR<T> + n), mean, scale);
            return IS_RMS ? normed * (ws.at(n) + offset) : normed * ws.at(n) + bs.at(n);
        });
        columns.store(y + at, e, pack.words[0]);
    }
}

// The weights of a thread's columns, in shared memory to save registers.
template <typename T, typename W, int VECTORS> struct Weights {
    static constexpr int PER_PACK = VECTOR<T> / VECTOR<W>;
    Words* memory;

    // Copies them asynchronously, until `wait`; without weights all are `other`.
    template <typename Of> __device__ __forceinline__ Weights(const Of& columns, const W* all, float other) {
        extern __shared__ Words launch_memory[];
        memory = launch_memory + threadIdx.x;
#pragma unroll
        for (int e = 0; e < VECTORS; e++)
#pragma unroll
            for (int p = 0; p < PER_PACK; p++)
                if (all) copy_words(slot(e, p), all + columns.first(e) + p * VECTOR<W>, columns.first(e) < columns.end);
                else *slot(e, p) = columns.weights(all, e, other).words[p];
    }

    __device__ __forceinline__ void wait() const { asm volatile("cp.async.wait_all;" ::: "memory"); }

    // Returns the weights of vector e.
    __device__ __forceinline__ Elements<W, VECTOR<T>> of(int e) const {
        Elements<W, VECTOR<T>> pack;
#pragma unroll
        for (int p = 0; p < PER_PACK; p++) pack.words[p] = *slot(e, p);
        return pack;
    }

  private:
    __device__ __forceinline__ Words* slot(int e, int p) const { return memory + (e * PER_PACK + p) * blockDim.x; }
};

// The register limit per thread: the lowest one without spills, where that raises occupancy.
template <int VECTORS, bool IS_RMS, bool ADDS>
constexpr int BACKWARD_REGISTERS =
    (VECTORS == 1 ? 56 : 72) + 8 * VECTORS * !IS_RMS + (VECTORS == 1 ? 0 : 8 * ADDS);

// Programmatic dependent launch: lets the kernel that adds the partial sums start, and wait for the end of this one.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// dx, plus ds with ADDS, and partial sums of dw and db, one per cluster or single block, from the `stats` of forward. Each
// strides over `left` rows; while it computes one, the next is in flight.
template <typename T, typename W, int VECTORS, bool IS_RMS, bool ADDS, bool ONE_BLOCK>
__global__ void __maxnreg__((BACKWARD_REGISTERS<VECTORS, IS_RMS, ADDS>))
    norm_bwd(const T* x, const W* w, const float2* stats, const T* dy, const T* ds, T* dx, float* dw, float* db,
             long long M, long long N, float offset) {
    launch_dependents();
    constexpr int COUNT = Columns<T, VECTORS, ONE_BLOCK>::COUNT;
    using Row = RowBlocks<ONE_BLOCK>;
    RowExchange<ONE_BLOCK> exchange;
    Columns<T, VECTORS, ONE_BLOCK> columns(N);
    int left = (M - Row::number() + Row::count() - 1) / Row::count();
    long long at = Row::number() * N, step = Row::count() * N;
    float inv_N = 1.0f / N, dws[COUNT] = {}, dbs[COUNT] = {};
    Elements<T, COUNT> next_x = {}, next_dy = {};
    columns.load(x + at, left, next_x);
    columns.load(dy + at, left, next_dy);
    stats += Row::number();
    float2 next_stats = left ? *stats : float2{};
    Weights<T, W, VECTORS> weights(columns, w, 1.0f);
    if (!w) offset = 0.0f;
    weights.wait();
    exchange.open();
    for (; left; at += step) {
        Elements<T, COUNT> xs = next_x, dys = next_dy, dss;
        float mean = IS_RMS ? 0.0f : next_stats.x, scale = next_stats.y, gh = 0.0f, gs = 0.0f;
        left--;
        columns.drop_addresses();
        columns.load(x + at + step, left, next_x);
        columns.load(dy + at + step, left, next_dy);
        stats += Row::count();
        if (left) next_stats = *stats;
        if (ADDS) columns.load(ds + at, true, dss);
#pragma unroll
        for (int e = 0; e < VECTORS; e++) { // past the end of the row dy is 0
            auto ws = weights.of(e);
#pragma unroll
            for (int v = 0; v < VECTOR<T>; v++) {
                int n = e * VECTOR<T> + v;
                float g = dys.at(n), h = centered<T>(xs.at(n), mean, scale), gw = g * (IS_RMS ? ws.at(v) + offset : ws.at(v));
                gh += gw * h;
                dws[n] += g * h;
                if (IS_RMS) continue;
                gs += gw;
                dbs[n] += g;
            }
        }
        xs.keep_packed(1);
        dys.keep_packed(1);
        float2 sums = exchange.sum(gh, gs);
        float gh_mean = sums.x * inv_N * scale, g_mean = sums.y * inv_N * scale;
        columns.drop_addresses();
#pragma unroll
        for (int e = 0; e < VECTORS; e++) {
            auto ws = weights.of(e);
            Elements<T, VECTOR<T>> pack;
            pack.fill([&](int v) {
                int n = e * VECTOR<T> + v;
                float g = dys.at(n) * (IS_RMS ? ws.at(v) + offset : ws.at(v)) * scale - g_mean;
                g -= centered<T>(xs.at(n), mean, scale) * gh_mean;
                return ADDS ? g + dss.at(n) : g;
            });
            columns.store(dx + at, e, pack.words[0]);
        }
    }
    columns.store(dw ? dw + Row::number() * N : dw, dws);
    if (!IS_RMS) columns.store(db ? db + Row::number() * N : db, dbs);
}
