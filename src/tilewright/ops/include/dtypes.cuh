// The three dtypes as C++ types of our own, so that NVRTC needs no headers of a CUDA toolkit.
#pragma once

#define INFINITY __int_as_float(0x7f800000)

struct half {
    unsigned short bits;
};

struct bfloat16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ __forceinline__ float to_float(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }

template <typename T> __device__ __forceinline__ T from_float(float x);

template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }

template <> __device__ __forceinline__ half from_float<half>(float x) {
    half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

template <> __device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
    bfloat16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// The elements of one 16-byte access.
template <typename T> constexpr int VECTOR = 16 / sizeof(T);

template <typename T, int WIDTH = VECTOR<T>> struct alignas(WIDTH * sizeof(T)) Pack {
    T at[WIDTH];
};

__device__ __forceinline__ bool is_aligned(const void* pointer) { return (unsigned long long)pointer % 16 == 0; }

// Keeps lines that are read in L2 longer than those that are written, so that these drain to memory steadily.
__device__ __forceinline__ unsigned long long evict_last_policy() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

template <typename T> __device__ __forceinline__ Pack<T> load_pack(const Pack<T>* pointer) {
    union {
        Pack<T> pack;
        unsigned words[4];
    } value;
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(value.words[0]), "=r"(value.words[1]), "=r"(value.words[2]), "=r"(value.words[3])
                 : "l"(pointer), "l"(evict_last_policy()));
    return value.pack;
}
