// What the kernels share: vectors of this CPU's width, and ggml's interface for operations of its own.
#pragma once
#include "ggml-backend.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "simd-mappings.h"
#include "traits.h"

#include <cstdint>

extern "C" void ggml_barrier(ggml_threadpool *);
extern "C" void ggml_threadpool_chunk_set(ggml_threadpool *, int);
extern "C" int  ggml_threadpool_chunk_add(ggml_threadpool *, int);

// The kernel for an operation, or null.
ggml::cpu::tensor_traits * find_attention(const ggml_tensor * op);
ggml::cpu::tensor_traits * find_product(const ggml_tensor * op);

#if defined(__AVX512F__)
#    include <immintrin.h>
#    define LANES 16
#    define PANEL 4 // vectors of a panel: rows × panel are what registers hold
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#    include <immintrin.h>
#    define LANES 8
#    define PANEL 2
#elif defined(__ARM_NEON) && defined(__aarch64__)
#    include <arm_neon.h>
#    define LANES 4
#    define PANEL 4
#endif

#ifdef LANES
typedef float   vec __attribute__((vector_size(LANES * 4)));
typedef float   unaligned __attribute__((vector_size(LANES * 4), aligned(4)));

inline vec load(const float * from) { return (vec) *(const unaligned *) from; }

inline vec load(const ggml_fp16_t * from) {
#    if LANES == 16
    return (vec) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) from));
#    elif LANES == 8
    return (vec) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) from));
#    else
    return (vec) vcvt_f32_f16(vld1_f16((const __fp16 *) from));
#    endif
}

inline void store(float * to, vec value) { *(unaligned *) to = (unaligned) value; }
inline vec  all(float value) { return value - vec{}; }
inline vec  larger(vec a, vec b) { return a > b ? a : b; }

// Lanes of a and then of b: every second from `odd` on; and both mixed, from lane `start` on.
template <int... I> struct Lanes {};
template <int N, int... I> struct Make : Make<N - 1, N - 1, I...> {};
template <int... I> struct Make<0, I...> { using type = Lanes<I...>; };
template <int Odd, int... I> inline vec every_second(vec a, vec b, Lanes<I...>) {
    return __builtin_shufflevector(a, b, (2 * I + Odd)...);
}
template <int Start, int... I> inline vec interleave(vec a, vec b, Lanes<I...>) {
    return __builtin_shufflevector(a, b, (Start + I / 2 + I % 2 * LANES)...);
}
template <int By, int... I> inline vec rotate(vec a, Lanes<I...>) {
    return __builtin_shufflevector(a, a, ((I + By) % LANES)...);
}
using Every = typename Make<LANES>::type;

template <int By = LANES / 2> inline float fold_max(vec a) {
    if constexpr (By == 0) {
        return a[0];
    } else {
        return fold_max<By / 2>(larger(a, rotate<By>(a, Every{})));
    }
}
template <int By = LANES / 2> inline float fold_sum(vec a) {
    if constexpr (By == 0) {
        return a[0];
    } else {
        return fold_sum<By / 2>(a + rotate<By>(a, Every{}));
    }
}
#endif
