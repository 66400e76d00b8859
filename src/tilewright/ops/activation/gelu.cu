// GELU, exact and with the tanh approximation, forward and backward. gelu.py explains the formulas.
#include "elementwise.cuh"

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Tail {
    float probability; // that a standard normal value exceeds |x|
    float bell;        // exp(-x*x / 2)
};

__device__ __forceinline__ Tail normal_tail(float x) {
    float t = reciprocal_approx(1.0f + 0.336f * fabsf(x));
    float p = 0.047817265f;
    p = p * t - 0.22098947f;
    p = p * t + 0.31441771f;
    p = p * t - 0.078385019f;
    p = p * t + 0.1812564f;
    p = p * t + 0.12026365f;
    p = p * t + 0.13570264f;
    p = p * t - 8.3162312e-5f;
    float bell = exp2_approx(x * (-0.72134752f * x));
    return {bell * p, bell};
}

// log2 of the odds s / (1 - s), where gelu = x s
__device__ __forceinline__ float tanh_odds(float x) { return x * (2.3022082f + 0.10294324f * (x * x)); }

struct None {
    __device__ static float gelu(float x) {
        float tail = normal_tail(x).probability;
        return x * (x > 0.0f ? 1.0f - tail : tail);
    }
    __device__ static float slope(float x) {
        Tail tail = normal_tail(x);
        return (x > 0.0f ? 1.0f - tail.probability : tail.probability) + 0.39894228f * (x * tail.bell);
    }
};

struct Tanh {
    __device__ static float gelu(float x) { return x * reciprocal_approx(1.0f + exp2_approx(-tanh_odds(x))); }
    __device__ static float slope(float x) {
        float odds = tanh_odds(x), e = exp2_approx(-fabsf(odds)), larger = reciprocal_approx(1.0f + e);
        float s = odds > 0.0f ? larger : e * larger;
        float near = fminf(fmaxf(x, -16.0f), 16.0f); // outside, e is zero
        return s + e * larger * larger * near * (1.5957691f + 0.21406445f * (near * near));
    }
};

template <typename Form, typename T> __device__ void forward(const T* x, T* y, long long N) {
    map({x}, y, N, [](const float (&in)[1]) { return Form::gelu(in[0]); });
}

template <typename Form, typename T> __device__ void backward(const T* x, const T* dy, T* dx, long long N) {
    map({x, dy}, dx, N, [](const float (&in)[2]) { return in[1] * Form::slope(in[0]); });
}

template <typename T> __global__ void gelu_none_fwd(const T* x, T* y, long long N) { forward<None>(x, y, N); }

template <typename T> __global__ void gelu_tanh_fwd(const T* x, T* y, long long N) { forward<Tanh>(x, y, N); }

template <typename T> __global__ void gelu_none_bwd(const T* x, const T* dy, T* dx, long long N) {
    backward<None>(x, dy, dx, N);
}

template <typename T> __global__ void gelu_tanh_bwd(const T* x, const T* dy, T* dx, long long N) {
    backward<Tanh>(x, dy, dx, N);
}
