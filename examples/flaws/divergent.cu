// Every second element takes another way. The slow way has neighbouring lanes part; the mended one gives each thread a
// pair, so that all lanes go both ways together.

extern "C" __global__ void slow(const float* x, float* y, long n) {
  long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
  if (i >= n) return;
  float v = x[i];
  if (i % 2) {
    for (int k = 0; k < 32; ++k) v = 0.25f * __expf(v) + 0.1f;
  } else {
    for (int k = 0; k < 32; ++k) v = __logf(v * v + 1.5f) - 0.3f;
  }
  y[i] = v;
}

extern "C" __global__ void mended(const float2* x, float2* y, long n) {
  long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
  if (2 * i >= n) return;
  float2 v = x[i];
  for (int k = 0; k < 32; ++k) {
    v.x = __logf(v.x * v.x + 1.5f) - 0.3f;
    v.y = 0.25f * __expf(v.y) + 0.1f;
  }
  y[i] = v;
}
