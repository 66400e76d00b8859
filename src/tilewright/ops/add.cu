// Elementwise sum of two tensors.
#include "elementwise.cuh"

template <typename T> __global__ void add_fwd(const T* x, const T* y, T* out, long long N) {
    map({x, y}, out, N, [](const float (&in)[2]) { return in[0] + in[1]; });
}
