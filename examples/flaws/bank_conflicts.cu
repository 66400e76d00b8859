// A matrix of n x n floats transposed, a tile of 32 x 32 a block of 256 threads. The slow way reads columns of a tile
// whose rows are 32 words long: all lanes of a warp at one bank. The mended one has a word more in each row.

constexpr int SIDE = 32, WARPS = 8;

template <int PITCH>
__device__ void transpose(const float* x, float* y, int n) {
  __shared__ float tile[SIDE][PITCH];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int left = blockIdx.x % (n / SIDE) * SIDE, top = blockIdx.x / (n / SIDE) * SIDE;
  for (int k = 0; k < SIDE; k += WARPS) tile[warp + k][lane] = x[(long)(top + warp + k) * n + left + lane];
  __syncthreads();
  for (int k = 0; k < SIDE; k += WARPS) y[(long)(left + warp + k) * n + top + lane] = tile[lane][warp + k];
}

extern "C" __global__ void slow(const float* x, float* y, int n) { transpose<SIDE>(x, y, n); }

extern "C" __global__ void mended(const float* x, float* y, int n) { transpose<SIDE + 1>(x, y, n); }
