// RMS norm, layer norm and their gradients. A thread block cluster holds a row in registers, so each row is read once and
// written once; backward also accumulates the weight gradients there. The first row starts at a multiple of 16 bytes. With
// EDGES the others may not: a row is then shifted by the elements between it and the last multiple of 16 bytes before it.
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

// The columns of a thread, the same ones in every row of the same shift. Each block that holds a row takes a contiguous
// part of it, and its threads take the vectors of that part in turn.
template <typename T, int VECTORS, bool ONE_BLOCK, bool EDGES> struct Columns {
    static constexpr int COUNT = VECTORS * VECTOR<T>;
    int start, end; // of this thread's first vector, and of this block's part

    __device__ __forceinline__ Columns(const T* row, int N) {
        using Row = RowBlocks<ONE_BLOCK>;
        int shift = EDGES ? (int)((unsigned long long)row % sizeof(Words)) / (int)sizeof(T) : 0;
        int vectors = (N + (EDGES ? shift + VECTOR<T> - 1 : 0)) / VECTOR<T>;
        int blocks = Row::blocks(), per_block = (vectors + blocks - 1) / blocks, first = Row::rank() * per_block;
        start = (first + threadIdx.x) * VECTOR<T> - shift;
        end = (first + per_block) * VECTOR<T> - shift;
        if (end > N) end = N;
    }

    __device__ __forceinline__ int first(int e) const { return start + e * (int)blockDim.x * VECTOR<T>; }

    // Returns whether some elements of a vector are in the row.
    __device__ __forceinline__ bool overlaps(int e) const { return first(e) < end; }

    // Returns whether all of them are.
    __device__ __forceinline__ bool is_full(int e) const {
        return EDGES ? first(e) >= 0 && first(e) + VECTOR<T> <= end : overlaps(e);
    }

    // Returns whether element n of a thread is in the row.
    __device__ __forceinline__ bool has(int n) const {
        if (!EDGES) return overlaps(n / VECTOR<T>);
        int at = first(n / VECTOR<T>) + n % VECTOR<T>;
        return at >= 0 && at < end;
    }

    // Loads a row; elements past its end keep their value. A vector on the edge of the row is loaded whole: the 16 bytes
    // around an element that exists can be read.
    __device__ __forceinline__ void load(const T* row, bool in_bounds, Elements<T, COUNT>& elements) const {
#pragma unroll
        for (int e = 0; e < VECTORS; e++) load_words(row + first(e), in_bounds && overlaps(e), elements.words[e]);
    }

    // Clears what was loaded around the row.
    __device__ __forceinline__ void clear_edges(Elements<T, COUNT>& elements) const {
        if (!EDGES) return;
#pragma unroll
        for (int e = 0; e < VECTORS; e++) {
            if (is_full(e) || !overlaps(e)) continue;
#pragma unroll
            for (int n = e * VECTOR<T>; n < (e + 1) * VECTOR<T>; n += PER_WORD<T>) {
                unsigned& word = elements.words[e].at[n % VECTOR<T> / PER_WORD<T>];
                if (!has(n)) word = PER_WORD<T> == 1 ? 0 : word & 0xffff0000u;
                if (PER_WORD<T> > 1 && !has(n + 1)) word &= 0xffffu;
            }
        }
    }

    __device__ __forceinline__ void store(T* row, const Elements<T, COUNT>& elements) const {
#pragma unroll
        for (int e = 0; e < VECTORS; e++) store(row, e, elements.words[e]);
    }

    __device__ __forceinline__ void store(T* row, int e, const Words& pack) const {
        if (is_full(e)) store_words(row + first(e), pack);
        if (!EDGES || is_full(e) || !overlaps(e)) return;
#pragma unroll
        for (int v = 0; v < VECTOR<T>; v++)
            if (has(e * VECTOR<T> + v))
                row[first(e) + v] = from_float<T>(element<T>(pack.at[v / PER_WORD<T>], v % PER_WORD<T>));
    }

    // Returns the weights of vector e; `other` without weights.
    template <typename W>
    __device__ __forceinline__ Elements<W, VECTOR<T>> weights(const W* all, int e, float other) const {
        Elements<W, VECTOR<T>> elements;
        elements.fill([=](int) { return other; });
        if (EDGES) {
            elements.fill([&](int v) {
                return all && has(e * VECTOR<T> + v) ? to_float(all[first(e) + v]) : other;
            });
            return elements;
        }
#pragma unroll
        for (int p = 0; p < VECTOR<T> / VECTOR<W>; p++)
            load_words<false>(all + first(e) + p * VECTOR<W>, all && overlaps(e), elements.words[p]);
        return elements;
    }

    // Forces addresses to be recomputed; the compiler would keep them in registers, and spill.
    __device__ __forceinline__ void drop_addresses() { asm volatile("" : "+r"(start)); }

    __device__ __forceinline__ void store(float* row, const float (&sums)[COUNT]) const {
        if (!row) return;
        if (EDGES) {
#pragma unroll
            for (int n = 0; n < COUNT; n++)
                if (has(n)) row[first(n / VECTOR<T>) + n % VECTOR<T>] = sums[n];
            return;
        }
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
    constexpr int COUNT = Columns<T, VECTORS, false, false>::COUNT;
    RowExchange<false> exchange;
    Columns<T, VECTORS, false, false> columns(x, N);
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

// The weights of a thread's columns, in shared memory to save registers; `number` counts several parameters.
template <typename T, typename W, int VECTORS, bool EDGES> struct Weights {
    static constexpr int PER_PACK = VECTOR<T> / VECTOR<W>;
    Words* memory;

    // Copies them asynchronously, until `wait`; without weights all are `other`.
    template <typename Of>
    __device__ __forceinline__ Weights(const Of& columns, const W* all, float other, int number = 0) {
        extern __shared__ Words launch_memory[];
        memory = launch_memory + number * VECTORS * PER_PACK * blockDim.x + threadIdx.x;
#pragma unroll
        for (int e = 0; e < VECTORS; e++)
#pragma unroll
            for (int p = 0; p < PER_PACK; p++)
                if (all && !EDGES) copy_words(slot(e, p), all + columns.first(e) + p * VECTOR<W>, columns.overlaps(e));
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

// The register limit per thread: it leaves room for the next row, and for as many blocks as memory needs.
template <int VECTORS, bool ADDS>
constexpr int UNEVEN_REGISTERS = VECTORS == 8 ? 128 : VECTORS == 4 ? 80 + 24 * ADDS : VECTORS == 2 ? 64 : 48;

// The same for rows that start anywhere. Their weights are not aligned with them, and loading those takes longer than the
// norm; so each cluster strides over `left` rows of one shift, with the weights in shared memory as the rows need them.
// While it computes one row, the next is in flight.
template <typename T, typename W, int VECTORS, bool IS_RMS, bool ADDS, bool ONE_BLOCK>
__global__ void __maxnreg__((UNEVEN_REGISTERS<VECTORS, ADDS>))
    norm_fwd_uneven(const T* x, const T* r, const W* w, const W* b, T* y, T* s, float2* stats, long long M, long long N,
                    float eps, float offset) {
    constexpr int COUNT = Columns<T, VECTORS, ONE_BLOCK, true>::COUNT;
    using Row = RowBlocks<ONE_BLOCK>;
    RowExchange<ONE_BLOCK> exchange;
    Columns<T, VECTORS, ONE_BLOCK, true> columns(x + Row::number() * N, N);
    int left = (M - Row::number() + Row::count() - 1) / Row::count();
    long long row = Row::number(), at = row * N, step = Row::count() * N;
    float inv_N = 1.0f / N;
    Elements<T, COUNT> next_x = {}, next_r = {};
    columns.load(x + at, left, next_x);
    if (ADDS) columns.load(r + at, left, next_r);
    Weights<T, W, VECTORS, true> weights(columns, w, 1.0f), biases(columns, b, 0.0f, 1);
    if (!w) offset = 0.0f;
    exchange.open();
    for (; left; at += step, row += Row::count()) {
        Elements<T, COUNT> xs = next_x, rs = next_r;
        left--;
        columns.drop_addresses();
        columns.load(x + at + step, left, next_x);
        columns.clear_edges(xs);
        if (ADDS) {
            columns.load(r + at + step, left, next_r);
            columns.clear_edges(rs);
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
        auto add_square = [&](int n) { squares += (xs.at(n) - mean) * (xs.at(n) - mean); };
#pragma unroll
        for (int e = 0; e < VECTORS; e++) { // one branch per vector, not per element; what is cleared differs from the mean
            if (IS_RMS || columns.is_full(e)) {
#pragma unroll
                for (int n = e * VECTOR<T>; n < (e + 1) * VECTOR<T>; n++) add_square(n);
            } else if (columns.overlaps(e)) {
#pragma unroll
                for (int n = e * VECTOR<T>; n < (e + 1) * VECTOR<T>; n++)
                    if (columns.has(n)) add_square(n);
            }
        }
        xs.keep_packed(2);
        float scale = rsqrtf(exchange.sum(squares, 0.0f).x * inv_N + eps);
        if (stats && Row::rank() == 0 && threadIdx.x == 0) stats[row] = {mean, scale};
        columns.drop_addresses();
#pragma unroll
        for (int e = 0; e < VECTORS; e++) {
            auto ws = weights.of(e), bs = IS_RMS ? ws : biases.of(e);
            Elements<T, VECTOR<T>> pack;
            pack.fill([&](int n) {
                float normed = centered<T>(xs.at(e * VECTOR<T> + n), mean, scale);
                return IS_RMS ? normed * (ws.at(n) + offset) : normed * ws.at(n) + bs.at(n);
            });
            columns.store(y + at, e, pack.words[0]);
        }
    }
}

// The register limit per thread: the lowest one without spills, where that raises occupancy.
template <int VECTORS, bool IS_RMS, bool ADDS, bool EDGES>
constexpr int BACKWARD_REGISTERS =
    (VECTORS == 1 ? 56 : 72) + 8 * VECTORS * !IS_RMS + (VECTORS == 1 ? 0 : 8 * ADDS) + 8 * EDGES;

// Programmatic dependent launch: lets the kernel that adds the partial sums start, and wait for the end of this one.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// dx, plus ds with ADDS, and partial sums of dw and db, one per cluster or single block, from the `stats` of forward. Each
// strides over `left` rows; while it computes one, the next is in flight.
template <typename T, typename W, int VECTORS, bool IS_RMS, bool ADDS, bool ONE_BLOCK, bool EDGES>
__global__ void __maxnreg__((BACKWARD_REGISTERS<VECTORS, IS_RMS, ADDS, EDGES>))
    norm_bwd(const T* x, const W* w, const float2* stats, const T* dy, const T* ds, T* dx, float* dw, float* db,
             long long M, long long N, float offset) {
    launch_dependents();
    constexpr int COUNT = Columns<T, VECTORS, ONE_BLOCK, EDGES>::COUNT;
    using Row = RowBlocks<ONE_BLOCK>;
    RowExchange<ONE_BLOCK> exchange;
    Columns<T, VECTORS, ONE_BLOCK, EDGES> columns(x + Row::number() * N, N);
    int left = (M - Row::number() + Row::count() - 1) / Row::count();
    long long at = Row::number() * N, step = Row::count() * N;
    float inv_N = 1.0f / N, dws[COUNT] = {}, dbs[COUNT] = {};
    Elements<T, COUNT> next_x = {}, next_dy = {};
    columns.load(x + at, left, next_x);
    columns.load(dy + at, left, next_dy);
    stats += Row::number();
    float2 next_stats = left ? *stats : float2{};
    Weights<T, W, VECTORS, EDGES> weights(columns, w, 1.0f);
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
        columns.clear_edges(xs);
        columns.clear_edges(dys);
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
        // A row of one element has the gradient 0, which a fused multiply-add would miss by the rounding of a product.
        float gh_mean = sums.x * inv_N * scale;
        float g_mean = EDGES ? __fmul_rn(sums.y * inv_N, scale) : sums.y * inv_N * scale;
        columns.drop_addresses();
#pragma unroll
        for (int e = 0; e < VECTORS; e++) {
            auto ws = weights.of(e);
            Elements<T, VECTOR<T>> pack;
            pack.fill([&](int v) {
                int n = e * VECTOR<T> + v;
                float gw = dys.at(n) * (IS_RMS ? ws.at(v) + offset : ws.at(v));
                float g = (EDGES ? __fmul_rn(gw, scale) : gw * scale) - g_mean;
                g -= centered<T>(xs.at(n), mean, scale) * gh_mean;
                return ADDS ? g + dss.at(n) : g;
            });
            columns.store(dx + at, e, pack.words[0]);
        }
    }
    columns.store(dw ? dw + Row::number() * N : dw, dws);
    if (!IS_RMS) columns.store(db ? db + Row::number() * N : db, dbs);
}
