// Transposed copy of a matrix. A block loads a 32 x 32 tile by rows and stores it by rows, so that both accesses are
// coalesced; in between the tile is in shared memory, written by rows and read by columns. The kernels differ only in the
// layout of the tile.
#include "dtypes.cuh"

constexpr int TILE = 32, WARPS = 8, ROWS_PER_WARP = TILE / WARPS;

// A row of 4-byte elements spans all 32 banks, so a column is in a single bank, which serves one word at a time.
template <typename T> struct Plain {
    static constexpr int PITCH = TILE;
    static __device__ int offset(int row, int column) { return row * PITCH + column; }
};

// One more word per row: the next row starts one bank later, and a column spans all banks.
template <typename T> struct Padded {
    static constexpr int PITCH = TILE + 4 / sizeof(T);
    static __device__ int offset(int row, int column) { return row * PITCH + column; }
};

// No padding, but each row is permuted: XOR with the row index maps the columns of a row to distinct positions, and a
// column to a different bank in each row.
template <typename T> struct Swizzled {
    static constexpr int PITCH = TILE;
    static __device__ int offset(int row, int column) { return row * PITCH + (column ^ row); }
};

// x: [M, N], y: [N, M]; `tiles` is the number of tiles per row of x. Each warp takes ROWS_PER_WARP rows of the tile.
template <typename T, template <typename> class Layout>
__global__ void __launch_bounds__(WARPS* TILE)
    transpose_fwd(const T* x, T* y, long long M, long long N, long long tiles) {
    __shared__ T tile[TILE * Layout<T>::PITCH];
    const unsigned tiles_n = tiles;  // 32 bits, like the grid, for a cheap division
    const long long first_m = blockIdx.x / tiles_n * (long long)TILE, first_n = blockIdx.x % tiles_n * (long long)TILE;
    const int lane = threadIdx.x % TILE, warp = threadIdx.x / TILE;
    T values[ROWS_PER_WARP];
#pragma unroll
    for (int n = 0; n < ROWS_PER_WARP; n++) {  // all loads before the first store, so that they are in flight together
        const int row = warp + n * WARPS;
        if (first_m + row < M && first_n + lane < N) values[n] = x[(first_m + row) * N + first_n + lane];
    }
#pragma unroll
    for (int n = 0; n < ROWS_PER_WARP; n++)
        tile[Layout<T>::offset(warp + n * WARPS, lane)] = values[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < ROWS_PER_WARP; n++) {
        const int row = warp + n * WARPS;
        const T value = tile[Layout<T>::offset(lane, row)];
        if (first_n + row < N && first_m + lane < M) y[(first_n + row) * M + first_m + lane] = value;
    }
}
