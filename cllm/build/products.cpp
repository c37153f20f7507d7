// Products of quantized weights with several tokens, by instructions that add four products of bytes at a time.
//
// ggml computes them row by row where a type has no kernel of its own on a CPU. Here a panel of rows is unpacked once,
// into the order in which the instructions read it, and used for all tokens. Every type is taken as what most of
// them are: blocks of 32 numbers q in a byte each, of which a weight is scale × q + least.
#include "kernels.hpp"

#define GGML_COMMON_DECL_C
#include "ggml-common.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#    define ROWS 16 // of a panel
#    define TOKENS 8 // at once in registers
#    define OFFSET 128 // of signed bytes: the instructions take unsigned weights
#elif defined(LANES) && LANES == 8
#    define ROWS 8
#    define TOKENS 4
#    define OFFSET 128
#elif defined(LANES) && defined(__ARM_FEATURE_DOTPROD)
#    define ROWS 8
#    define TOKENS 4
#    define OFFSET 0
#endif

#ifdef ROWS
namespace {

constexpr int64_t BLOCK   = 32;
constexpr int     VECTORS = ROWS / LANES;     // of a value for each row of the panel
constexpr int     QUADS   = BLOCK / 4;        // of a block: four numbers of a row lie together
constexpr int64_t DEPTH   = 512;             // numbers of a row that are unpacked at a time: they stay in the cache

typedef int32_t ints __attribute__((vector_size(LANES * 4)));

// Those without VNNI add pairs of products in 16 bits, for which numbers of up to five bits are small enough.
#    if defined(__AVX512VNNI__)
inline ints add_products(ints sum, ints weights, const int8_t * tokens) {
    int32_t quad;
    std::memcpy(&quad, tokens, sizeof quad);
    return (ints) _mm512_dpbusd_epi32((__m512i) sum, (__m512i) weights, _mm512_set1_epi32(quad));
}
#    elif LANES == 16
inline ints add_products(ints sum, ints weights, const int8_t * tokens) {
    int32_t quad;
    std::memcpy(&quad, tokens, sizeof quad);
    const __m512i pairs = _mm512_maddubs_epi16((__m512i) weights, _mm512_set1_epi32(quad));
    return sum + (ints) _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#    elif LANES == 8
inline ints add_products(ints sum, ints weights, const int8_t * tokens) {
    int32_t quad;
    std::memcpy(&quad, tokens, sizeof quad);
    const __m256i pairs = _mm256_maddubs_epi16((__m256i) weights, _mm256_set1_epi32(quad));
    return sum + (ints) _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#    else
inline ints add_products(ints sum, ints weights, const int8_t * tokens) {
    int32_t quad;
    std::memcpy(&quad, tokens, sizeof quad);
    return (ints) vdotq_s32((int32x4_t) sum, (int8x16_t) weights, vreinterpretq_s8_s32(vdupq_n_s32(quad)));
}
#    endif

// A block of each row of a panel, unpacked: [quad][row][4], and what a weight is made of.
struct Panel {
    ints  numbers[QUADS * VECTORS];
    float scale[ROWS], least[ROWS];
};

// A block of a token in bytes, and the sum of what they stand for.
struct Token {
    int8_t numbers[BLOCK];
    float  scale, sum;
};

typedef int8_t bytes __attribute__((vector_size(LANES)));

inline ints round(vec value) {
#    if LANES == 16
    return (ints) _mm512_cvtps_epi32((__m512) value);
#    elif LANES == 8
    return (ints) _mm256_cvtps_epi32((__m256) value);
#    else
    return (ints) vcvtnq_s32_f32((float32x4_t) value);
#    endif
}

inline vec to_floats(ints value) { return __builtin_convertvector(value, vec); }

void quantize(Token * to, const float * from, int64_t depth) {
    for (int64_t block = 0; block < depth / BLOCK; block++, from += BLOCK, to++) {
        vec most{}, sum{};
        for (int64_t i = 0; i < BLOCK; i += LANES) {
            most = larger(most, larger(load(from + i), -load(from + i)));
        }
        const float largest = fold_max(most), scale = largest / 127.0f;
        const vec   inverse = all(largest > 0.0f ? 127.0f / largest : 0.0f);
        for (int64_t i = 0; i < BLOCK; i += LANES) {
            const ints  numbers = round(load(from + i) * inverse);
            const bytes narrow  = __builtin_convertvector(numbers, bytes);
            std::memcpy(to->numbers + i, &narrow, sizeof narrow);
            sum += to_floats(numbers);
        }
        to->scale = scale, to->sum = scale * fold_sum(sum);
    }
}

// Readers: the numbers of one block of a row, its scales and its least values. ------------------------------------

inline float real(ggml_half value) { // not from ggml's table, which a cache of this size has better uses for
#    if LANES >= 8
    return _cvtsh_ss(value);
#    else
    __fp16 number;
    std::memcpy(&number, &value, sizeof number);
    return number;
#    endif
}

struct Parts {
    float scale, least;
};

typedef uint8_t half_bytes __attribute__((vector_size(BLOCK / 2)));
typedef uint8_t all_bytes __attribute__((vector_size(BLOCK)));

template <typename T> inline T take(const void * from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline all_bytes read_halves(const uint8_t * from) { // the low halves of bytes, and then the high ones
    const half_bytes both = take<half_bytes>(from);
    return __builtin_shufflevector(both & 15, both >> 4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17,
                                   18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
}

inline all_bytes read_fifth(const uint8_t * bits) { // a bit for each number
    const all_bytes each = { 1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128,
                             1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128 };
    all_bytes all{};
    std::memcpy(&all, bits, 4);
    all = __builtin_shufflevector(all, all, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, // each byte for eight
                                  2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    return (all_bytes) ((all & each) != 0) & 16;
}

template <typename T> Parts read(all_bytes & to, const T * row, int64_t block);

template <> inline Parts read(all_bytes & to, const block_q4_0 * row, int64_t block) {
    to = read_halves(row[block].qs);
    const float scale = real(row[block].d);
    return { scale, -8 * scale };
}

template <> inline Parts read(all_bytes & to, const block_q4_1 * row, int64_t block) {
    to = read_halves(row[block].qs);
    return { real(row[block].d), real(row[block].m) };
}

template <> inline Parts read(all_bytes & to, const block_q5_0 * row, int64_t block) {
    to = read_halves(row[block].qs) | read_fifth(row[block].qh);
    const float scale = real(row[block].d);
    return { scale, -16 * scale };
}

template <> inline Parts read(all_bytes & to, const block_q5_1 * row, int64_t block) {
    to = read_halves(row[block].qs) | read_fifth(row[block].qh);
    return { real(row[block].d), real(row[block].m) };
}

template <> inline Parts read(all_bytes & to, const block_q8_0 * row, int64_t block) {
    to = take<all_bytes>(row[block].qs) + OFFSET;
    const float scale = real(row[block].d);
    return { scale, -OFFSET * scale };
}

// The scale and the least value of a part of a superblock, of six bits each.
inline Parts read_six(const uint8_t * packed, int64_t part, float scale, float least) {
    const int low = part < 4 ? packed[part] & 63 : (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
    const int high = part < 4 ? packed[part + 4] & 63 : packed[part + 4] >> 4 | (packed[part] >> 6) << 4;
    return { scale * low, -least * high };
}

inline all_bytes read_nibbles(const uint8_t * from, int shift) { return take<all_bytes>(from) >> shift & 15; }

template <> inline Parts read(all_bytes & to, const block_q4_K * row, int64_t block) {
    const block_q4_K & super = row[block / 8];
    const int64_t      part  = block % 8;
    to = read_nibbles(super.qs + part / 2 * BLOCK, part % 2 * 4);
    return read_six(super.scales, part, real(super.d), real(super.dmin));
}

template <> inline Parts read(all_bytes & to, const block_q5_K * row, int64_t block) {
    const block_q5_K & super = row[block / 8];
    const int64_t      part  = block % 8;
    const all_bytes fifth = take<all_bytes>(super.qh) >> part & 1;
    to = read_nibbles(super.qs + part / 2 * BLOCK, part % 2 * 4) | fifth << 4;
    return read_six(super.scales, part, real(super.d), real(super.dmin));
}

// Panels ----------------------------------------------------------------------------------------------------------

template <typename T> void unpack(Panel & to, const char * rows, size_t stride, int64_t block) {
    alignas(64) all_bytes tile[ROWS];
    for (int row = 0; row < ROWS; row++) {
        const Parts parts = read<T>(tile[row], (const T *) (rows + row * stride), block);
        to.scale[row] = parts.scale, to.least[row] = parts.least;
    }
    // From [row][quad] to [quad][row]: each stage turns the digits of an index by one.
    vec from[QUADS * VECTORS], next[QUADS * VECTORS];
    for (int i = 0; i < QUADS * VECTORS; i++) {
        from[i] = load((const float *) tile + i * LANES);
    }
    for (int stage = 1; stage < ROWS; stage *= 2) {
        for (int i = 0; i < QUADS * VECTORS / 2; i++) {
            next[2 * i]     = interleave<0>(from[i], from[i + QUADS * VECTORS / 2], Every{});
            next[2 * i + 1] = interleave<LANES / 2>(from[i], from[i + QUADS * VECTORS / 2], Every{});
        }
        for (int i = 0; i < QUADS * VECTORS; i++) {
            from[i] = next[i];
        }
    }
    for (int i = 0; i < QUADS * VECTORS; i++) {
        to.numbers[i] = (ints) from[i];
    }
}

// to[N tokens][ROWS] (+)= the panel's blocks × N tokens
template <int N>
inline void multiply(float * to, int64_t width, const Panel * panel, const Token * tokens, int64_t stride,
                     int64_t blocks, bool adds) {
    vec sum[N][VECTORS];
    for (int n = 0; n < N; n++) {
        for (int v = 0; v < VECTORS; v++) {
            sum[n][v] = adds ? load(to + n * width + v * LANES) : vec{};
        }
    }
    for (int64_t block = 0; block < blocks; block++) {
        ints found[N][VECTORS] = {};
#    pragma GCC unroll 8
        for (int quad = 0; quad < QUADS; quad++) {
            for (int v = 0; v < VECTORS; v++) {
                const ints weights = panel[block].numbers[quad * VECTORS + v];
                for (int n = 0; n < N; n++) {
                    found[n][v] = add_products(found[n][v], weights, tokens[n * stride + block].numbers + 4 * quad);
                }
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            const vec scale = load(panel[block].scale + v * LANES), least = load(panel[block].least + v * LANES);
            for (int n = 0; n < N; n++) {
                const Token & token = tokens[n * stride + block];
                sum[n][v] += to_floats(found[n][v]) * (scale * all(token.scale)) + least * all(token.sum);
            }
        }
    }
    for (int n = 0; n < N; n++) {
        for (int v = 0; v < VECTORS; v++) {
            store(to + n * width + v * LANES, sum[n][v]);
        }
    }
}

void multiply_all(float * to, int64_t width, const Panel * panel, const Token * tokens, int64_t count,
                  int64_t stride, int64_t blocks, bool adds) {
    for (; count >= TOKENS; count -= TOKENS, to += TOKENS * width, tokens += TOKENS * stride) {
        multiply<TOKENS>(to, width, panel, tokens, stride, blocks, adds);
    }
    for (; count >= 2; count -= 2, to += 2 * width, tokens += 2 * stride) {
        multiply<2>(to, width, panel, tokens, stride, blocks, adds);
    }
    if (count) {
        multiply<1>(to, width, panel, tokens, stride, blocks, adds);
    }
}

// One or two tokens do not pay for unpacking. Their blocks are laid out in pairs, as Q4_1 has its numbers: the low
// halves of two blocks are a vector, and then the high ones.
#    if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr int LINES = 4; // rows at once

struct Pair {
    int8_t numbers[2][BLOCK];
    float  scale[2][2]; // of each block, and the sum of what its numbers stand for
};
static_assert(sizeof(Pair) == 2 * sizeof(Token));

void pair_up(Pair * to, int64_t pairs) { // in place of tokens
    for (int64_t pair = 0; pair < pairs; pair++) {
        const Token * const tokens = (const Token *) (to + pair);
        Pair                both;
        for (int block = 0; block < 2; block++) {
            for (int part = 0; part < 2; part++) {
                std::memcpy(both.numbers[part] + block * BLOCK / 2, tokens[block].numbers + part * BLOCK / 2, BLOCK / 2);
            }
            both.scale[block][0] = tokens[block].scale, both.scale[block][1] = tokens[block].sum;
        }
        to[pair] = both;
    }
}

inline __m256i half(const void * low, const void * high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) low)),
                                   _mm_loadu_si128((const __m128i *) high), 1);
}

template <int N> // to[N tokens][LINES]
void multiply_rows(float * to, int64_t width, const char * rows, size_t stride, const Pair * tokens, int64_t pairs) {
    const __m256i nibble = _mm256_set1_epi8(15), each = _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2);
    __m256        sum[N][LINES];
    __m128        least[N][LINES]; // in lanes 1 and 3
    for (int n = 0; n < N; n++) {
        for (int row = 0; row < LINES; row++) {
            sum[n][row] = _mm256_setzero_ps(), least[n][row] = _mm_setzero_ps();
        }
    }
    for (int64_t pair = 0; pair < pairs; pair++) {
#        pragma GCC unroll 4
        for (int row = 0; row < LINES; row++) {
            const block_q4_1 * const blocks = (const block_q4_1 *) (rows + row * stride) + 2 * pair;
            const __m256i both = half(blocks[0].qs, blocks[1].qs);
            const __m256i low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
            const __m128i parts = _mm_insert_epi32(_mm_loadu_si32(&blocks[0].d), take<int32_t>(&blocks[1].d), 1);
            for (int n = 0; n < N; n++) {
                const Pair &  token = tokens[n * pairs + pair];
                const __m256i begun = _mm256_dpbusd_epi32(_mm256_setzero_si256(), low, take<__m256i>(token.numbers[0]));
                const __m256i found = _mm256_dpbusd_epi32(begun, high, take<__m256i>(token.numbers[1]));
                const __m128  scale = _mm_mul_ps(_mm_cvtph_ps(parts), _mm_loadu_ps(token.scale[0]));
                const __m256  wide  = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(scale), each);
                sum[n][row]   = _mm256_fmadd_ps(_mm256_cvtepi32_ps(found), wide, sum[n][row]);
                least[n][row] = _mm_add_ps(least[n][row], scale);
            }
        }
    }
    for (int n = 0; n < N; n++) {
        for (int row = 0; row < LINES; row++) {
            const vec all = (vec) _mm512_castps256_ps512(sum[n][row]);
            to[n * width + row] = fold_sum<LANES / 4>(all) + least[n][row][1] + least[n][row][3];
        }
    }
}

// Each thread lays the tokens out for itself, so none waits for another one.
struct FewProducts : ggml::cpu::tensor_traits {
    bool work_size(int threads, const ggml_tensor * op, size_t & size) override {
        size = threads * ggml_nelements(op->src[1]) / BLOCK * sizeof(Token);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const ggml_tensor *weights = op->src[0], *input = op->src[1];
        const int64_t      tokens = ggml_nrows(input), depth = weights->ne[0], pairs = depth / BLOCK / 2;
        Pair * const       taken = (Pair *) params->wdata + params->ith * tokens * pairs;
        for (int64_t token = 0; token < tokens; token++) {
            quantize((Token *) (taken + token * pairs), (const float *) input->data + token * depth, depth);
            pair_up(taken + token * pairs, pairs);
        }
        const int64_t count = weights->ne[1] / LINES, end = count * (params->ith + 1) / params->nth;
        for (int64_t number = count * params->ith / params->nth; number < end; number++) {
            const char * rows = (const char *) weights->data + number * LINES * weights->nb[1];
            float *      to   = (float *) op->data + number * LINES;
            (tokens == 1 ? multiply_rows<1> : multiply_rows<2>) (to, op->ne[0], rows, weights->nb[1], taken, pairs);
        }
        return true;
    }
};

ggml::cpu::tensor_traits * find_few(const ggml_tensor * weights, int64_t tokens) {
    static FewProducts products;
    return weights->type == GGML_TYPE_Q4_1 && tokens <= 2 && weights->ne[0] % (2 * BLOCK) == 0 ? &products : nullptr;
}
#    else
ggml::cpu::tensor_traits * find_few(const ggml_tensor *, int64_t) { return nullptr; }
#    endif

template <typename T> struct Product : ggml::cpu::tensor_traits {
    bool work_size(int threads, const ggml_tensor * op, size_t & size) override {
        const int64_t blocks = ggml_nrows(op->src[1]) * op->src[0]->ne[0] / BLOCK;
        size = blocks * sizeof(Token) + 64 + threads * (DEPTH / BLOCK) * sizeof(Panel);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const ggml_tensor *weights = op->src[0], *input = op->src[1];
        const int64_t      tokens = ggml_nrows(input), depth = weights->ne[0], blocks = depth / BLOCK;
        Token *            taken = (Token *) params->wdata;
        for (int64_t token = params->ith; token < tokens; token += params->nth) {
            quantize(taken + token * blocks, (const float *) input->data + token * depth, depth);
        }
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
        const uintptr_t line   = alignof(Panel);
        Panel * const   panels = (Panel *) (((uintptr_t) (taken + tokens * blocks) + line - 1) / line * line) +
                               params->ith * (DEPTH / BLOCK);
        const int64_t count = weights->ne[1] / ROWS, part = std::max<int64_t>(1, count / (8 * params->nth));
        for (int64_t unit = params->ith; unit * part < count;
             unit = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            for (int64_t number = unit * part; number < std::min(count, (unit + 1) * part); number++) {
                const char * rows = (const char *) weights->data + number * ROWS * weights->nb[1];
                float *      to   = (float *) op->data + number * ROWS;
                for (int64_t first = 0; first < blocks; first += DEPTH / BLOCK) {
                    const int64_t some = std::min(DEPTH / BLOCK, blocks - first);
                    for (int64_t block = 0; block < some; block++) {
                        unpack<T>(panels[block], rows, weights->nb[1], first + block);
                    }
                    multiply_all(to, op->ne[0], panels, taken + first, tokens, blocks, some, first > 0);
                }
            }
        }
        return true;
    }
};

// Where ggml has no kernel for several tokens, a few pay for unpacking; beside one of its own, more do.
template <typename T> ggml::cpu::tensor_traits * find(int64_t tokens, int64_t least) {
    static Product<T> product;
    return tokens >= least ? &product : nullptr;
}

} // namespace

ggml::cpu::tensor_traits * find_product(const ggml_tensor * op) {
    if (op->op != GGML_OP_MUL_MAT) {
        return nullptr;
    }
    const ggml_tensor *weights = op->src[0], *input = op->src[1];
    const int64_t      tokens = ggml_nrows(input);
    // Weights that were laid out anew are in buffers that are not the host's, and have kernels of their own.
    if (weights->ne[1] % ROWS != 0 || weights->ne[0] % BLOCK != 0 || weights->ne[2] * weights->ne[3] != 1 ||
        weights->nb[0] != ggml_type_size(weights->type) || input->type != GGML_TYPE_F32 || !ggml_is_contiguous(input) ||
        op->type != GGML_TYPE_F32 || !ggml_is_contiguous(op) ||
        (weights->buffer && !ggml_backend_buffer_is_host(weights->buffer))) {
        return nullptr;
    }
    if (auto * few = find_few(weights, tokens)) {
        return few;
    }
    switch (weights->type) {
        case GGML_TYPE_Q4_1: return find<block_q4_1>(tokens, LANES == 16 ? 3 : 8);
        case GGML_TYPE_Q5_1: return find<block_q5_1>(tokens, LANES == 16 ? 3 : 8);
#    if defined(__AVX512VNNI__) // elsewhere ggml's kernels for these are as good, or were not measured
        case GGML_TYPE_Q4_0: return find<block_q4_0>(tokens, 12);
        case GGML_TYPE_Q5_0: return find<block_q5_0>(tokens, 12);
        case GGML_TYPE_Q8_0: return find<block_q8_0>(tokens, 12);
        case GGML_TYPE_Q4_K: return find<block_q4_K>(tokens, 32);
        case GGML_TYPE_Q5_K: return find<block_q5_K>(tokens, 64);
#    endif
        default: return nullptr;
    }
}
#else
ggml::cpu::tensor_traits * find_product(const ggml_tensor *) { return nullptr; }
#endif
