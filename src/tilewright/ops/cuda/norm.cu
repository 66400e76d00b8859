// Rows brought to one size, and the gradients of that. A cluster of blocks holds a row in registers, so each row is
// read once and written once; backward also keeps the sums over its rows there. Rows are whole 16-byte packs.
#include "rows.cuh"

constexpr int LARGEST_BLOCK = 512, LARGEST_CLUSTER = 8; // threads, blocks
using Turns = Exchange<LARGEST_BLOCK / WARP * LARGEST_CLUSTER>;

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

// The columns of a thread, the same ones of every row. The blocks of a cluster take pieces of a row, one after the
// other, their threads packs in turn.
template <typename T, int EACH> struct Columns {
    static constexpr int COUNT = EACH * VECTOR<T>;
    int start, end; // where this thread's first pack begins, and where this block's piece ends

    __device__ __forceinline__ Columns(int N) {
        int first = cluster_rank() * piece(N);
        start = first + threadIdx.x * VECTOR<T>;
        end = min(first + piece(N), N);
    }

    // What a block takes of a row of N.
    static __device__ __forceinline__ int piece(int N) {
        int blocks = cluster_blocks();
        return (N / VECTOR<T> + blocks - 1) / blocks * VECTOR<T>;
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

// Rows of some tensors on their way, AHEAD of them while one is used. They come to shared memory, where each thread has its
// own packs, since registers are better used by more threads; with none ahead, to registers.
template <typename T, int EACH, int TENSORS, int AHEAD> struct Coming {
    using Packs = Held<T, EACH * VECTOR<T>>;
    Packs now[AHEAD ? 1 : TENSORS] = {};
    Words* memory;
    int slot = 0;

    __device__ __forceinline__ Coming(Words* memory) : memory(memory + threadIdx.x) {}

    // The next row, which begins `at` so many elements; past the last nothing comes, and zeros past a row's end.
    __device__ __forceinline__ void fetch(const Columns<T, EACH>& columns, const T* const* tensors, long long at,
                                          bool is_there) {
#pragma unroll
        for (int k = 0; k < TENSORS; k++) {
            if (!AHEAD) columns.load(tensors[k] + at, is_there, now[AHEAD ? 0 : k]);
#pragma unroll
            for (int e = 0; e < (AHEAD ? EACH : 0); e++)
                copy_words(place(k, e), tensors[k] + at + columns.first(e), is_there && columns.has(e * VECTOR<T>));
        }
        if (AHEAD) asm volatile("cp.async.commit_group;" ::: "memory");
        if (AHEAD && ++slot == SLOTS) slot = 0; // where the next to use lies, when AHEAD + 1 are on their way
    }

    __device__ __forceinline__ void wait() const {
        if (AHEAD) asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD) : "memory");
    }

    __device__ __forceinline__ Packs row_of(int k) const {
        Packs held = now[AHEAD ? 0 : k];
#pragma unroll
        for (int e = 0; e < (AHEAD ? EACH : 0); e++) held.words[e] = *place(k, e);
        return held;
    }

  private:
    static constexpr int SLOTS = AHEAD + 1;

    __device__ __forceinline__ Words* place(int k, int e) const {
        return memory + ((slot * TENSORS + k) * EACH + e) * blockDim.x;
    }
};

// The mean of a row and its squared distance from it, in one turn: each warp tells its own mean and squares, which are
// those of the row but for the distance between the means.
template <typename T, int EACH> struct Moments {
    float* counts; // elements of each warp of the cluster
    float share;   // of one element in this warp's mean

    __device__ __forceinline__ void prepare(const Columns<T, EACH>& columns, int N, const Turns& turns) {
        __shared__ float all_counts[LARGEST_BLOCK / WARP * LARGEST_CLUSTER];
        counts = all_counts;
        int threads = blockDim.x, in_block = threads / WARP;
        for (int n = threadIdx.x; n < turns.warps(); n += threads) {
            int before = n / in_block * columns.piece(N), packs = min(columns.piece(N), N - before) / VECTOR<T>;
            int count = 0;
            for (int e = 0; e < EACH; e++) count += max(0, min(WARP, packs - e * threads - n % in_block * WARP));
            counts[n] = count * VECTOR<T>;
        }
        __syncthreads();
        float count = counts[cluster_rank() * in_block + threadIdx.x / WARP];
        share = count ? 1.0f / count : 0.0f;
    }

    __device__ __forceinline__ float2 of(Held<T, EACH * VECTOR<T>>& xs, const Columns<T, EACH>& columns, Turns& turns,
                                         float share_of_row) const {
        float mean = 0.0f, squares = 0.0f;
        xs.each([&](float x, int) { mean += x; });
        xs.settle();
        mean = across_warp(mean) * share;
        xs.each([&](float x, int n) {
            if (columns.has(n)) squares += (x - mean) * (x - mean);
        });
        xs.settle();
        const float2* all = turns.told({mean, across_warp(squares)});
        float whole = 0.0f;
        for (int n = threadIdx.x % WARP; n < turns.warps(); n += WARP) whole += counts[n] * all[n].x;
        mean = across_warp(whole) * share_of_row;
        squares = 0.0f;
        for (int n = threadIdx.x % WARP; n < turns.warps(); n += WARP)
            squares += all[n].y + counts[n] * (all[n].x - mean) * (all[n].x - mean);
        return {mean, across_warp(squares)};
    }

  private:
    static __device__ __forceinline__ float across_warp(float value) {
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
        return value;
    }
};

// Threads of a block at most, and how many such blocks a multiprocessor takes.
template <int EACH> constexpr int FORWARD_BLOCK = EACH == 4 ? LARGEST_BLOCK / 2 : LARGEST_BLOCK;
template <int EACH, bool IS_RMS, bool IS_PLAIN>
constexpr int FORWARD_BLOCKS = EACH == 8 ? 1 + IS_RMS : EACH == 4 ? 3 + (IS_RMS || IS_PLAIN) : 2;

// y = (x - mean) scale (offset + w) + b, scale = 1 / sqrt(mean (x - mean)² + eps); with ADDS of s = x + r, which is
// written too. IS_RMS takes 0 for the mean. `stats`, where given, takes (mean, scale) of each row. Every thread keeps its
// own weights in shared memory, where they take no registers. A cluster takes rows at the same distance; with none AHEAD it
// has one.
template <typename T, typename W, int EACH, bool IS_RMS, bool ADDS, int AHEAD>
__global__ void __launch_bounds__(FORWARD_BLOCK<EACH>, (FORWARD_BLOCKS<EACH, IS_RMS, !ADDS && !AHEAD>))
    norm_fwd(const T* x, const T* r, const W* w, const W* b, T* y, T* s, float2* stats, long long M, long long N,
             float eps, float offset) {
    constexpr int IN_PACK = VECTOR<T> / VECTOR<W>, KINDS = IS_RMS ? 1 : 2;
    extern __shared__ Words kept[];
    Turns turns;
    Columns<T, EACH> columns(N);
    int cluster = cluster_number(), clusters = ::clusters();
    long long at = cluster * N, step = clusters * N, end = M * N;
    float share = 1.0f / N;
    const T* const tensors[] = {x, r};
    Coming<T, EACH, 1 + ADDS, AHEAD> coming(kept + KINDS * EACH * IN_PACK * blockDim.x);
    auto fetch = [&](int ahead) { coming.fetch(columns, tensors, at + ahead * step, at + ahead * step < end); };
    for (int ahead = 0; ahead < (AHEAD ? AHEAD : 1); ahead++) fetch(ahead);
    auto place = [&](int kind, int e, int p) -> Words& {
        return kept[((kind * EACH + e) * IN_PACK + p) * blockDim.x + threadIdx.x];
    };
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int p = 0; p < IN_PACK; p++) {
            place(0, e, p) = columns.weights(w, e, 1.0f).words[p];
            if (!IS_RMS) place(1, e, p) = columns.weights(b, e, 0.0f).words[p];
        }
    if (!w) offset = 0.0f;
    if (stats) stats += cluster;
    Moments<T, EACH> moments;
    if (!IS_RMS) moments.prepare(columns, N, turns);
    turns.open();
    for (; at < end; at += step) {
        if (AHEAD) fetch(AHEAD);
        coming.wait();
        auto xs = coming.row_of(0);
        if (ADDS) {
            auto rs = coming.row_of(ADDS);
            xs.fill([&](int n) { return xs.at(n) + rs.at(n); });
            columns.store(s + at, xs);
        }
        float mean = 0.0f, squares = 0.0f;
        if (IS_RMS) {
            xs.each([&](float x, int) { squares += x * x; });
            xs.settle();
            squares = turns.sum(squares, 0.0f).x;
        } else {
            float2 found = moments.of(xs, columns, turns, share);
            mean = found.x;
            squares = found.y;
        }
        float scale = rsqrtf(squares * share + eps);
        if (stats) {
            if (columns.start == 0) *stats = {mean, scale};
            stats += clusters;
        }
        auto ys = xs;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            Held<W, VECTOR<T>> ws, bs;
#pragma unroll
            for (int p = 0; p < IN_PACK; p++) {
                ws.words[p] = place(0, e, p);
                if (!IS_RMS) bs.words[p] = place(1, e, p);
            }
            Held<T, VECTOR<T>> pack;
            pack.fill([&](int n) {
                float normed = (xs.at(e * VECTOR<T> + n) - mean) * scale * (ws.at(n) + offset);
                return IS_RMS ? normed : normed + bs.at(n);
            });
            ys.words[e] = pack.words[0];
        }
        columns.store(y + at, ys);
        if (!AHEAD) break;
    }
}

// Registers of a thread at most: as few as spill nothing, where that lets more threads reside.
template <int EACH, bool IS_RMS, bool ADDS>
constexpr int BACKWARD_REGISTERS = EACH == 1 ? 48 - 8 * IS_RMS : 80 - 16 * IS_RMS + 8 * ADDS;

// dx, plus ds with ADDS, and this cluster's shares of dw and db, [clusters, N], from what forward left in `stats`. Each
// cluster takes rows at the same distance; while it works on one, those AHEAD are on their way.
template <typename T, typename W, int EACH, bool IS_RMS, bool ADDS, int AHEAD>
__global__ void __maxnreg__((BACKWARD_REGISTERS<EACH, IS_RMS, ADDS>))
    norm_bwd(const T* x, const W* w, const float2* stats, const T* dy, const T* ds, T* dx, float* dw, float* db,
             long long M, long long N, float offset) {
    constexpr int COUNT = Columns<T, EACH>::COUNT;
    extern __shared__ Words memory[];
    Turns turns;
    Columns<T, EACH> columns(N);
    int cluster = cluster_number(), clusters = ::clusters();
    long long row = cluster;
    const T* const tensors[] = {x, dy, ds};
    Coming<T, EACH, 2 + ADDS, AHEAD> coming(memory);
    auto fetch = [&](int ahead) {
        long long which = row + ahead * clusters;
        coming.fetch(columns, tensors, which * N, which < M);
    };
    for (int ahead = 0; ahead < AHEAD; ahead++) fetch(ahead);
    float share = 1.0f / N, ws[COUNT], dws[COUNT] = {}, dbs[COUNT] = {};
    if (!w) offset = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++)
        columns.weights(w, e, 1.0f).each([&](float weight, int n) {
            ws[e * VECTOR<T> + n] = weight + offset;
            asm volatile("" : "+f"(ws[e * VECTOR<T> + n])); // made once
        });
    float2 next_stats = stats[cluster];
    turns.open();
    for (; row < M; row += clusters) {
        float mean = IS_RMS ? 0.0f : next_stats.x, scale = next_stats.y, gh = 0.0f, gs = 0.0f;
        fetch(AHEAD);
        if (row + clusters < M) next_stats = stats[row + clusters];
        coming.wait();
        auto xs = coming.row_of(0), dys = coming.row_of(1);
        xs.each([&](float x, int n) { // past the end of the row dy is 0
            float g = dys.at(n), gx = g * ((x - mean) * scale);
            gh += gx * ws[n];
            dws[n] += gx;
            if (IS_RMS) return;
            gs += g * ws[n];
            dbs[n] += g;
        });
        xs.settle();
        dys.settle();
        float2 sums = turns.sum(gh, gs);
        float along = sums.x * share * scale, away = -sums.y * share * scale;
        auto dss = coming.row_of(ADDS ? 2 : 0), dxs = xs;
        dxs.fill([&](int n) {
            float g = dys.at(n) * ws[n] * scale + away - (xs.at(n) - mean) * scale * along;
            return ADDS ? g + dss.at(n) : g;
        });
        columns.store(dx + row * N, dxs);
    }
    columns.store(dw ? dw + cluster * N : dw, dws);
    if (!IS_RMS) columns.store(db ? db + cluster * N : db, dbs);
}
