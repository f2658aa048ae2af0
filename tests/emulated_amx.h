/* AMX and AVX512_BF16 in plain AVX-512: the few instructions that cpu.c uses, for tests on CPUs without them.

   Compile with `-march=skylake-avx512 -include emulated_amx.h`. Each function follows the pseudocode of Intel's
   manual: shapes, order of sums, rounding, denormals. What a CPU would refuse is a trap (SIGILL) here, too. */

#define _GNU_SOURCE
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero(tile) (void)(*emulated_tile(tile) = (EmulatedTile){0})
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
#define _mm512_cvtneps_pbh emulated_to_bf16
#define _mm_cvtneps_pbh(values) _mm256_castsi256_si128(emulated_to_bf16(_mm512_zextps128_ps512(values)))
#define syscall(...) 0L /* Linux need not grant what is not there */

typedef struct {
    __m512i row[16];
} EmulatedTile;

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} EmulatedConfig;

static _Thread_local EmulatedConfig emulated_config; /* palette 0: there are no tiles */
static _Thread_local EmulatedTile emulated_tiles[8];

static inline void emulated_loadconfig(const void *place) {
    EmulatedConfig new;
    memcpy(&new, place, sizeof new);
    if (new.palette != 1 || new.start_row) __builtin_trap();
    for (int i = 0; i < 14; i++)
        if (new.reserved[i]) __builtin_trap();
    for (int i = 0; i < 16; i++)
        if (new.rows[i] > (i < 8 ? 16 : 0) || new.bytes[i] > (i < 8 ? 64 : 0)) __builtin_trap();
    emulated_config = new;
    memset(emulated_tiles, 0, sizeof emulated_tiles);
}

static inline void emulated_release(void) { emulated_config.palette = 0; }

static inline EmulatedTile *emulated_tile(int tile) {
    if (!emulated_config.palette || !emulated_config.rows[tile] || !emulated_config.bytes[tile]) __builtin_trap();
    return &emulated_tiles[tile];
}

static inline __mmask64 emulated_columns(int tile) { return ~0ull >> (64 - emulated_config.bytes[tile]); }

static inline void emulated_loadd(int tile, const void *place, long stride) {
    EmulatedTile new = {0};
    EmulatedTile *to = emulated_tile(tile);
    for (int i = 0; i < emulated_config.rows[tile]; i++)
        new.row[i] = _mm512_maskz_loadu_epi8(emulated_columns(tile), (const char *)place + i * stride);
    *to = new;
}

static inline void emulated_stored(int tile, void *place, long stride) {
    const EmulatedTile *from = emulated_tile(tile);
    for (int i = 0; i < emulated_config.rows[tile]; i++)
        _mm512_mask_storeu_epi8((char *)place + i * stride, emulated_columns(tile), from->row[i]);
}

static inline __m512 emulated_even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }

static inline __m512 emulated_odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000)));
}

/* In a call, so that the compiler leaves the sums between the changes of MXCSR. */
static __attribute__((noinline)) void
emulated_sums(EmulatedTile *to, const EmulatedTile *left, const EmulatedTile *right, int rows, int pairs) {
    for (int i = 0; i < rows; i++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int k = 0; k < pairs; k++) {
            const __m512i both = _mm512_permutexvar_epi32(_mm512_set1_epi32(k), left->row[i]);
            even = _mm512_fmadd_ps(emulated_even(both), emulated_even(right->row[k]), even);
            odd = _mm512_fmadd_ps(emulated_odd(both), emulated_odd(right->row[k]), odd);
        }
        const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(to->row[i]), _mm512_add_ps(even, odd));
        to->row[i] = _mm512_castps_si512(sum);
    }
}

static inline void emulated_dpbf16ps(int to, int left, int right) {
    EmulatedTile *sum = emulated_tile(to);
    const EmulatedTile *one = emulated_tile(left), *other = emulated_tile(right);
    const uint8_t *rows = emulated_config.rows;
    const uint16_t *bytes = emulated_config.bytes;
    if (to == left || to == right || left == right || rows[to] != rows[left] || bytes[to] != bytes[right] ||
        bytes[left] != 4 * rows[right] || bytes[to] % 4)
        __builtin_trap();
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9FC0); /* round to nearest; denormals are zero, as sources and as results; no exceptions */
    emulated_sums(sum, one, other, rows[to], bytes[left] / 4);
    _mm_setcsr(before);
}

/* To the nearest, of two to the even one; denormals become zero, NaN stays NaN. MXCSR makes no difference. */
static inline __m256i emulated_to_bf16(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values), half = _mm512_srli_epi32(bits, 16);
    const __m512i bias = _mm512_add_epi32(_mm512_and_si512(half, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7FFF));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 is_tiny = _mm512_fpclass_ps_mask(values, 0x20), is_nan = _mm512_fpclass_ps_mask(values, 0x81);
    rounded = _mm512_mask_and_epi32(rounded, is_tiny, half, _mm512_set1_epi32(0x8000));
    rounded = _mm512_mask_or_epi32(rounded, is_nan, half, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(rounded);
}
