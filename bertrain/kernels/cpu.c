/* The kernels for CPUs with AVX-512 and AMX: what the Triton kernels compute on a GPU, in bf16 with sums in float32.

   cpu_library.py compiles this file with the user's compiler; cpu.py calls it through ctypes and passes tensors as
   pointers. Row widths are multiples of 16, except those of logits. The plain PyTorch version beside each Triton kernel
   specifies what the function here computes. Sums over tokens are written as partial sums and added in a fixed order,
   so two runs with the same number of threads are bitwise equal.

   Contents: arithmetic, dropout, tiles, products, attention, LayerNorm, GELU, embeddings, cross-entropy, LAMB. */

#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define ROUND_UP(size, multiple) (((size) + (multiple) - 1) / (multiple) * (multiple))

typedef uint16_t bf16;

enum { DONE = 0, NO_MEMORY = 1 }; /* what every kernel returns */

/* --- arithmetic ---------------------------------------------------------------------------------------------- */

static inline __m512 load16(const bf16 *from) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16)
    );
}

static inline void store16(bf16 *to, __m512 values) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values));
}

/* The same for the elements in a mask; the others are read as zero and not written. */
static inline __m512 load16_masked(const bf16 *from, __mmask16 inside) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, from)), 16));
}

static inline void store16_masked(bf16 *to, __mmask16 inside, __m512 values) {
    _mm256_mask_storeu_epi16(to, inside, (__m256i)_mm512_cvtneps_pbh(values));
}

/* Mask of the elements `first` to `first + 15` that lie before `end`. */
static inline __mmask16 inside16(long first, long end) {
    return first + 16 <= end ? 0xFFFF : first >= end ? 0 : (1u << (end - first)) - 1;
}

static inline float bf16_to_float(bf16 value) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)value << 16)));
}

static inline bf16 float_to_bf16(float value) {
    return (bf16)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(value)), 0);
}

/* 2 ** x with a relative error of 2e-7: 0 for x below -126, 2 ** 126 for x above 126, NaN for NaN (which is why x is
   the second operand of the minimum). */
static inline __m512 exp2_16(__m512 x) {
    const __mmask16 is_tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_LT_OQ);
    x = _mm512_min_ps(_mm512_set1_ps(126.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 power = _mm512_set1_ps(1.3333558e-3f);
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(9.6181291e-3f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(5.5504109e-2f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(0.24022651f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(0.69314718f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.0f));
    return _mm512_mask_mov_ps(_mm512_scalef_ps(power, whole), is_tiny, _mm512_setzero_ps());
}

/* 1 / x, for x >= 1. */
static inline __m512 reciprocal16(__m512 x) {
    const __m512 guess = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(guess, _mm512_fnmadd_ps(x, guess, _mm512_set1_ps(2.0f)));
}

/* The standard normal's distribution and density, as in gelu.py. */
static inline __m512 distribution16(__m512 v) {
    const __m512 t = _mm512_mul_ps(v, v);
    __m512 p = _mm512_set1_ps(-3.229005812e-6f);
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(8.823842478e-5f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(3.602730814e-4f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.1052266856f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-2.302045391f));
    return reciprocal16(_mm512_add_ps(exp2_16(_mm512_mul_ps(v, p)), _mm512_set1_ps(1.0f)));
}

static inline __m512 density16(__m512 v) {
    const __m512 t = _mm512_mul_ps(v, v);
    return exp2_16(_mm512_fmadd_ps(t, _mm512_set1_ps(-0.7213475204444817f), _mm512_set1_ps(-1.3257480647361595f)));
}

/* --- dropout: random.py's functions of (seed, site, row, column) ------------------------------------------------- */

#define GOLDEN 0x9E3779B9u
#define ROW_STEP 0x85EBCA6Bu
static const uint32_t MULTIPLIERS[4] = {0x846CA68Bu, 0x827F233Du, 0xC222A3AFu, 0x76C6621Fu};
static const uint32_t PAIR_MULTIPLIERS[8] = {0xC5C5178Bu, 0xF0E421C9u, 0xB0AC6B1Bu, 0xB023102Du,
                                             0x733D80FFu, 0x9383A5A9u, 0x58F85025u, 0xEC43FB6Fu};

typedef struct {
    uint32_t key, threshold;
    float inverse_keep;
} Dropout;

static inline uint32_t mix32(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

static inline uint32_t stream_key(int64_t seed, int64_t site) {
    const uint32_t low = (uint32_t)seed, high = (uint32_t)((uint64_t)seed >> 32);
    return mix32(mix32(low + (uint32_t)site * GOLDEN) ^ high);
}

/* Dropout of rows: an element is dropped if its 32 random bits are below `threshold`. */
static Dropout row_dropout(int64_t seed, int64_t site, uint32_t threshold) {
    return (Dropout){stream_key(seed, site), threshold, (float)(1 / (1 - threshold / 4294967296.0))};
}

/* Dropout of attention weights: one is kept if its 15 random bits are below `threshold`; 0: all are kept. */
static Dropout attention_dropout(int64_t seed, int64_t site, uint32_t threshold) {
    return (Dropout){stream_key(seed, site), threshold, threshold ? 32768.0f / (float)threshold : 1.0f};
}

/* 32 random bits for each of 16 elements, from their counters and multipliers. */
static inline __m512i words16(__m512i counters, __m512i multipliers, uint32_t key) {
    __m512i x = _mm512_xor_si512(counters, _mm512_srli_epi32(counters, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7FEB352D));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    return _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_set1_epi32((int)mix32(key ^ GOLDEN))), multipliers);
}

/* Mask of the 16 elements of a row that are kept. Four neighboring columns share a counter; `column` is a multiple of
   16. */
static inline __mmask16 keep_in_row(Dropout dropout, uint32_t row, uint32_t column) {
    const __m512i quads = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i multipliers = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)MULTIPLIERS));
    const uint32_t corner = dropout.key + row * ROW_STEP + (column >> 2) * GOLDEN;
    const __m512i counters =
        _mm512_add_epi32(_mm512_mullo_epi32(quads, _mm512_set1_epi32((int)GOLDEN)), _mm512_set1_epi32((int)corner));
    const __m512i words = words16(counters, multipliers, dropout.key);
    return _mm512_cmpge_epu32_mask(words, _mm512_set1_epi32((int)dropout.threshold));
}

/* The same for attention weights: (row, row + 1, row + 8, row + 9) x the same columns share a counter, and two columns
   share a word. */
static inline __mmask16 keep_in_attention(uint32_t key, uint32_t threshold, uint32_t row, uint32_t column) {
    const __m512i pairs = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3);
    const uint32_t *row_multipliers = PAIR_MULTIPLIERS + ((row >> 3) & 1) * 2 + (row & 1);
    const __m512i left = _mm512_set1_epi32((int)row_multipliers[0]), right = _mm512_set1_epi32((int)row_multipliers[4]);
    const __m512i multipliers = _mm512_mask_mov_epi32(left, 0xFF00, right);
    const uint32_t corner = key + (((row >> 1) & 3) + (row >> 4) * 4) * ROW_STEP + (column >> 2) * GOLDEN;
    const __m512i counters =
        _mm512_add_epi32(_mm512_mullo_epi32(pairs, _mm512_set1_epi32((int)GOLDEN)), _mm512_set1_epi32((int)corner));
    const __m512i words = words16(counters, multipliers, key);
    const __m512i halves = _mm512_mask_srli_epi32(words, 0xAAAA, words, 16);
    const __m512i bits = _mm512_and_si512(halves, _mm512_set1_epi32(0x7FFF));
    return _mm512_cmplt_epu32_mask(bits, _mm512_set1_epi32((int)threshold));
}

/* x after dropout, and the mask of the elements that are kept. */
static inline __m512 dropout16(__m512 x, Dropout dropout, uint32_t row, uint32_t column, __mmask16 *keep) {
    *keep = dropout.threshold ? keep_in_row(dropout, row, column) : (__mmask16)0xFFFF;
    return _mm512_maskz_mul_ps(*keep, x, _mm512_set1_ps(dropout.inverse_keep));
}

/* --- memory ---------------------------------------------------------------------------------------------------- */

typedef struct {
    char *address;
    size_t size;
} Workspace;

static const size_t HUGE_PAGE = (size_t)2 << 20;

/* At least `size` bytes in huge pages, reused from call to call; NULL if the system has no memory left. Tiles are read
   in strides that would be slow with small pages. */
static char *reserve_workspace(Workspace *workspace, size_t size) {
    if (workspace->address && size <= workspace->size) return workspace->address;
    if (workspace->address) munmap(workspace->address, workspace->size);
    *workspace = (Workspace){NULL, 0};
    size = ROUND_UP(size + 1, HUGE_PAGE); /* + 1: an empty bin also needs an address */
    char *raw = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    char *aligned = (char *)ROUND_UP((uintptr_t)raw, HUGE_PAGE);
    if (aligned > raw) munmap(raw, aligned - raw);
    munmap(aligned + size, raw + HUGE_PAGE - aligned);
    madvise(aligned, size, MADV_HUGEPAGE);
    *workspace = (Workspace){aligned, size};
    return aligned;
}

static Workspace shared_workspace, thread_workspaces;

/* Reserves `size_each` bytes for each thread of the next parallel region, in huge pages of its own. */
static char *reserve_thread_workspaces(size_t size_each) {
    return reserve_workspace(&thread_workspaces, ROUND_UP(size_each, HUGE_PAGE) * omp_get_max_threads());
}

/* The calling thread's part of that memory; `size_each` as it was reserved. */
static inline void *thread_workspace(size_t size_each) {
    return thread_workspaces.address + ROUND_UP(size_each, HUGE_PAGE) * omp_get_thread_num();
}

/* --- tiles ------------------------------------------------------------------------------------------------------

   A tile is 16 rows of 64 bytes. k is the dimension that a product sums over. A product takes a tile of 16 rows x 32 k
   of its left matrix, and one of 32 k x 16 columns of its right matrix, where each row of the tile holds the pairs
   (k, k + 1) of the 16 columns. A panel holds 32 rows (left) or 32 columns (right): for each 32 k, two tiles one after
   the other. Elements outside of a matrix are zero. */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

static const TileConfig TILES __attribute__((aligned(64))) = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16},
};
enum { TILE = 512, PANEL_STEP = 2 * TILE, BLOCK = 4 * 256 }; /* elements: of bf16, of bf16, of float32 */

static inline void configure_tiles(void) {
    __asm__ volatile("" : : "r"(&TILES) : "memory"); /* or gcc assumes that only the first bytes are read */
    _tile_loadconfig(&TILES);
}

static inline void transpose16x16(__m512i row[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        row[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        row[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        row[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        row[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; i++) {
        row[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        row[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
        row[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        row[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
    }
}

/* 32 elements of a row of which `left` exist; the others are zero. */
static inline __m512i row_of_32(const bf16 *from, long left) {
    if (left >= 32) return _mm512_loadu_si512(from);
    return left <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((1u << left) - 1, from);
}

/* The same for 16 elements, each in 32 bits. */
static inline __m512i row_of_16(const bf16 *from, long left) {
    if (left <= 0) return _mm512_setzero_si512();
    const __mmask16 inside = left >= 16 ? 0xFFFF : (1u << left) - 1;
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, from));
}

/* The pairs (k, k + 1) of 16 columns of a matrix [k, columns] that has `left` more rows. */
static inline __m512i pairs_of_16(const bf16 *from, long pitch, long columns, long left) {
    const __m512i even = left > 0 ? row_of_16(from, columns) : _mm512_setzero_si512();
    const __m512i odd = left > 1 ? row_of_16(from + pitch, columns) : _mm512_setzero_si512();
    return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
}

/* A tile from a block [16, k: 32]: for a left matrix; transposed, the pairs of 16 columns for a right matrix. */
static inline void tile_from_rows(bf16 *tile, const bf16 *from, long pitch, long rows, long ks, int transposed) {
    __m512i row[16];
    for (int i = 0; i < 16; i++) row[i] = i < rows ? row_of_32(from + i * pitch, ks) : _mm512_setzero_si512();
    if (transposed) transpose16x16(row);
    for (int i = 0; i < 16; i++) _mm512_store_si512(tile + 32 * i, row[i]);
}

/* A tile from a block [k: 32, 16]: as pairs for a right matrix; transposed, for a left matrix. */
static inline void tile_from_columns(bf16 *tile, const bf16 *from, long pitch, long columns, long ks, int transposed) {
    __m512i row[16];
    for (int i = 0; i < 16; i++) row[i] = pairs_of_16(from + 2 * i * pitch, pitch, columns, ks - 2 * i);
    if (transposed) transpose16x16(row);
    for (int i = 0; i < 16; i++) _mm512_store_si512(tile + 32 * i, row[i]);
}

/* A panel from a matrix [rows, ks]: for a left matrix, or transposed for a right matrix. */
static void pack_rows(bf16 *panel, const bf16 *from, long pitch, long rows, long ks, int transposed) {
    for (long k = 0; k < ks; k += 32, panel += PANEL_STEP)
        for (int half = 0; half < 2; half++)
            tile_from_rows(
                panel + half * TILE, from + 16 * half * pitch + k, pitch, rows - 16 * half, ks - k, transposed
            );
}

/* A panel from a matrix [ks, columns]: for a right matrix, or transposed for a left matrix. */
static void pack_columns(bf16 *panel, const bf16 *from, long pitch, long columns, long ks, int transposed) {
    for (long k = 0; k < ks; k += 32, panel += PANEL_STEP)
        for (int half = 0; half < 2; half++)
            tile_from_columns(
                panel + half * TILE, from + k * pitch + 16 * half, pitch, columns - 16 * half, ks - k, transposed
            );
}

/* Writes the product of two panels over `steps` times 32 k, plus `from` unless it is NULL, as four tiles of 16 x 16. */
static inline void multiply_panels(const bf16 *left, const bf16 *right, long steps, const float *from, float *to) {
    if (from) {
        _tile_loadd(0, from, 64);
        _tile_loadd(1, from + 256, 64);
        _tile_loadd(2, from + 512, 64);
        _tile_loadd(3, from + 768, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long i = 0; i < steps; i++, left += PANEL_STEP, right += PANEL_STEP) {
        _tile_loadd(4, left, 64);
        _tile_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, left + TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, right + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 256, 64);
    _tile_stored(2, to + 512, 64);
    _tile_stored(3, to + 768, 64);
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* Measured on Emerald Rapids: blocks that fit into a second-level cache of 2 MiB beside other data. */
enum { DEPTH = 1024, ROWS = 256, COLUMNS = 1024 };

/* Both matrices of a weight gradient have k (here: tokens) as rows. Unpacking two rows pairs their elements, but
   permutes the 32 columns: of each eight, four go to the first tile and four to the second. `add_block` undoes this
   permutation. */
static inline void interleave_rows(const bf16 *from, long pitch, long columns, long left, __m512i *low, __m512i *high) {
    const __m512i even = left > 0 ? row_of_32(from, columns) : _mm512_setzero_si512();
    const __m512i odd = left > 1 ? row_of_32(from + pitch, columns) : _mm512_setzero_si512();
    *low = _mm512_unpacklo_epi16(even, odd);
    *high = _mm512_unpackhi_epi16(even, odd);
}

/* A panel from a matrix [ks, columns], permuted in this way: for a right matrix, or transposed for a left matrix. */
static void pack_interleaved(bf16 *panel, const bf16 *from, long pitch, long columns, long ks, int transposed) {
    for (long k = 0; k < ks; k += 32, panel += PANEL_STEP) {
        __m512i low[16], high[16];
        for (int i = 0; i < 16; i++)
            interleave_rows(from + (k + 2 * i) * pitch, pitch, columns, ks - k - 2 * i, low + i, high + i);
        if (transposed) {
            transpose16x16(low);
            transpose16x16(high);
        }
        for (int i = 0; i < 16; i++) _mm512_store_si512(panel + 32 * i, low[i]);
        for (int i = 0; i < 16; i++) _mm512_store_si512(panel + TILE + 32 * i, high[i]);
    }
}

/* Writes a 32 x 32 block of permuted rows and columns to `out` in their order, or adds it. */
static void add_block(const float *block, float *out, long pitch, long rows, long columns, int accumulate) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __mmask16 inside[2] = {inside16(0, columns), inside16(16, columns)};
    for (long row = 0; row < MIN(32, rows); row++) {
        const float *from = block + ((row >> 2) & 1) * 512 + ((row >> 3) * 4 + (row & 3)) * 16;
        const __m512 low = _mm512_load_ps(from), high = _mm512_load_ps(from + 256);
        __m512 sums[2] = {_mm512_permutex2var_ps(low, first, high), _mm512_permutex2var_ps(low, second, high)};
        for (int half = 0; half < 2; half++) {
            float *to = out + row * pitch + 16 * half;
            if (accumulate) sums[half] = _mm512_add_ps(sums[half], _mm512_maskz_loadu_ps(inside[half], to));
            _mm512_mask_storeu_ps(to, inside[half], sums[half]);
        }
    }
}

/* gradient [n, k] (+)= dy [t, n]' x [t, k], in float32. On a CPU, PyTorch has no product of bf16 matrices in float32,
   and is slow if the sum is over the rows of both. */
EXPORT int weight_gradient(
    const bf16 *dy, long dy_pitch, const bf16 *x, long x_pitch, float *gradient, long n, long k, long t, int accumulate
) {
    const long panels = (k + 31) / 32, depth = ROUND_UP(t, 32);
    const long row_blocks = (n + ROWS - 1) / ROWS, column_blocks = (k + COLUMNS - 1) / COLUMNS;
    const size_t left_size = (size_t)ROWS * DEPTH * sizeof(bf16), sums_size = (size_t)ROWS * COLUMNS * sizeof(float);
    bf16 *right = (bf16 *)reserve_workspace(&shared_workspace, panels * 32 * depth * sizeof(bf16));
    if (!right || !reserve_thread_workspaces(left_size + sums_size)) return NO_MEMORY;
#pragma omp parallel
    {
        configure_tiles();
#pragma omp for schedule(static)
        for (long p = 0; p < panels; p++)
            pack_interleaved(right + p * 32 * depth, x + p * 32, x_pitch, k - p * 32, t, 0);
        bf16 *left = thread_workspace(left_size + sums_size);
        float *sums = (float *)((char *)left + left_size);
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < row_blocks * column_blocks; task++) {
            const long row = task / column_blocks * ROWS, column = task % column_blocks * COLUMNS;
            const long rows = MIN(ROWS, n - row), columns = MIN(COLUMNS, k - column);
            for (long first = 0; first == 0 || first < t; first += DEPTH) { /* once without tokens, to write zeros */
                const long ks = MIN(DEPTH, t - first);
                for (long i = 0; i < rows; i += 32)
                    pack_interleaved(left + i * DEPTH, dy + first * dy_pitch + row + i, dy_pitch, rows - i, ks, 1);
                for (long j = 0; j < columns; j += 32)
                    for (long i = 0; i < rows; i += 32) {
                        float *sum = sums + (i / 32 * (COLUMNS / 32) + j / 32) * BLOCK;
                        const bf16 *panel = right + (column + j) * depth + first * 32;
                        multiply_panels(left + i * DEPTH, panel, (ks + 31) / 32, first ? sum : NULL, sum);
                        if (first + DEPTH >= t)
                            add_block(sum, gradient + (row + i) * k + column + j, k, rows - i, columns - j, accumulate);
                    }
            }
        }
        _tile_release();
    }
    return DONE;
}

/* --- attention ---------------------------------------------------------------------------------------------------

   A thread computes one head of one sequence of qkv [t, 3, heads, size]: scores of 32 queries at a time, in blocks of
   32 keys. */

typedef struct {
    const bf16 *qkv;
    const int32_t *bounds; /* cu_seqlens: [sequences + 1] */
    long sequences, heads, size;
    Dropout dropout;
} Attention;

typedef struct {
    long start, length, head, padded; /* padded: the length rounded up to whole panels */
    uint32_t key;
} WorkItem;

static WorkItem work_item(const Attention *a, long number) {
    const long sequence = number / a->heads, head = number % a->heads;
    const long start = a->bounds[sequence], length = a->bounds[sequence + 1] - start;
    const uint32_t key = mix32(a->dropout.key + (uint32_t)start * GOLDEN + (uint32_t)head * ROW_STEP);
    return (WorkItem){start, length, head, ROUND_UP(length, 32), key};
}

/* The first element of the queries (part 0), keys (1) or values (2). */
static inline const bf16 *qkv_part(const Attention *a, WorkItem item, int part) {
    return a->qkv + (item.start * 3 + part) * a->heads * a->size + item.head * a->size;
}

static inline long longest_of(const Attention *a) {
    long longest = 0;
    for (long i = 0; i < a->sequences; i++) {
        const long length = a->bounds[i + 1] - a->bounds[i];
        if (length > longest) longest = length;
    }
    return longest;
}

static void pack_row_panels(bf16 *panels, const bf16 *from, long pitch, long rows, long ks, int transposed) {
    for (long i = 0; i < rows; i += 32)
        pack_rows(panels + i * ROUND_UP(ks, 32), from + i * pitch, pitch, rows - i, ks, transposed);
}

static void pack_column_panels(bf16 *panels, const bf16 *from, long pitch, long columns, long ks, int transposed) {
    for (long i = 0; i < columns; i += 32)
        pack_columns(panels + i * ROUND_UP(ks, 32), from + i, pitch, columns - i, ks, transposed);
}

/* 16 columns of a row, in a row of 32 x 32 blocks. */
static inline float *block_row(float *blocks, long row, long column) {
    return blocks + column / 32 * BLOCK + ((row >> 4) * 2 + ((column >> 4) & 1)) * 256 + (row & 15) * 16;
}

/* Writes up to 32 rows of a head from blocks of 32 columns, each row times its factor, to rows of `pitch` elements. */
static void store_rows(const float *blocks, bf16 *out, long pitch, long rows, long size, const float *factors) {
    for (long i = 0; i < MIN(32, rows); i++)
        for (long d = 0; d < size; d += 16) {
            const __m512 values = _mm512_load_ps(block_row((float *)blocks, i, d));
            store16(out + i * pitch + d, _mm512_mul_ps(values, _mm512_set1_ps(factors[i])));
        }
}

EXPORT int attention_forward(
    const bf16 *qkv, const int32_t *bounds, long sequences, long heads, long size, bf16 *out, float *lse, long tokens,
    int64_t seed, long site, uint32_t threshold
) {
    const Attention a = {qkv, bounds, sequences, heads, size, attention_dropout(seed, site, threshold)};
    const long longest = ROUND_UP(longest_of(&a), 32), depth = ROUND_UP(size, 32), pitch = 3 * heads * size;
    const float scale = 1.4426950408889634f / sqrtf((float)size);
    const size_t packed_size = (size_t)longest * depth; /* elements of the packed queries, keys or values */
    const size_t num_bf16 = 3 * packed_size + 32 * longest, num_floats = 32 * (longest + depth);
    const size_t workspace_size = num_bf16 * sizeof(bf16) + num_floats * sizeof(float);
    if (!reserve_thread_workspaces(workspace_size)) return NO_MEMORY;
#pragma omp parallel
    {
        configure_tiles();
        bf16 *query = thread_workspace(workspace_size);
        bf16 *key = query + packed_size, *value = key + packed_size, *weights = value + packed_size;
        float *scores = (float *)(weights + 32 * longest), *result = scores + 32 * longest;
#pragma omp for schedule(dynamic, 1)
        for (long number = 0; number < sequences * heads; number++) {
            const WorkItem item = work_item(&a, number);
            pack_row_panels(query, qkv_part(&a, item, 0), pitch, item.length, size, 0);
            pack_row_panels(key, qkv_part(&a, item, 1), pitch, item.length, size, 1);
            pack_column_panels(value, qkv_part(&a, item, 2), pitch, size, item.length, 0);
            for (long row = 0; row < item.length; row += 32) {
                for (long j = 0; j < item.padded; j += 32)
                    multiply_panels(query + row * depth, key + j * depth, depth / 32, NULL, scores + j / 32 * BLOCK);
                float factors[32];
                for (long i = 0; i < 32; i++) {
                    __m512 largest = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
                    for (long j = 0; j < item.length; j += 16)
                        largest = _mm512_mask_max_ps(
                            largest, inside16(j, item.length), largest, _mm512_load_ps(block_row(scores, i, j))
                        );
                    const float reference = _mm512_reduce_max_ps(largest) * scale;
                    for (long j = 0; j < item.padded; j += 16) {
                        const __m512 exponent = _mm512_fmsub_ps(
                            _mm512_load_ps(block_row(scores, i, j)), _mm512_set1_ps(scale), _mm512_set1_ps(reference)
                        );
                        __m512 weight = _mm512_maskz_mov_ps(inside16(j, item.length), exp2_16(exponent));
                        total = _mm512_add_ps(total, weight);
                        if (threshold)
                            weight = _mm512_maskz_mov_ps(keep_in_attention(item.key, threshold, row + i, j), weight);
                        store16(weights + j / 32 * PANEL_STEP + i * 32 + (j & 16), weight);
                    }
                    const float sum = _mm512_reduce_add_ps(total);
                    factors[i] = a.dropout.inverse_keep / sum;
                    if (row + i < item.length) lse[item.head * tokens + item.start + row + i] = reference + log2f(sum);
                }
                for (long d = 0; d < size; d += 32)
                    multiply_panels(weights, value + d * item.padded, item.padded / 32, NULL, result + d / 32 * BLOCK);
                bf16 *to = out + (item.start + row) * heads * size + item.head * size;
                store_rows(result, to, heads * size, item.length - row, size, factors);
            }
        }
        _tile_release();
    }
    return DONE;
}

/* Two rows (k, k + 1) of 16 columns, as pairs for a panel of a right matrix. */
static inline void store_pairs(bf16 *to, __m512 even, __m512 odd) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    _mm512_store_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

/* Writes the gradient of 32 keys or values, given as a transposed block [32 columns of a head, 32 keys], to rows of
   dqkv, and adds the sum of these rows to `sums`. */
static void
store_transposed(const float *block, bf16 *out, long pitch, long rows, long columns, float factor, float *sums) {
    for (int half = 0; half < 2 && 16 * half < columns; half++) {
        __m512 sum = _mm512_loadu_ps(sums + 16 * half);
        for (int quarter = 0; quarter < 2; quarter++) {
            __m512i row[16];
            for (int i = 0; i < 16; i++) row[i] = _mm512_load_si512(block + (half * 2 + quarter) * 256 + 16 * i);
            transpose16x16(row);
            for (long i = 0; i < MIN(16, rows - 16 * quarter); i++) {
                const __m512 values = _mm512_mul_ps(_mm512_castsi512_ps(row[i]), _mm512_set1_ps(factor));
                store16(out + (16 * quarter + i) * pitch + 16 * half, values);
                sum = _mm512_add_ps(sum, values);
            }
        }
        _mm512_storeu_ps(sums + 16 * half, sum);
    }
}

/* Writes dqkv, and its sums over the tokens of each sequence [sequences, 3, heads, size]. */
EXPORT int attention_backward(
    const bf16 *qkv, const int32_t *bounds, long sequences, long heads, long size, const bf16 *out, const float *lse,
    const bf16 *dout, bf16 *dqkv, float *sums, long tokens, int64_t seed, long site, uint32_t threshold
) {
    const Attention a = {qkv, bounds, sequences, heads, size, attention_dropout(seed, site, threshold)};
    const long longest = ROUND_UP(longest_of(&a), 32), depth = ROUND_UP(size, 32), pitch = 3 * heads * size;
    const float scale = 1.4426950408889634f / sqrtf((float)size);
    const float gradient_scale = 1 / sqrtf((float)size);
    memset(sums, 0, sequences * pitch * sizeof(float));
    const size_t packed_size = (size_t)longest * depth, scores_size = (size_t)longest * longest;
    const size_t num_bf16 = 7 * packed_size + 2 * scores_size + 32 * longest, num_floats = 64 * longest + 32 * depth;
    const size_t workspace_size = num_bf16 * sizeof(bf16) + num_floats * sizeof(float);
    if (!reserve_thread_workspaces(workspace_size)) return NO_MEMORY;
#pragma omp parallel
    {
        configure_tiles();
        bf16 *query = thread_workspace(workspace_size);
        /* for the scores and their gradient */
        bf16 *key = query + packed_size, *value = key + packed_size, *dout_panels = value + packed_size;
        bf16 *key_columns = dout_panels + packed_size; /* for the gradient of queries */
        /* for the gradients of keys and values */
        bf16 *query_transposed = key_columns + packed_size, *dout_transposed = query_transposed + packed_size;
        bf16 *weights = dout_transposed + packed_size; /* [keys / 32][queries / 32] tiles, as is dscores */
        bf16 *dscores = weights + scores_size;
        bf16 *dscores_rows = dscores + scores_size;
        float *scores = (float *)(dscores_rows + 32 * longest), *dweights = scores + 32 * longest;
        float *result = dweights + 32 * longest;
#pragma omp for schedule(dynamic, 1)
        for (long number = 0; number < sequences * heads; number++) {
            const WorkItem item = work_item(&a, number);
            const long offset = item.start * heads * size + item.head * size;
            const long length = item.length, padded = item.padded;
            bf16 *gradient = dqkv + item.start * pitch + item.head * size;
            float *sum = sums + number / heads * pitch + item.head * size;
            pack_row_panels(query, qkv_part(&a, item, 0), pitch, length, size, 0);
            pack_row_panels(key, qkv_part(&a, item, 1), pitch, length, size, 1);
            pack_row_panels(value, qkv_part(&a, item, 2), pitch, length, size, 1);
            pack_row_panels(dout_panels, dout + offset, heads * size, length, size, 0);
            pack_column_panels(key_columns, qkv_part(&a, item, 1), pitch, size, length, 0);
            pack_column_panels(query_transposed, qkv_part(&a, item, 0), pitch, size, length, 1);
            pack_column_panels(dout_transposed, dout + offset, heads * size, size, length, 1);
            for (long row = 0; row < length; row += 32) {
                for (long j = 0; j < padded; j += 32) {
                    multiply_panels(query + row * depth, key + j * depth, depth / 32, NULL, scores + j / 32 * BLOCK);
                    multiply_panels(
                        dout_panels + row * depth, value + j * depth, depth / 32, NULL, dweights + j / 32 * BLOCK
                    );
                }
                for (long i = 0; i < 32; i += 2) {
                    float log_sum[2] = {INFINITY, INFINITY}, delta[2] = {0, 0}; /* rows past the end have weight 0 */
                    for (long r = 0; r < MIN(2, length - row - i); r++) {
                        const long first = offset + (row + i + r) * heads * size;
                        __m512 dot = _mm512_setzero_ps();
                        for (long d = 0; d < size; d += 16)
                            dot = _mm512_fmadd_ps(load16(out + first + d), load16(dout + first + d), dot);
                        delta[r] = _mm512_reduce_add_ps(dot);
                        log_sum[r] = lse[item.head * tokens + item.start + row + i + r];
                    }
                    for (long j = 0; j < padded; j += 16) {
                        const __mmask16 inside = inside16(j, length);
                        __m512 dropped[2], dscore[2];
                        for (int r = 0; r < 2; r++) {
                            const __m512 exponent = _mm512_fmsub_ps(
                                _mm512_load_ps(block_row(scores, i + r, j)), _mm512_set1_ps(scale),
                                _mm512_set1_ps(log_sum[r])
                            );
                            const __m512 weight = _mm512_maskz_mov_ps(inside, exp2_16(exponent));
                            const __mmask16 keep =
                                threshold ? keep_in_attention(item.key, threshold, row + i + r, j) : (__mmask16)0xFFFF;
                            const __m512 inverse = _mm512_maskz_mov_ps(keep, _mm512_set1_ps(a.dropout.inverse_keep));
                            dropped[r] = _mm512_mul_ps(weight, inverse);
                            const __m512 dweight =
                                _mm512_mul_ps(_mm512_load_ps(block_row(dweights, i + r, j)), inverse);
                            dscore[r] = _mm512_mul_ps(weight, _mm512_sub_ps(dweight, _mm512_set1_ps(delta[r])));
                            store16(dscores_rows + j / 32 * PANEL_STEP + (i + r) * 32 + (j & 16), dscore[r]);
                        }
                        const long pair =
                            (j / 32 * (padded / 32) + row / 32) * PANEL_STEP + ((j >> 4) & 1) * TILE + i * 16;
                        store_pairs(weights + pair, dropped[0], dropped[1]);
                        store_pairs(dscores + pair, dscore[0], dscore[1]);
                    }
                }
                float factors[32];
                for (int i = 0; i < 32; i++) factors[i] = gradient_scale;
                for (long d = 0; d < size; d += 32)
                    multiply_panels(dscores_rows, key_columns + d * padded, padded / 32, NULL, result + d / 32 * BLOCK);
                store_rows(result, gradient + row * pitch, pitch, length - row, size, factors);
                for (long i = 0; i < MIN(32, length - row); i++)
                    for (long d = 0; d < size; d += 16) {
                        const __m512 values = _mm512_load_ps(block_row(result, i, d));
                        _mm512_storeu_ps(
                            sum + d, _mm512_fmadd_ps(values, _mm512_set1_ps(gradient_scale), _mm512_loadu_ps(sum + d))
                        );
                    }
            }
            for (long j = 0; j < length; j += 32)
                for (long d = 0; d < size; d += 32) {
                    const bf16 *weight_panel = weights + j * padded, *dscore_panel = dscores + j * padded;
                    bf16 *key_gradient = gradient + j * pitch + heads * size + d;
                    multiply_panels(query_transposed + d * padded, dscore_panel, padded / 32, NULL, result);
                    store_transposed(
                        result, key_gradient, pitch, length - j, size - d, gradient_scale, sum + heads * size + d
                    );
                    multiply_panels(dout_transposed + d * padded, weight_panel, padded / 32, NULL, result);
                    store_transposed(
                        result, key_gradient + heads * size, pitch, length - j, size - d, 1, sum + 2 * heads * size + d
                    );
                }
        }
        _tile_release();
    }
    return DONE;
}

/* --- LayerNorm(residual + dropout(x + bias)) --------------------------------------------------------------------- */

/* LayerNorm of a row in place, given the row's sum; writes its mean and 1 / deviation to `statistics`. */
static inline void
normalize(float *z, float total, const float *weight, const float *shift, float eps, long width, float *statistics) {
    const __m512 mean = _mm512_set1_ps(total / width);
    __m512 squares = _mm512_setzero_ps();
    for (long c = 0; c < width; c += 16) {
        const __m512 centered = _mm512_sub_ps(_mm512_load_ps(z + c), mean);
        squares = _mm512_fmadd_ps(centered, centered, squares);
    }
    const float rstd = 1 / sqrtf(_mm512_reduce_add_ps(squares) / width + eps);
    for (long c = 0; c < width; c += 16) {
        const __m512 normed = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(z + c), mean), _mm512_set1_ps(rstd));
        _mm512_store_ps(z + c, _mm512_fmadd_ps(normed, _mm512_loadu_ps(weight + c), _mm512_loadu_ps(shift + c)));
    }
    statistics[0] = total / width;
    statistics[1] = rstd;
}

EXPORT int norm_forward(
    const bf16 *x, const float *bias, const bf16 *residual, const float *weight, const float *shift, bf16 *y,
    float *statistics, long rows, long width, float eps, int64_t seed, long site, uint32_t threshold
) {
    const Dropout dropout = row_dropout(seed, site, threshold);
    const size_t workspace_size = width * sizeof(float);
    if (!reserve_thread_workspaces(workspace_size)) return NO_MEMORY;
#pragma omp parallel
    {
        float *z = thread_workspace(workspace_size);
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++) {
            __m512 total = _mm512_setzero_ps();
            __mmask16 keep;
            for (long c = 0; c < width; c += 16) {
                const __m512 hidden = _mm512_add_ps(load16(x + row * width + c), _mm512_loadu_ps(bias + c));
                const __m512 sum =
                    _mm512_add_ps(dropout16(hidden, dropout, row, c, &keep), load16(residual + row * width + c));
                total = _mm512_add_ps(total, sum);
                _mm512_store_ps(z + c, sum);
            }
            normalize(z, _mm512_reduce_add_ps(total), weight, shift, eps, width, statistics + 2 * row);
            for (long c = 0; c < width; c += 16) store16(y + row * width + c, _mm512_load_ps(z + c));
        }
    }
    return DONE;
}

/* The gradient dz of a row's input, from its normed values and incoming gradient; adds the row to two column sums. */
static void norm_gradient(
    const float *normed, const float *incoming, const float *weight, float rstd, float *dz, float *dweight,
    float *dshift, long width
) {
    __m512 dot = _mm512_setzero_ps(), sum = _mm512_setzero_ps();
    for (long c = 0; c < width; c += 16) {
        const __m512 gradient = _mm512_load_ps(incoming + c), value = _mm512_load_ps(normed + c);
        const __m512 scaled = _mm512_mul_ps(gradient, _mm512_loadu_ps(weight + c));
        dot = _mm512_fmadd_ps(scaled, value, dot);
        sum = _mm512_add_ps(sum, scaled);
        _mm512_store_ps(dweight + c, _mm512_fmadd_ps(gradient, value, _mm512_load_ps(dweight + c)));
        _mm512_store_ps(dshift + c, _mm512_add_ps(gradient, _mm512_load_ps(dshift + c)));
    }
    const __m512 mean_dot = _mm512_set1_ps(_mm512_reduce_add_ps(dot) / width);
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / width);
    for (long c = 0; c < width; c += 16) {
        const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(incoming + c), _mm512_loadu_ps(weight + c));
        const __m512 centered = _mm512_sub_ps(_mm512_fnmadd_ps(_mm512_load_ps(normed + c), mean_dot, scaled), mean);
        _mm512_store_ps(dz + c, _mm512_mul_ps(centered, _mm512_set1_ps(rstd)));
    }
}

/* Writes partial sums of each thread [threads, 3, width]: gradients of the bias, LayerNorm's weight and its shift. */
EXPORT int norm_backward(
    const bf16 *dy, const bf16 *second, const bf16 *x, const float *bias, const bf16 *residual, const float *weight,
    const float *statistics, bf16 *dx, bf16 *dresidual, float *partials, long rows, long width, int64_t seed, long site,
    uint32_t threshold
) {
    const Dropout dropout = row_dropout(seed, site, threshold);
    const size_t workspace_size = 6 * width * sizeof(float);
    if (!reserve_thread_workspaces(workspace_size)) return NO_MEMORY;
#pragma omp parallel
    {
        float *normed = thread_workspace(workspace_size);
        float *incoming = normed + width, *dz = incoming + width, *thread_sums = dz + width;
        memset(thread_sums, 0, 3 * width * sizeof(float));
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++) {
            const long offset = row * width;
            const __m512 mean = _mm512_set1_ps(statistics[2 * row]);
            const float rstd = statistics[2 * row + 1];
            __mmask16 keep;
            for (long c = 0; c < width; c += 16) {
                __m512 gradient = load16(dy + offset + c);
                if (second) gradient = _mm512_add_ps(gradient, load16(second + offset + c));
                const __m512 hidden = _mm512_add_ps(load16(x + offset + c), _mm512_loadu_ps(bias + c));
                const __m512 dropped = dropout16(hidden, dropout, row, c, &keep);
                const __m512 sum = _mm512_add_ps(dropped, load16(residual + offset + c));
                _mm512_store_ps(incoming + c, gradient);
                _mm512_store_ps(normed + c, _mm512_mul_ps(_mm512_sub_ps(sum, mean), _mm512_set1_ps(rstd)));
            }
            norm_gradient(normed, incoming, weight, rstd, dz, thread_sums + width, thread_sums + 2 * width, width);
            for (long c = 0; c < width; c += 16) {
                const __m512 gradient = _mm512_load_ps(dz + c);
                const __m512 dhidden = dropout16(gradient, dropout, row, c, &keep);
                store16(dresidual + offset + c, gradient);
                store16(dx + offset + c, dhidden);
                _mm512_store_ps(thread_sums + c, _mm512_add_ps(dhidden, _mm512_load_ps(thread_sums + c)));
            }
        }
        memcpy(partials + 3 * width * omp_get_thread_num(), thread_sums, 3 * width * sizeof(float));
    }
    return DONE;
}

/* --- GELU(x + bias) ---------------------------------------------------------------------------------------------- */

EXPORT int gelu_forward(const bf16 *x, const float *bias, bf16 *y, long rows, long width) {
#pragma omp parallel for schedule(static)
    for (long row = 0; row < rows; row++)
        for (long c = 0; c < width; c += 16) {
            const __m512 v = _mm512_add_ps(load16(x + row * width + c), _mm512_loadu_ps(bias + c));
            store16(y + row * width + c, _mm512_mul_ps(v, distribution16(v)));
        }
    return DONE;
}

/* Writes dx, and partial sums [threads, width] of the bias's gradient. */
EXPORT int
gelu_backward(const bf16 *dy, const bf16 *x, const float *bias, bf16 *dx, float *partials, long rows, long width) {
    const size_t workspace_size = width * sizeof(float);
    if (!reserve_thread_workspaces(workspace_size)) return NO_MEMORY;
#pragma omp parallel
    {
        float *thread_sums = thread_workspace(workspace_size);
        memset(thread_sums, 0, width * sizeof(float));
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++)
            for (long c = 0; c < width; c += 16) {
                const __m512 v = _mm512_add_ps(load16(x + row * width + c), _mm512_loadu_ps(bias + c));
                const __m512 slope = _mm512_fmadd_ps(v, density16(v), distribution16(v));
                const __m512 gradient = _mm512_mul_ps(load16(dy + row * width + c), slope);
                store16(dx + row * width + c, gradient);
                _mm512_store_ps(thread_sums + c, _mm512_add_ps(gradient, _mm512_load_ps(thread_sums + c)));
            }
        memcpy(partials + width * omp_get_thread_num(), thread_sums, width * sizeof(float));
    }
    return DONE;
}

/* --- embeddings: dropout(LayerNorm(word + position + segment)) --------------------------------------------------- */

typedef struct {
    const bf16 *words;
    const float *positions, *segments;
    const int64_t *word_ids, *position_ids, *segment_ids;
} EmbeddingInputs;

static inline __m512 embedding_sum16(const EmbeddingInputs *inputs, long row, long column, long width) {
    const __m512 word = load16(inputs->words + inputs->word_ids[row] * width + column);
    const __m512 position = _mm512_loadu_ps(inputs->positions + inputs->position_ids[row] * width + column);
    return _mm512_add_ps(
        _mm512_add_ps(word, position), _mm512_loadu_ps(inputs->segments + inputs->segment_ids[row] * width + column)
    );
}

EXPORT int embed_forward(
    const bf16 *words, const float *positions, const float *segments, const int64_t *word_ids,
    const int64_t *position_ids, const int64_t *segment_ids, const float *weight, const float *shift, bf16 *y,
    float *statistics, long rows, long width, float eps, int64_t seed, long site, uint32_t threshold
) {
    const EmbeddingInputs inputs = {words, positions, segments, word_ids, position_ids, segment_ids};
    const Dropout dropout = row_dropout(seed, site, threshold);
    const size_t workspace_size = width * sizeof(float);
    if (!reserve_thread_workspaces(workspace_size)) return NO_MEMORY;
#pragma omp parallel
    {
        float *z = thread_workspace(workspace_size);
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++) {
            __m512 total = _mm512_setzero_ps();
            for (long c = 0; c < width; c += 16) {
                const __m512 sum = embedding_sum16(&inputs, row, c, width);
                total = _mm512_add_ps(total, sum);
                _mm512_store_ps(z + c, sum);
            }
            normalize(z, _mm512_reduce_add_ps(total), weight, shift, eps, width, statistics + 2 * row);
            for (long c = 0; c < width; c += 16) {
                __mmask16 keep;
                store16(y + row * width + c, dropout16(_mm512_load_ps(z + c), dropout, row, c, &keep));
            }
        }
    }
    return DONE;
}

/* Writes the gradient of the three embeddings' sum, dsum [rows, width], and partial sums [threads, 4, width]: gradients
   of LayerNorm's weight and shift, and of the embeddings of segments 0 and 1. */
EXPORT int embed_backward(
    const bf16 *dy, const bf16 *second, const bf16 *words, const float *positions, const float *segments,
    const int64_t *word_ids, const int64_t *position_ids, const int64_t *segment_ids, const float *weight,
    const float *statistics, float *dsum, float *partials, long rows, long width, int64_t seed, long site,
    uint32_t threshold
) {
    const EmbeddingInputs inputs = {words, positions, segments, word_ids, position_ids, segment_ids};
    const Dropout dropout = row_dropout(seed, site, threshold);
    const size_t workspace_size = 7 * width * sizeof(float);
    if (!reserve_thread_workspaces(workspace_size)) return NO_MEMORY;
#pragma omp parallel
    {
        float *normed = thread_workspace(workspace_size);
        float *incoming = normed + width, *dz = incoming + width, *thread_sums = dz + width;
        memset(thread_sums, 0, 4 * width * sizeof(float));
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++) {
            const long offset = row * width;
            const __m512 mean = _mm512_set1_ps(statistics[2 * row]), rstd = _mm512_set1_ps(statistics[2 * row + 1]);
            for (long c = 0; c < width; c += 16) {
                __mmask16 keep;
                const __m512 gradient = _mm512_add_ps(load16(dy + offset + c), load16(second + offset + c));
                _mm512_store_ps(incoming + c, dropout16(gradient, dropout, row, c, &keep));
                const __m512 sum = embedding_sum16(&inputs, row, c, width);
                _mm512_store_ps(normed + c, _mm512_mul_ps(_mm512_sub_ps(sum, mean), rstd));
            }
            norm_gradient(
                normed, incoming, weight, statistics[2 * row + 1], dz, thread_sums, thread_sums + width, width
            );
            float *segment_sum = thread_sums + (2 + segment_ids[row]) * width;
            for (long c = 0; c < width; c += 16) {
                const __m512 gradient = _mm512_load_ps(dz + c);
                _mm512_storeu_ps(dsum + offset + c, gradient);
                if (segment_ids[row] < 2)
                    _mm512_store_ps(segment_sum + c, _mm512_add_ps(gradient, _mm512_load_ps(segment_sum + c)));
            }
        }
        memcpy(partials + 4 * width * omp_get_thread_num(), thread_sums, 4 * width * sizeof(float));
    }
    return DONE;
}

/* table[ids[row]] += values[row]. Each thread has its own columns, so rows are always added in the same order. */
EXPORT int add_rows(const float *values, const int64_t *ids, float *table, long rows, long width) {
#pragma omp parallel for schedule(static)
    for (long strip = 0; strip < width; strip += 64)
        for (long row = 0; row < rows; row++)
            for (long c = strip; c < MIN(strip + 64, width); c += 16) {
                float *to = table + ids[row] * width + c;
                _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_loadu_ps(values + row * width + c)));
            }
    return DONE;
}

/* --- cross-entropy ----------------------------------------------------------------------------------------------- */

/* Writes losses times `scale` and whether predictions are correct (1 or 0), and overwrites logits [rows, pitch] by the
   gradient of these losses. Columns from `vocabulary` on are padding; a row with a negative label has loss 0. */
EXPORT int cross_entropy(
    bf16 *logits, const int64_t *labels, float *losses, float *corrects, long rows, long pitch, long vocabulary,
    float scale
) {
    const __m512 log2_e = _mm512_set1_ps(1.4426950408889634f);
#pragma omp parallel for schedule(static)
    for (long row = 0; row < rows; row++) {
        bf16 *row_logits = logits + row * pitch;
        const long label = labels[row];
        losses[row] = corrects[row] = 0;
        if (label < 0) {
            memset(row_logits, 0, pitch * sizeof(bf16));
            continue;
        }
        __m512 largest = _mm512_set1_ps(-INFINITY), sums = _mm512_setzero_ps();
        for (long c = 0; c < vocabulary; c += 16)
            largest = _mm512_mask_max_ps(
                largest, inside16(c, vocabulary), largest, load16_masked(row_logits + c, inside16(c, vocabulary))
            );
        const float maximum = _mm512_reduce_max_ps(largest);
        const float at_label = bf16_to_float(row_logits[label]);
        int is_first = at_label == maximum;
        for (long c = 0; c < vocabulary; c += 16) {
            const __mmask16 inside = inside16(c, vocabulary);
            const __m512 values = load16_masked(row_logits + c, inside);
            if (is_first && c < label)
                is_first = !(_mm512_cmp_ps_mask(values, _mm512_set1_ps(maximum), _CMP_EQ_OQ) & inside16(c, label));
            sums = _mm512_add_ps(
                sums, _mm512_maskz_mov_ps(
                          inside, exp2_16(_mm512_mul_ps(_mm512_sub_ps(values, _mm512_set1_ps(maximum)), log2_e))
                      )
            );
        }
        const float total = _mm512_reduce_add_ps(sums);
        const __m512 factor = _mm512_set1_ps(scale / total);
        for (long c = 0; c < pitch; c += 16) {
            const __mmask16 inside = inside16(c, vocabulary);
            const __m512 above = _mm512_sub_ps(load16_masked(row_logits + c, inside), _mm512_set1_ps(maximum));
            const __m512 weight = _mm512_maskz_mul_ps(inside, exp2_16(_mm512_mul_ps(above, log2_e)), factor);
            store16_masked(row_logits + c, inside16(c, pitch), weight);
        }
        row_logits[label] = float_to_bf16((expf(at_label - maximum) / total - 1) * scale);
        losses[row] = (maximum - at_label + logf(total)) * scale;
        corrects[row] = (float)is_first;
    }
    return DONE;
}

/* --- LAMB and AdamW over flat buffers ---------------------------------------------------------------------------- */

/* Updates the moments, overwrites gradients by updates, and writes the sums of squares of weights and updates of each
   chunk [chunks, 2]. Chunks as in lamb.py. */
EXPORT int lamb_update(
    const float *weights, float *gradients, float *first, float *second, const int64_t *chunks, long num_chunks,
    long chunk_size, float *squares, float clip, float decay, double beta1, double beta2, float eps, float correction1,
    float correction2
) {
#pragma omp parallel for schedule(static)
    for (long chunk = 0; chunk < num_chunks; chunk++) {
        const long start = chunks[4 * chunk], stop = MIN(start + chunk_size, chunks[4 * chunk + 1]);
        const __m512 decay16 = _mm512_set1_ps(chunks[4 * chunk + 2] ? decay : 0);
        __m512 weight_squares = _mm512_setzero_ps(), update_squares = _mm512_setzero_ps();
        for (long i = start; i < stop; i += 16) {
            const __mmask16 inside = inside16(i, stop);
            const __m512 weight = _mm512_maskz_loadu_ps(inside, weights + i);
            const __m512 gradient = _mm512_mul_ps(_mm512_maskz_loadu_ps(inside, gradients + i), _mm512_set1_ps(clip));
            __m512 mean = _mm512_maskz_loadu_ps(inside, first + i),
                   variance = _mm512_maskz_loadu_ps(inside, second + i);
            mean = _mm512_fmadd_ps(_mm512_sub_ps(gradient, mean), _mm512_set1_ps((float)(1 - beta1)), mean);
            const __m512 square = _mm512_mul_ps(_mm512_mul_ps(gradient, gradient), _mm512_set1_ps((float)(1 - beta2)));
            variance = _mm512_fmadd_ps(variance, _mm512_set1_ps((float)beta2), square);
            const __m512 deviation = _mm512_sqrt_ps(_mm512_mul_ps(variance, _mm512_set1_ps(correction2)));
            const __m512 ratio = _mm512_div_ps(
                _mm512_mul_ps(mean, _mm512_set1_ps(correction1)), _mm512_add_ps(deviation, _mm512_set1_ps(eps))
            );
            const __m512 update = _mm512_maskz_fmadd_ps(inside, decay16, weight, ratio);
            _mm512_mask_storeu_ps(first + i, inside, mean);
            _mm512_mask_storeu_ps(second + i, inside, variance);
            _mm512_mask_storeu_ps(gradients + i, inside, update);
            weight_squares = _mm512_fmadd_ps(weight, weight, weight_squares);
            update_squares = _mm512_fmadd_ps(update, update, update_squares);
        }
        squares[2 * chunk] = _mm512_reduce_add_ps(weight_squares);
        squares[2 * chunk + 1] = _mm512_reduce_add_ps(update_squares);
    }
    return DONE;
}

/* weights -= rates[tensor] * updates; also writes the new weights to `copy` in bf16 unless it is NULL. */
EXPORT int lamb_apply(
    float *weights, const float *updates, bf16 *copy, const int64_t *chunks, long num_chunks, long chunk_size,
    const float *rates
) {
#pragma omp parallel for schedule(static)
    for (long chunk = 0; chunk < num_chunks; chunk++) {
        const long start = chunks[4 * chunk], stop = MIN(start + chunk_size, chunks[4 * chunk + 1]);
        const __m512 rate = _mm512_set1_ps(rates[chunks[4 * chunk + 3]]);
        for (long i = start; i < stop; i += 16) {
            const __mmask16 inside = inside16(i, stop);
            const __m512 weight = _mm512_maskz_loadu_ps(inside, weights + i);
            const __m512 changed = _mm512_fnmadd_ps(rate, _mm512_maskz_loadu_ps(inside, updates + i), weight);
            _mm512_mask_storeu_ps(weights + i, inside, changed);
            if (copy) store16_masked(copy + i, inside, changed);
        }
    }
    return DONE;
}

/* --- setup ------------------------------------------------------------------------------------------------------ */

/* Asks Linux for permission to use the tile registers; returns 0 if it grants it. */
EXPORT int request_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

EXPORT int thread_count(void) { return omp_get_max_threads(); }
