// A matrix transposed into new memory. A block takes a tile of 32 x 32 in by rows and gives it out by rows, so that both
// ways through memory are whole lines; in between the tile stands in shared memory, is written there by rows and read by
// columns. The kernels differ in nothing but where an element of the tile stands.
#include "dtypes.cuh"

constexpr int SIDE = 32, WARPS = 8, EACH = SIDE / WARPS;

// Of 4-byte elements a row fills the 32 banks, so a column stands in a single one, which gives out one word at a time.
template <typename T> struct Plain {
    static constexpr int PITCH = SIDE;
    static __device__ int place(int row, int column) { return row * PITCH + column; }
};

// A word more a row, and the next row begins one bank further: a column goes through all of them.
template <typename T> struct Padded {
    static constexpr int PITCH = SIDE + 4 / sizeof(T);
    static __device__ int place(int row, int column) { return row * PITCH + column; }
};

// Nothing more, but each row in an order of its own. The exclusive or by a row's number moves no two of its elements to
// one place, and no two rows have a column in the same place.
template <typename T> struct Swizzled {
    static constexpr int PITCH = SIDE;
    static __device__ int place(int row, int column) { return row * PITCH + (column ^ row); }
};

// x: [M, N], y: [N, M]; the tiles of x in rows of `tiles`. A warp takes a row of the tile at a time, EACH in all.
template <typename T, template <typename> class Tile>
__global__ void __launch_bounds__(WARPS* SIDE)
    transpose_fwd(const T* x, T* y, long long M, long long N, long long tiles) {
    __shared__ T tile[SIDE * Tile<T>::PITCH];
    const unsigned across = tiles;  // 32 bits, as the grid has: it is divided by
    const long long first_m = blockIdx.x / across * (long long)SIDE, first_n = blockIdx.x % across * (long long)SIDE;
    const int lane = threadIdx.x % SIDE, warp = threadIdx.x / SIDE;
    T held[EACH];
#pragma unroll
    for (int n = 0; n < EACH; n++) {  // all loads before the first store, so that they are in flight together
        const int row = warp + n * WARPS;
        if (first_m + row < M && first_n + lane < N) held[n] = x[(first_m + row) * N + first_n + lane];
    }
#pragma unroll
    for (int n = 0; n < EACH; n++)
        tile[Tile<T>::place(warp + n * WARPS, lane)] = held[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int row = warp + n * WARPS;
        const T turned = tile[Tile<T>::place(lane, row)];
        if (first_n + row < N && first_m + lane < M) y[(first_n + row) * M + first_m + lane] = turned;
    }
}
