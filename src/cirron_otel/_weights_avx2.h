/* Histograms of floats where the processor has AVX2: twice as fast as comparing with every edge.
 *
 * One multiplication tells the bin of a value. Where rounding might have put it on the wrong side
 * of an edge the caller compares after all, so that the counts are the same as without this.
 */

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))

/* The bins of n finite floats, a multiple of 32, in any order; 0 where one lies too near to an edge.
 *
 * A bin is 2^22 wide here; the roundings of the difference, of per_unit and of the product move a
 * value by at most 13, to which 32 is added: from an edge on, a value is in the right bin, and all
 * that comes to lie less than 64 above one counts as near, for it may be from below. The clamps keep
 * the two ends, where many values may lie, away from theirs.
 */
TARGET static int
avx2_float_bins(const float *x, int n, float lo, float per_unit, uint8_t *bins)
{
    const __m256 low = _mm256_set1_ps(lo), scale = _mm256_set1_ps(per_unit);
    const __m256 middle = _mm256_set1_ps(32), least = _mm256_set1_ps(1024),
                 most = _mm256_set1_ps((1 << 26) - 1024);
    const __m256i inside = _mm256_set1_epi32((1 << 22) - 1), width = _mm256_set1_epi32(64);
    __m256i near = _mm256_setzero_si256(), bin[4];
    for (int i = 0; i < n; i += 32) {
        for (int j = 0; j < 4; j++) {
            __m256 from = _mm256_sub_ps(_mm256_loadu_ps(x + i + 8 * j), low);
            __m256 at = _mm256_fmadd_ps(from, scale, middle);
            at = _mm256_min_ps(_mm256_max_ps(at, least), most);
            __m256i place = _mm256_cvttps_epi32(at);
            __m256i past = _mm256_and_si256(place, inside);
            near = _mm256_or_si256(near, _mm256_cmpgt_epi32(width, past));
            bin[j] = _mm256_srli_epi32(place, 22);
        }
        __m256i first = _mm256_packs_epi32(bin[0], bin[1]), second = _mm256_packs_epi32(bin[2], bin[3]);
        _mm256_store_si256((__m256i *)(bins + i), _mm256_packus_epi16(first, second));
    }
    return _mm256_testz_si256(near, near);
}

/* counts[k] += how many of n bytes, a multiple of 32 and at most 255 times that, are k. */
TARGET static void
avx2_count_bins(const uint8_t *bins, int n, int64_t *counts)
{
    for (int first = 0; first < BINS; first += 8) {
        __m256i seen[8];
        for (int k = 0; k < 8; k++)
            seen[k] = _mm256_setzero_si256();
        for (int i = 0; i < n; i += 32) {
            __m256i bin = _mm256_load_si256((const __m256i *)(bins + i));
            for (int k = 0; k < 8; k++)
                seen[k] = _mm256_sub_epi8(
                    seen[k], _mm256_cmpeq_epi8(bin, _mm256_set1_epi8((char)(first + k))));
        }
        for (int k = 0; k < 8; k++) {
            int64_t quarters[4];
            _mm256_storeu_si256((__m256i *)quarters,
                                _mm256_sad_epu8(seen[k], _mm256_setzero_si256()));
            counts[first + k] += quarters[0] + quarters[1] + quarters[2] + quarters[3];
        }
    }
}

#undef TARGET
