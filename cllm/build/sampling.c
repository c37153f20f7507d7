/* Passes over the logits of a step, on several threads: what NumPy cannot do without the GIL in between.
 *
 * A pool sleeps between steps. The caller takes part in each pass and then spins for the last part: a thread
 * that is put to sleep comes back on another core, with cold caches, and the GPU waits for it meanwhile. For the
 * same reason the threads can be woken shortly before a pass, and then spin until it begins. They are woken by a
 * semaphore: of a lock, whoever loses its core while it holds it stops all others.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define GROUP 256 /* tokens that are looked at by their maximum first */
#define BLOCK 4096 /* the same, for a single token: they stay in the nearest cache */
#define SPIN_NS 1000000 /* how long a thread that is awake waits for a pass */

/* llama.cpp's llama_token_data and llama_token_data_array; a test compares their sizes. */
typedef struct {
    int32_t id;
    float logit, p;
} candidate;

typedef struct candidates {
    candidate *data;
    size_t size;
    int64_t selected;
    _Bool sorted;
} candidates;

typedef struct pool {
    int count; /* threads, without the caller */
    pthread_t *threads;
    sem_t wake;
    unsigned pass;      /* its number; the caller's */
    atomic_int called;  /* threads that are to wake up for the next one */
    atomic_int closing;
    atomic_int awake;   /* threads that wait for a pass without sleeping */
    atomic_int followed; /* another pass follows soon: they wait for it, too */
    void (*row)(struct pool *, int);
    atomic_uint_fast64_t ticket; /* the number of the pass, and in the lower half the rows that are left */
    atomic_int done;
    int width;
    const float *logits;
    /* cllm_argmax */
    int parts; /* of each row */
    const int32_t *excluded;
    int excluded_count;
    float *best;
    int32_t *tokens;
    /* cllm_reach */
    const int32_t *top_k;
    const float *gaps;
    int capacity;
    int32_t *ids, *counts;
    float *values;
    /* cllm_apply */
    void (*apply)(void *, void *);
    void **chains;
    struct candidates *candidates;
} pool;

/* Takes rows of one pass. A thread that comes too late finds none: they are all taken, or another pass has
 * begun, whose rows are not for it. */
static void work(pool *p, unsigned number) {
    uint_fast64_t ticket = atomic_load(&p->ticket);
    while ((unsigned)(ticket >> 32) == number && (ticket & 0xffffffff)) {
        if (!atomic_compare_exchange_weak(&p->ticket, &ticket, ticket - 1)) continue;
        p->row(p, (int)(ticket & 0xffffffff) - 1);
        atomic_fetch_add(&p->done, 1);
        ticket = atomic_load(&p->ticket);
    }
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Waits awake for the pass after `seen`, which may not come, and takes part in it. */
static void spin(pool *p, unsigned seen) {
    for (;;) {
        int64_t until = now_ns() + SPIN_NS;
        unsigned number = seen;
        atomic_fetch_add(&p->awake, 1);
        for (int i = 1; number == seen && (i % 256 || now_ns() < until); i++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ volatile("isb");
#endif
            number = (unsigned)(atomic_load_explicit(&p->ticket, memory_order_relaxed) >> 32);
        }
        atomic_fetch_sub(&p->awake, 1);
        if (number == seen) return;
        work(p, number);
        if (!atomic_load(&p->followed)) return;
        seen = number;
    }
}

static void *run(void *argument) {
    pool *p = argument;
    for (;;) {
        while (sem_wait(&p->wake)) {
        }
        if (atomic_load(&p->closing)) return NULL;
        unsigned seen = (unsigned)(atomic_load(&p->ticket) >> 32); /* before `called`, which a pass clears first */
        int called = atomic_load(&p->called);
        while (called > 0 && !atomic_compare_exchange_weak(&p->called, &called, called - 1)) {
        }
        if (called > 0) spin(p, seen);
        else work(p, (unsigned)(atomic_load(&p->ticket) >> 32));
    }
}

/* Wakes so many threads, together with those that were woken and have not come yet. */
static void wake(pool *p, int threads) {
    int coming = 0;
    sem_getvalue(&p->wake, &coming);
    for (; coming < threads; coming++) sem_post(&p->wake);
}

static void pass(pool *p, int threads, int rows, void (*row)(pool *, int), int followed) {
    int others = threads - 1 < p->count ? threads - 1 : p->count;
    atomic_store(&p->followed, followed);
    p->row = row;
    p->pass++;
    atomic_store(&p->done, 0);
    atomic_store(&p->called, 0);
    others -= atomic_load(&p->awake);
    atomic_store(&p->ticket, (uint_fast64_t)p->pass << 32 | (unsigned)rows);
    wake(p, others);
    work(p, p->pass);
    while (atomic_load(&p->done) < rows) {
    }
}

/* Calls a function that waits for a device, with this thread asleep for the first part of it; then the others
 * are woken, so that a pass can begin at once. */
void cllm_wait(pool *p, int threads, int64_t asleep_ns, void (*wait)(void *), void *argument) {
    if (asleep_ns > 0) {
        struct timespec pause = {asleep_ns / 1000000000, asleep_ns % 1000000000};
        nanosleep(&pause, NULL);
    }
    int others = threads - 1 < p->count ? threads - 1 : p->count;
    atomic_store(&p->called, others);
    wake(p, others);
    wait(argument);
}

pool *cllm_pool_new(int threads) {
    pool *p = calloc(1, sizeof(pool));
    if (!p) return NULL;
    p->threads = calloc((size_t)threads, sizeof(pthread_t));
    int wakes = sem_init(&p->wake, 0, 0) == 0;
    while (wakes && p->threads && p->count < threads - 1) {
        if (pthread_create(&p->threads[p->count], NULL, run, p)) break; /* then with fewer */
        p->count++;
    }
    return p;
}

void cllm_pool_free(pool *p) {
    atomic_store(&p->closing, 1);
    for (int i = 0; i < p->count; i++) sem_post(&p->wake);
    for (int i = 0; i < p->count; i++) pthread_join(p->threads[i], NULL);
    sem_destroy(&p->wake);
    free(p->threads);
    free(p);
}

#if defined(__AVX512F__)
#define VECTOR 64
#elif defined(__AVX__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
#define LANES (VECTOR / 4)
#define CHAINS 4 /* of comparisons that do not wait for each other */
typedef float floats __attribute__((vector_size(VECTOR)));
typedef int32_t words __attribute__((vector_size(VECTOR)));

/* The larger of each lane; that of `best` where a value is not a number. */
static inline floats larger(floats best, floats values) {
    words mask = values > best;
    return (floats)(((words)values & mask) | ((words)best & ~mask));
}

static float maximum(const float *values, int count) {
    float best = values[0];
    int at = 0;
    if (count >= CHAINS * LANES) {
        floats tops[CHAINS], more[CHAINS];
        memcpy(tops, values, sizeof tops);
        for (at = CHAINS * LANES; at + CHAINS * LANES <= count; at += CHAINS * LANES) {
            memcpy(more, values + at, sizeof more);
            for (int chain = 0; chain < CHAINS; chain++) tops[chain] = larger(tops[chain], more[chain]);
        }
        for (int chain = 1; chain < CHAINS; chain++) tops[0] = larger(tops[0], tops[chain]);
        for (int lane = 0; lane < LANES; lane++) best = tops[0][lane] > best ? tops[0][lane] : best;
    }
    for (; at < count; at++) best = values[at] > best ? values[at] : best;
    return best;
}

static void argmax_part(pool *p, int number) {
    int row = number / p->parts, part = number % p->parts;
    float *line = (float *)p->logits + (size_t)row * p->width;
    int size = (p->width + p->parts - 1) / p->parts;
    int begin = part * size, end = begin + size < p->width ? begin + size : p->width;
    for (int i = 0; i < p->excluded_count; i++) {
        int token = p->excluded[i];
        if (token >= begin && token < end) line[token] = -INFINITY;
    }
    p->best[number] = -INFINITY, p->tokens[number] = 0;
    if (begin >= end) return;
    float best = line[begin];
    for (int at = begin; at < end; at += BLOCK) {
        float top = maximum(line + at, end - at < BLOCK ? end - at : BLOCK);
        if (top > best) best = top, begin = at; /* of the first block that has the best */
    }
    while (begin + 1 < end && !(line[begin] >= best)) begin++;
    p->best[number] = best, p->tokens[number] = begin;
}

/* The likeliest token of each row, of equals the first; some are excluded, from the logits, too. With room for
 * `parts` results a row: a row may be divided. */
void cllm_argmax(pool *p, int threads, float *logits, int rows, int width, const int32_t *excluded,
                 int excluded_count, int parts, float *best, int32_t *tokens) {
    p->logits = logits, p->width = width, p->excluded = excluded, p->excluded_count = excluded_count;
    p->parts = parts, p->best = best, p->tokens = tokens;
    pass(p, threads, rows * parts, argmax_part, 0);
    for (int row = 0; row < rows; row++) {
        int found = row * parts;
        for (int number = found + 1; number < (row + 1) * parts; number++)
            if (best[number] > best[found]) found = number;
        tokens[row] = tokens[found];
    }
}

/* The rank-th largest of some values, which are reordered. */
static float select_largest(float *values, int count, int rank) {
    int low = 0, high = count - 1, wanted = rank - 1;
    while (low < high) {
        float pivot = values[(low + high) / 2];
        int i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i <= j) {
                float swapped = values[i];
                values[i++] = values[j], values[j--] = swapped;
            }
        }
        if (wanted <= j) high = j;
        else if (wanted >= i) low = i;
        else break;
    }
    return values[wanted];
}

static void reach_row(pool *p, int row) {
    const float *line = p->logits + (size_t)row * p->width;
    int groups = (p->width + GROUP - 1) / GROUP, count = 0;
    int32_t *ids = p->ids + (size_t)row * p->capacity;
    float *values = p->values + (size_t)row * p->capacity;
    float *maxima = malloc(2 * (size_t)groups * sizeof(float));
    p->counts[row] = -1;
    if (!maxima) return;
    for (int group = 0; group < groups; group++) {
        int at = group * GROUP;
        maxima[group] = maximum(line + at, p->width - at < GROUP ? p->width - at : GROUP);
    }
    float threshold;
    if (p->top_k[row] > 0) {
        if (p->top_k[row] > groups) {
            free(maxima);
            return;
        }
        memcpy(maxima + groups, maxima, (size_t)groups * sizeof(float));
        threshold = select_largest(maxima + groups, groups, p->top_k[row]);
    } else {
        threshold = maximum(maxima, groups) - p->gaps[row];
    }
    for (int group = 0; group < groups; group++) {
        if (!(maxima[group] >= threshold)) continue;
        int end = (group + 1) * GROUP < p->width ? (group + 1) * GROUP : p->width;
        for (int at = group * GROUP; at < end; at++) {
            if (!(line[at] >= threshold)) continue;
            if (count == p->capacity) {
                free(maxima);
                return;
            }
            ids[count] = at, values[count++] = line[at];
        }
    }
    free(maxima);
    p->counts[row] = count;
}

/* The tokens of each row that reach a threshold which at least its `top_k` likeliest reach, or the best less
 * its gap; in order of id. A count of -1: there are more than `capacity`, or NaN is among them. */
void cllm_reach(pool *p, int threads, const float *logits, int rows, int width, const int32_t *top_k,
                const float *gaps, int capacity, int32_t *ids, float *values, int32_t *counts) {
    p->logits = logits, p->width = width, p->top_k = top_k, p->gaps = gaps;
    p->capacity = capacity, p->ids = ids, p->values = values, p->counts = counts;
    pass(p, threads, rows, reach_row, 1);
}

static void apply_row(pool *p, int row) {
    candidates *found = p->candidates + row;
    p->apply(p->chains[row], found);
    p->tokens[row] = found->selected < 0 ? -1 : found->data[found->selected].id;
}

/* Runs a chain over the candidates of each row, by llama.cpp's own function; the token selected, or -1. */
void cllm_apply(pool *p, int threads, void (*apply)(void *, void *), void **chains, candidates *found,
                int rows, int32_t *tokens) {
    p->apply = apply, p->chains = chains, p->candidates = found, p->tokens = tokens;
    pass(p, threads, rows, apply_row, 0);
}

/* Bytes of what `cllm_apply` reads. */
int cllm_candidates_size(void) { return (int)sizeof(candidates); }
