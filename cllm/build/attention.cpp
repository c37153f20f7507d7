// Attention on a CPU, in place of ggml's flash attention, which takes a tile of 64 rows of one head or goes row by row.
//
// All heads that share a head of K and V are computed together, so a cell is read and converted once for all of
// them, and a row costs the same in any number of rows. Rows are independent of each other: the same cells give a
// token the same result in every chunk, but where there are a few rows only, or a long context is divided in parts.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#ifdef LANES
namespace {

constexpr int64_t CELLS = 64;  // of a block: its K and V stay in the cache while all rows use them
constexpr int64_t ROWS  = 64;  // of a unit of work, at most: heads × tokens, which share the blocks
constexpr int     BLOCK = 6;   // rows at once in registers
constexpr int     FEW   = 4;   // rows up to which K is not worth being transposed
constexpr int64_t LINE  = 16;  // floats of a cache line

typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

inline vec add_pairs(vec a, vec b) { return every_second<0>(a, b, Every{}) + every_second<1>(a, b, Every{}); }

// e^x to 2e-7, and 0 below -87.
inline vec exponential(vec x) {
    const vec magic = all(12582912.0f);
    const vec shifted = x * all(1.44269504f) + magic;
    const vec n = shifted - magic;
    const vec r = (x - n * all(0.693359375f)) - n * all(-2.12194440e-4f);
    vec y = all(1.9875691500e-4f);
    y = y * r + all(1.3981999507e-3f);
    y = y * r + all(8.3334519073e-3f);
    y = y * r + all(4.1665795894e-2f);
    y = y * r + all(1.6666665459e-1f);
    y = y * r + all(5.0000001201e-1f);
    y = y * r * r + r + all(1.0f);
    const ivec power = ((ivec) shifted << 23) + (ivec) all(1.0f);
    const vec found = y * (vec) power;
    return x < all(-87.0f) ? vec{} : found;
}

inline vec hyperbolic_tangent(vec x) {
    x = x > all(15.0f) ? all(15.0f) : x;
    x = x < all(-15.0f) ? all(-15.0f) : x;
    return all(1.0f) - all(2.0f) / (exponential(x + x) + all(1.0f));
}

// to[M rows][N vectors] = to × kept + a[M][depth] · b[depth][N vectors]
template <int M, int N>
inline void multiply(float * to, int64_t width, const float * a, int64_t depth, const float * b, int64_t b_width,
                     int64_t count, const float * kept) {
    vec sum[M][N];
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N; n++) {
            sum[m][n] = kept ? load(to + m * width + n * LANES) * all(kept[m]) : vec{};
        }
    }
    for (int64_t k = 0; k < count; k++) {
        vec right[N];
        for (int n = 0; n < N; n++) {
            right[n] = load(b + k * b_width + n * LANES);
        }
        for (int m = 0; m < M; m++) {
            const vec left = all(a[m * depth + k]);
            for (int n = 0; n < N; n++) {
                sum[m][n] += left * right[n];
            }
        }
    }
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N; n++) {
            store(to + m * width + n * LANES, sum[m][n]);
        }
    }
}

template <int M>
inline void multiply_rows(float * to, int64_t width, const float * a, int64_t depth, const float * b, int64_t count,
                          const float * kept) {
    int64_t n = 0;
    for (; n + PANEL * LANES <= width; n += PANEL * LANES) {
        multiply<M, PANEL>(to + n, width, a, depth, b + n, width, count, kept);
    }
    for (; n < width; n += LANES) {
        multiply<M, 1>(to + n, width, a, depth, b + n, width, count, kept);
    }
}

// to[rows][width] = to × kept + a[rows][depth] · b[count][width]
void multiply_all(float * to, int64_t rows, int64_t width, const float * a, int64_t depth, const float * b,
                  int64_t count, const float * kept) {
    for (int64_t row = 0; row < rows; row += BLOCK) {
        float *       target = to + row * width;
        const float * left   = a + row * depth;
        const float * keep   = kept ? kept + row : nullptr;
        switch (std::min<int64_t>(BLOCK, rows - row)) {
            case 1: multiply_rows<1>(target, width, left, depth, b, count, keep); break;
            case 2: multiply_rows<2>(target, width, left, depth, b, count, keep); break;
            case 3: multiply_rows<3>(target, width, left, depth, b, count, keep); break;
            case 4: multiply_rows<4>(target, width, left, depth, b, count, keep); break;
            case 5: multiply_rows<5>(target, width, left, depth, b, count, keep); break;
            default: multiply_rows<BLOCK>(target, width, left, depth, b, count, keep);
        }
    }
}

// Scores of M rows and LANES cells, without transposing K: partial sums of cells are folded as they come.
template <int M, typename T>
inline void score(float * to, const float * q, const char * k, int64_t stride, int64_t depth) {
    constexpr int LEVELS = LANES == 16 ? 4 : LANES == 8 ? 3 : 2;
    vec           part[M][LEVELS + 1];
#    pragma GCC unroll 16
    for (int cell = 0; cell < LANES; cell++) {
        const T * from = (const T *) (k + cell * stride);
        vec       sum[M];
        for (int m = 0; m < M; m++) {
            sum[m] = vec{};
        }
        for (int64_t d = 0; d < depth; d += LANES) {
            const vec value = load(from + d);
            for (int m = 0; m < M; m++) {
                sum[m] += value * load(q + m * depth + d);
            }
        }
        int level = 0;
        for (; cell >> level & 1; level++) {
            for (int m = 0; m < M; m++) {
                sum[m] = add_pairs(part[m][level], sum[m]);
            }
        }
        for (int m = 0; m < M; m++) {
            part[m][level] = sum[m];
        }
    }
    for (int m = 0; m < M; m++) {
        store(to + m * CELLS, part[m][LEVELS]);
    }
}

template <typename T>
inline void score_few(int64_t rows, float * to, const float * q, const char * k, int64_t stride, int64_t depth) {
    switch (rows) {
        case 1: score<1, T>(to, q, k, stride, depth); break;
        case 2: score<2, T>(to, q, k, stride, depth); break;
        case 3: score<3, T>(to, q, k, stride, depth); break;
        default: score<FEW, T>(to, q, k, stride, depth);
    }
}

// to[depth][CELLS] from LANES cells of K.
template <typename T> inline void transpose(float * to, const char * k, int64_t stride, int64_t depth) {
    for (int64_t d = 0; d < depth; d += LANES) {
        vec rows[LANES], next[LANES];
#    pragma GCC unroll 16
        for (int cell = 0; cell < LANES; cell++) {
            rows[cell] = load((const T *) (k + cell * stride) + d);
        }
#    pragma GCC unroll 4
        for (int stage = 1; stage < LANES; stage *= 2) {
#    pragma GCC unroll 8
            for (int i = 0; i < LANES / 2; i++) {
                next[2 * i]     = interleave<0>(rows[i], rows[i + LANES / 2], Every{});
                next[2 * i + 1] = interleave<LANES / 2>(rows[i], rows[i + LANES / 2], Every{});
            }
#    pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                rows[i] = next[i];
            }
        }
#    pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            store(to + (d + i) * CELLS, rows[i]);
        }
    }
}

// How an operation is divided: units of a stream, a head of K and V, some tokens, and a part of the cells.
struct Plan {
    int64_t depth, width, tokens, heads, streams, cells, kv_heads, group;
    int64_t tile, tiles, parts, part_cells, rows;

    Plan(const ggml_tensor * op, int threads) {
        const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
        depth = k->ne[0], width = v->ne[0], cells = k->ne[1], kv_heads = k->ne[2];
        tokens = q->ne[1], heads = q->ne[2], streams = q->ne[3];
        group = heads / kv_heads;
        tile  = std::min(tokens, std::max<int64_t>(1, ROWS / group));
        tiles = (tokens + tile - 1) / tile;
        tile  = (tokens + tiles - 1) / tiles;
        rows  = tile * group;
        const int64_t whole = streams * kv_heads * tiles, blocks = (cells + CELLS - 1) / CELLS;
        // Every thread gets two units at least, where that leaves four blocks to each.
        parts      = std::max<int64_t>(1, std::min((2 * threads + whole - 1) / whole, blocks / 4));
        part_cells = (blocks + parts - 1) / parts * CELLS;
        parts      = (cells + part_cells - 1) / part_cells;
    }

    int64_t units() const { return streams * kv_heads * tiles * parts; }

    // Floats that a thread needs: q, K (twice where it is quantized), V, scores, results, the mask, and three numbers
    // a row.
    int64_t scratch() const {
        const int64_t floats = rows * (depth + CELLS + width + 3) + CELLS * (2 * depth + width + tile);
        return (floats + 2 * LINE - 1) / LINE * LINE;
    }

    // What a unit leaves where the cells are divided: for each row its result, largest score and sum.
    int64_t partial() const { return parts > 1 ? rows * (width + 2) : 0; }

    size_t bytes(int threads) const {
        return sizeof(float) * (threads * scratch() + units() * partial() + 2 * LINE);
    }
};

struct Unit {
    int64_t stream, kv_head, token, tokens, first, last;

    Unit(const Plan & plan, int64_t number) {
        const int64_t part = number % plan.parts, tile = number / plan.parts % plan.tiles;
        const int64_t rest = number / plan.parts / plan.tiles;
        kv_head = rest % plan.kv_heads, stream = rest / plan.kv_heads;
        token = tile * plan.tile, tokens = std::min(plan.tile, plan.tokens - token);
        first = part * plan.part_cells, last = std::min(first + plan.part_cells, plan.cells);
    }
};

struct Factors {
    float scale, bias, cap, m0, m1;
    int64_t log2_heads;

    explicit Factors(const ggml_tensor * op) {
        std::memcpy(&scale, (const float *) op->op_params + 0, sizeof scale);
        std::memcpy(&bias, (const float *) op->op_params + 1, sizeof bias);
        std::memcpy(&cap, (const float *) op->op_params + 2, sizeof cap);
        if (cap != 0.0f) {
            scale /= cap;
        }
        log2_heads = (int64_t) 1 << (int) std::floor(std::log2((double) op->src[0]->ne[2]));
        m0 = std::pow(2.0f, -bias / log2_heads), m1 = std::pow(2.0f, -bias / 2.0f / log2_heads);
    }

    float slope(int64_t head) const {
        if (bias <= 0.0f) {
            return 1.0f;
        }
        return head < log2_heads ? std::pow(m0, head + 1) : std::pow(m1, 2 * (head - log2_heads) + 1);
    }
};

// Write a row of the result, normalized.
void finish(const ggml_tensor * op, int64_t stream, int64_t head, int64_t token, const float * sums, float most,
            float total) {
    const int64_t width = op->src[2]->ne[0];
    float         factor = 1.0f;
    if (op->src[4]) {
        const float sink = ((const float *) op->src[4]->data)[head];
        const float now  = std::max(most, sink);
        factor = std::exp(most - now);
        total  = total * factor + std::exp(sink - now);
    }
    factor     = total == 0.0f ? 0.0f : factor / total;
    float * to = (float *) ((char *) op->data + ((stream * op->ne[2] + token) * op->ne[1] + head) * op->nb[1]);
    for (int64_t d = 0; d < width; d += LANES) {
        store(to + d, load(sums + d) * all(factor));
    }
}

template <typename T>
void compute(const Plan & plan, const Factors & factors, const ggml_tensor * op, const Unit & unit, float * scratch,
             float * partial) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    const int64_t      depth = plan.depth, width = plan.width, group = plan.group;
    const int64_t      rows = unit.tokens * group; // a token's heads one after the other
    float *            queries = scratch;
    float *            keys    = queries + plan.rows * depth;
    float *            values  = keys + CELLS * depth;
    float *            scores  = values + CELLS * width;
    float *            sums    = scores + plan.rows * CELLS;
    float *            masks   = sums + plan.rows * width;
    float *            most    = masks + CELLS * plan.tile;
    float *            total   = most + plan.rows;
    float *            kept    = total + plan.rows;
    float *            plain   = kept + plan.rows;
    // Cells of other types are made floats, a block at a time.
    const ggml_to_float_t k_read = sizeof(T) == sizeof(float) ? ggml_get_type_traits(k->type)->to_float : nullptr;
    const ggml_to_float_t v_read = sizeof(T) == sizeof(float) ? ggml_get_type_traits(v->type)->to_float : nullptr;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t head = unit.kv_head * group + row % group, token = unit.token + row / group;
        const float * from =
            (const float *) ((const char *) q->data + token * q->nb[1] + head * q->nb[2] + unit.stream * q->nb[3]);
        for (int64_t d = 0; d < depth; d += LANES) {
            store(queries + row * depth + d, load(from + d) * all(factors.scale));
        }
        most[row] = -INFINITY, total[row] = 0.0f;
    }
    std::memset(sums, 0, rows * width * sizeof(float));

    for (int64_t first = unit.first; first < unit.last; first += CELLS) {
        const int64_t cells = std::min(CELLS, unit.last - first), whole = cells / LANES * LANES;
        bool          mixed = false; // some cells are hidden from some rows
        if (mask || cells < CELLS) {
            vec seen = all(-INFINITY), lowest = all(0.0f);
            for (int64_t token = 0; token < unit.tokens; token++) {
                float * to = masks + token * CELLS;
                if (mask) {
                    const ggml_fp16_t * from =
                        (const ggml_fp16_t *) ((const char *) mask->data + (unit.token + token) * mask->nb[1] +
                                               unit.stream % mask->ne[3] * mask->nb[3]) + first;
                    for (int64_t cell = 0; cell < whole; cell += LANES) {
                        store(to + cell, load(from + cell));
                    }
                    for (int64_t cell = whole; cell < cells; cell++) {
                        to[cell] = ggml_fp16_to_fp32(from[cell]);
                    }
                } else {
                    std::fill(to, to + cells, 0.0f);
                }
                std::fill(to + cells, to + CELLS, -INFINITY);
                for (int64_t cell = 0; cell < CELLS; cell += LANES) {
                    seen   = larger(seen, load(to + cell));
                    lowest = larger(lowest, -load(to + cell));
                }
            }
            if (fold_max(seen) == -INFINITY) {
                continue;
            }
            mixed = fold_max(lowest) == INFINITY;
        }
        const char * k_data =
            (const char *) k->data + first * k->nb[1] + unit.kv_head * k->nb[2] + unit.stream * k->nb[3];
        const char * v_data =
            (const char *) v->data + first * v->nb[1] + unit.kv_head * v->nb[2] + unit.stream * v->nb[3];
        for (int64_t cell = 0; cell < cells; cell++) {
            const char * from = v_data + cell * v->nb[1];
            float *      to   = values + cell * width;
            if (v_read) {
                v_read(from, to, width);
            }
            for (int64_t d = 0; d < width && (mixed || !v_read); d += LANES) {
                const vec value = v_read ? load(to + d) : load((const T *) from + d);
                // A hidden cell counts 0 times, which is no number where it holds none.
                store(to + d, mixed ? (value - value == vec{} ? value : vec{}) : value);
            }
        }
        int64_t stride = k->nb[1];
        if (k_read) {
            for (int64_t cell = 0; cell < cells; cell++) {
                k_read(k_data + cell * stride, plain + cell * depth, depth);
            }
            k_data = (const char *) plain, stride = depth * sizeof(float);
        }
        if (cells < CELLS) { // the last cells are masked: any number will do for them
            std::memset(scores, 0, rows * CELLS * sizeof(float));
            std::memset(keys, 0, CELLS * depth * sizeof(float));
            for (int64_t cell = whole; cell < cells; cell++) {
                const T * from = (const T *) (k_data + cell * stride);
                float     row[LANES];
                for (int64_t d = 0; d < depth; d += LANES) {
                    store(row, load(from + d));
                    for (int lane = 0; lane < LANES; lane++) {
                        keys[(d + lane) * CELLS + cell] = row[lane];
                    }
                }
            }
        }
        if (rows <= FEW && cells == CELLS) {
            for (int64_t cell = 0; cell < CELLS; cell += LANES) {
                score_few<T>(rows, scores + cell, queries, k_data + cell * stride, stride, depth);
            }
        } else {
            for (int64_t cell = 0; cell < whole; cell += LANES) {
                transpose<T>(keys + cell, k_data + cell * stride, stride, depth);
            }
            multiply_all(scores, rows, CELLS, queries, depth, keys, depth, nullptr);
        }
        for (int64_t row = 0; row < rows; row++) {
            float * to = scores + row * CELLS;
            vec     values[CELLS / LANES], highest = all(-INFINITY), sum = vec{};
            const float   slope = factors.slope(unit.kv_head * group + row % group);
            const float * bias  = mask || cells < CELLS ? masks + row / group * CELLS : nullptr;
            for (int n = 0; n < CELLS / LANES; n++) {
                values[n] = load(to + n * LANES);
                if (factors.cap != 0.0f) {
                    values[n] = hyperbolic_tangent(values[n]) * all(factors.cap);
                }
                if (bias) {
                    const vec added = load(bias + n * LANES) * all(slope);
                    values[n] = added == all(-INFINITY) ? added : values[n] + added;
                }
                highest = larger(highest, values[n]);
            }
            const float now = std::max(most[row], fold_max(highest));
            if (now == -INFINITY) { // no cell of the block is for this row
                std::memset(to, 0, CELLS * sizeof(float));
                kept[row] = 1.0f;
                continue;
            }
            for (int n = 0; n < CELLS / LANES; n++) {
                values[n] = exponential(values[n] - all(now));
                sum += values[n];
                store(to + n * LANES, values[n]);
            }
            kept[row]  = std::exp(most[row] - now);
            total[row] = total[row] * kept[row] + fold_sum(sum);
            most[row]  = now;
        }
        multiply_all(sums, rows, width, scores, CELLS, values, cells, kept);
    }

    for (int64_t row = 0; row < rows; row++) {
        if (partial) {
            float * to = partial + row * (width + 2);
            std::memcpy(to, sums + row * width, width * sizeof(float));
            to[width] = most[row], to[width + 1] = total[row];
        } else {
            finish(op, unit.stream, unit.kv_head * group + row % group, unit.token + row / group, sums + row * width,
                   most[row], total[row]);
        }
    }
}

// Put the parts of a row together.
void join(const Plan & plan, const ggml_tensor * op, const Unit & unit, int64_t row, float * first) {
    const int64_t width = plan.width;
    float *       sums  = first + row * (width + 2);
    for (int64_t part = 1; part < plan.parts; part++) {
        const float * more = sums + part * plan.partial();
        const float   now  = std::max(sums[width], more[width]);
        if (now == -INFINITY) {
            continue;
        }
        const float own = std::exp(sums[width] - now), other = std::exp(more[width] - now);
        for (int64_t d = 0; d < width; d += LANES) {
            store(sums + d, load(sums + d) * all(own) + load(more + d) * all(other));
        }
        sums[width] = now, sums[width + 1] = sums[width + 1] * own + more[width + 1] * other;
    }
    finish(op, unit.stream, unit.kv_head * plan.group + row % plan.group, unit.token + row / plan.group, sums,
           sums[width], sums[width + 1]);
}

bool may_read(const ggml_tensor * tensor) {
    return tensor->type == GGML_TYPE_F32 || ggml_get_type_traits(tensor->type)->to_float;
}

bool may_compute(const ggml_tensor * op) {
    if (op->op != GGML_OP_FLASH_ATTN_EXT) {
        return false;
    }
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    return q->type == GGML_TYPE_F32 && may_read(k) && may_read(v) && k->ne[0] % 16 == 0 && v->ne[0] % 16 == 0 && k->nb[0] == ggml_type_size(k->type) &&
           v->nb[0] == ggml_type_size(v->type) && q->nb[0] == sizeof(float) && k->ne[2] == v->ne[2] &&
           q->ne[2] % k->ne[2] == 0 && k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] &&
           op->type == GGML_TYPE_F32 && (!mask || (mask->type == GGML_TYPE_F16 && mask->ne[2] == 1));
}

struct Kernel : ggml::cpu::tensor_traits {
    bool work_size(int threads, const ggml_tensor * op, size_t & size) override {
        size = Plan(op, threads).bytes(threads);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const Plan plan(op, params->nth);
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
        const Factors factors(op);
        const uintptr_t line = LINE * sizeof(float);
        float * base     = (float *) (((uintptr_t) params->wdata + line - 1) / line * line);
        float * partials = base + params->nth * plan.scratch();
        for (int64_t number = params->ith; number < plan.units();
             number = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            float * partial = plan.partial() ? partials + number * plan.partial() : nullptr;
            float * scratch = base + params->ith * plan.scratch();
            if (op->src[1]->type == GGML_TYPE_F16 && op->src[2]->type == GGML_TYPE_F16) {
                compute<ggml_fp16_t>(plan, factors, op, Unit(plan, number), scratch, partial);
            } else {
                compute<float>(plan, factors, op, Unit(plan, number), scratch, partial);
            }
        }
        if (plan.partial()) {
            ggml_barrier(params->threadpool);
            for (int64_t row = params->ith; row < plan.units() / plan.parts * plan.rows; row += params->nth) {
                const int64_t number = row / plan.rows * plan.parts;
                const Unit    unit(plan, number);
                if (row % plan.rows < unit.tokens * plan.group) {
                    join(plan, op, unit, row % plan.rows, partials + number * plan.partial());
                }
            }
        }
        return true;
    }
};

} // namespace

ggml::cpu::tensor_traits * find_attention(const ggml_tensor * op) {
    static Kernel kernel;
    return may_compute(op) ? &kernel : nullptr;
}
#else
ggml::cpu::tensor_traits * find_attention(const ggml_tensor *) { return nullptr; }
#endif
