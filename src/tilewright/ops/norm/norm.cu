// Rows brought to one size, and the gradients of that. A cluster of blocks holds a row in registers, so each row is
// read once and written once; backward also keeps the sums over its rows there. Rows are whole 16-byte packs.
#include "rows.cuh"

constexpr int LARGEST_BLOCK = 512, LARGEST_CLUSTER = 8; // threads, blocks
template <bool ALONE> using Turns = Exchange<LARGEST_BLOCK / WARP * LARGEST_CLUSTER, ALONE>;

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

    // Keeps the elements packed until they are used again, where there are too many for them to stay floats.
    __device__ __forceinline__ void settle(int most) {
        if (COUNT / VECTOR<T> <= most) return;
#pragma unroll
        for (int p = 0; p < COUNT / VECTOR<T>; p++)
#pragma unroll
            for (int w = 0; w < 4; w++) asm volatile("" : "+r"(words[p].at[w]));
    }
};

// (x - mean) scale. For half types by one instruction: where that cancels, they had too few digits before.
template <typename T> __device__ __forceinline__ float centered(float x, float mean, float scale) {
    return sizeof(T) == 2 ? fmaf(x, scale, -mean * scale) : (x - mean) * scale;
}

// The columns of a thread, the same ones of every row. The blocks that hold a row take pieces of it, one after the other,
// their threads packs in turn.
template <typename T, int EACH, bool ALONE> struct Columns {
    static constexpr int COUNT = EACH * VECTOR<T>;
    int start, end; // where this thread's first pack begins, and where this block's piece ends

    __device__ __forceinline__ Columns(int N) {
        using Row = Holders<ALONE>;
        int blocks = Row::blocks(), piece = (N / VECTOR<T> + blocks - 1) / blocks, first = Row::rank() * piece;
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
        for (int e = 0; e < EACH; e++) load_words(row + first(e), is_there && first(e) < end, held.words[e]);
    }

    __device__ __forceinline__ void store(T* row, const Held<T, COUNT>& held) const {
#pragma unroll
        for (int e = 0; e < EACH; e++) store(row, e, held.words[e]);
    }

    __device__ __forceinline__ void store(T* row, int e, const Words& pack) const {
        if (first(e) < end) store_words(row + first(e), pack);
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

    // Has the next addresses made anew; the compiler would rather keep them, and spill.
    __device__ __forceinline__ void settle() { asm volatile("" : "+r"(start)); }

    __device__ __forceinline__ void store(float* row, const float (&sums)[COUNT]) const {
        if (!row) return;
#pragma unroll
        for (int n = 0; n < COUNT; n += VECTOR<float>)
            if (has(n))
                *reinterpret_cast<float4*>(row + first(n / VECTOR<T>) + n % VECTOR<T>) =
                    float4{sums[n], sums[n + 1], sums[n + 2], sums[n + 3]};
    }
};

// Threads of a block at most, and how many such blocks a multiprocessor takes.
template <int EACH> constexpr int FORWARD_BLOCK = EACH == 4 ? LARGEST_BLOCK / 2 : LARGEST_BLOCK;
template <int EACH, bool ADDS> constexpr int FORWARD_BLOCKS = EACH == 4 ? 5 - ADDS : EACH == 2 ? 3 : 2;

// y = (x - mean) scale (offset + w) + b, scale = 1 / sqrt(mean (x - mean)² + eps); with ADDS of s = x + r, which is
// written too. IS_RMS takes 0 for the mean. `stats`, where given, takes (mean, scale) of each row. A cluster has one row;
// it finds its weights in the near cache, where the last row's block has left them.
template <typename T, typename W, int EACH, bool IS_RMS, bool ADDS>
__global__ void __launch_bounds__(FORWARD_BLOCK<EACH>, (FORWARD_BLOCKS<EACH, ADDS>))
    norm_fwd(const T* x, const T* r, const W* w, const W* b, T* y, T* s, float2* stats, long long N, float eps,
             float offset) {
    constexpr int COUNT = Columns<T, EACH, false>::COUNT;
    Turns<false> turns;
    Columns<T, EACH, false> columns(N);
    long long row = cluster_number(), at = row * N;
    float share = 1.0f / N;
    Held<T, COUNT> xs = {}, rs = {};
    columns.load(x + at, true, xs);
    if (ADDS) columns.load(r + at, true, rs);
    if (!w) offset = 0.0f;
    turns.open();
    if (ADDS) {
        Held<T, COUNT> sums;
        sums.fill([&](int n) { return xs.at(n) + rs.at(n); });
        columns.store(s + at, xs = sums);
    }
    float mean = 0.0f, squares = 0.0f;
    if (!IS_RMS) {
        xs.each([&](float x, int) { mean += x; });
        xs.settle(2);
        mean = turns.sum(mean, 0.0f).x * share;
    }
    xs.each([&](float x, int n) {
        if (IS_RMS || columns.has(n)) squares += (x - mean) * (x - mean);
    });
    xs.settle(2);
    float scale = rsqrtf(turns.sum(squares, 0.0f).x * share + eps);
    if (stats && columns.start == 0) stats[row] = {mean, scale};
    columns.settle();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        auto ws = columns.weights(w, e, 1.0f), bs = IS_RMS ? ws : columns.weights(b, e, 0.0f);
        Held<T, VECTOR<T>> pack;
        pack.fill([&](int n) {
            float normed = centered<T>(xs.at(e * VECTOR<T> + n), mean, scale);
            return IS_RMS ? normed * (ws.at(n) + offset) : normed * ws.at(n) + bs.at(n);
        });
        columns.store(y + at, e, pack.words[0]);
    }
}

// The weights of a thread's columns in shared memory, where they take no registers.
template <typename T, typename W, int EACH> struct Weights {
    static constexpr int IN_PACK = VECTOR<T> / VECTOR<W>;
    Words* memory;

    // On their way until `wait`; without weights all are `other`.
    template <typename Of> __device__ __forceinline__ Weights(const Of& columns, const W* all, float other) {
        extern __shared__ Words launch_memory[];
        memory = launch_memory + threadIdx.x;
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int p = 0; p < IN_PACK; p++)
                if (all) copy_words(place(e, p), all + columns.first(e) + p * VECTOR<W>, columns.first(e) < columns.end);
                else *place(e, p) = columns.weights(all, e, other).words[p];
    }

    __device__ __forceinline__ void wait() const { asm volatile("cp.async.wait_all;" ::: "memory"); }

    // Those of pack e.
    __device__ __forceinline__ Held<W, VECTOR<T>> of(int e) const {
        Held<W, VECTOR<T>> pack;
#pragma unroll
        for (int p = 0; p < IN_PACK; p++) pack.words[p] = *place(e, p);
        return pack;
    }

  private:
    __device__ __forceinline__ Words* place(int e, int p) const { return memory + (e * IN_PACK + p) * blockDim.x; }
};

// Registers of a thread at most: as few as spill nothing, where that lets more threads reside.
template <int EACH, bool IS_RMS, bool ADDS>
constexpr int BACKWARD_REGISTERS =
    (EACH == 1 ? 56 : 72) + 8 * EACH * !IS_RMS + (EACH == 1 ? 0 : 8 * ADDS);

// Lets the kernel that adds up the shares come to the GPU, where it waits for this one to end.
__device__ __forceinline__ void let_follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// dx, plus ds with ADDS, and shares of dw and db, one for each that holds rows, from what forward left in `stats`. Each
// takes rows at the same distance, `left` of them; while it works on one, the next is on its way.
template <typename T, typename W, int EACH, bool IS_RMS, bool ADDS, bool ALONE>
__global__ void __maxnreg__((BACKWARD_REGISTERS<EACH, IS_RMS, ADDS>))
    norm_bwd(const T* x, const W* w, const float2* stats, const T* dy, const T* ds, T* dx, float* dw, float* db,
             long long M, long long N, float offset) {
    let_follow();
    constexpr int COUNT = Columns<T, EACH, ALONE>::COUNT;
    using Row = Holders<ALONE>;
    Turns<ALONE> turns;
    Columns<T, EACH, ALONE> columns(N);
    int left = (M - Row::number() + Row::count() - 1) / Row::count();
    long long at = Row::number() * N, step = Row::count() * N;
    float share = 1.0f / N, dws[COUNT] = {}, dbs[COUNT] = {};
    Held<T, COUNT> next_x = {}, next_dy = {};
    columns.load(x + at, left, next_x);
    columns.load(dy + at, left, next_dy);
    stats += Row::number();
    float2 next_stats = left ? *stats : float2{};
    Weights<T, W, EACH> weights(columns, w, 1.0f);
    if (!w) offset = 0.0f;
    weights.wait();
    turns.open();
    for (; left; at += step) {
        Held<T, COUNT> xs = next_x, dys = next_dy, dss;
        float mean = IS_RMS ? 0.0f : next_stats.x, scale = next_stats.y, gh = 0.0f, gs = 0.0f;
        left--;
        columns.settle();
        columns.load(x + at + step, left, next_x);
        columns.load(dy + at + step, left, next_dy);
        stats += Row::count();
        if (left) next_stats = *stats;
        if (ADDS) columns.load(ds + at, true, dss);
#pragma unroll
        for (int e = 0; e < EACH; e++) { // past the end of the row dy is 0
            auto ws = weights.of(e);
#pragma unroll
            for (int v = 0; v < VECTOR<T>; v++) {
                int n = e * VECTOR<T> + v;
                float g = dys.at(n), h = centered<T>(xs.at(n), mean, scale), along = g * (IS_RMS ? ws.at(v) + offset : ws.at(v));
                gh += along * h;
                dws[n] += g * h;
                if (IS_RMS) continue;
                gs += along;
                dbs[n] += g;
            }
        }
        xs.settle(1);
        dys.settle(1);
        float2 sums = turns.sum(gh, gs);
        float along = sums.x * share * scale, away = -sums.y * share * scale;
        columns.settle();
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            auto ws = weights.of(e);
            Held<T, VECTOR<T>> pack;
            pack.fill([&](int v) {
                int n = e * VECTOR<T> + v;
                float g = dys.at(n) * (IS_RMS ? ws.at(v) + offset : ws.at(v)) * scale + away;
                g -= centered<T>(xs.at(n), mean, scale) * along;
                return ADDS ? g + dss.at(n) : g;
            });
            columns.store(dx + at, e, pack.words[0]);
        }
    }
    columns.store(dw ? dw + Row::number() * N : dw, dws);
    if (!IS_RMS) columns.store(db ? db + Row::number() * N : db, dbs);
}
