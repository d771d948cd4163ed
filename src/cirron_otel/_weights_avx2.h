/* Sums and histograms of floats where the processor has AVX2 and FMA.
 *
 * Histograms: twice as fast as comparing with every edge. One multiplication tells the bin of a
 * value. Where rounding might have put it on the wrong side of an edge the caller compares after
 * all, so that the counts are the same as without this.
 */

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))

/* As the loop in _weights_kernel.h. Four sums beside each other, as one waits for its last addition;
 * half of the additions are written as multiplications by 1, for there are units of both kinds.
 */
TARGET static void
avx2_float_sums(const float *x, int n, double pivot, Moments *out)
{
    const __m256d away = _mm256_set1_pd(pivot), same = _mm256_set1_pd(1);
    __m256d firsts[4], seconds[4];
    __m256 lows[2], highs[2];
    for (int j = 0; j < 4; j++)
        firsts[j] = seconds[j] = _mm256_setzero_pd();
    lows[0] = lows[1] = _mm256_set1_ps(INFINITY);
    highs[0] = highs[1] = _mm256_set1_ps(-INFINITY);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        for (int j = 0; j < 4; j++) {
            __m256d value = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * j));
            __m256d from = _mm256_sub_pd(value, away);
            firsts[j] = j % 2 ? _mm256_fmadd_pd(from, same, firsts[j]) : _mm256_add_pd(firsts[j], from);
            seconds[j] = _mm256_fmadd_pd(from, from, seconds[j]);
        }
        for (int j = 0; j < 2; j++) {
            __m256 value = _mm256_loadu_ps(x + i + 8 * j);
            lows[j] = _mm256_min_ps(value, lows[j]); /* a NaN is passed over */
            highs[j] = _mm256_max_ps(value, highs[j]);
        }
    }
    double sums[8];
    float ends[16];
    _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_add_pd(firsts[0], firsts[1]),
                                         _mm256_add_pd(firsts[2], firsts[3])));
    _mm256_storeu_pd(sums + 4, _mm256_add_pd(_mm256_add_pd(seconds[0], seconds[1]),
                                             _mm256_add_pd(seconds[2], seconds[3])));
    _mm256_storeu_ps(ends, _mm256_min_ps(lows[0], lows[1]));
    _mm256_storeu_ps(ends + 8, _mm256_max_ps(highs[0], highs[1]));
    double first = sums[0] + sums[1] + sums[2] + sums[3];
    double second = sums[4] + sums[5] + sums[6] + sums[7];
    float lo = ends[0], hi = ends[8];
    for (int j = 1; j < 8; j++) {
        lo = ends[j] < lo ? ends[j] : lo;
        hi = ends[8 + j] > hi ? ends[8 + j] : hi;
    }
    for (; i < n; i++) {
        float value = x[i];
        double from = (double)value - pivot;
        first += from;
        second += from * from;
        lo = value < lo ? value : lo;
        hi = value > hi ? value : hi;
    }
    *out = (Moments){first, second, lo, hi};
}

/* The bins of n finite floats, a multiple of 32, in any order; 0 where one lies too near to an edge.
 *
 * A bin is 2^22 wide here. Where low is 0 the range holds 0, no value is larger than the range is
 * wide, and from, which then is the place of 0, needs no difference: the roundings of per_unit, from
 * and the product move a value by at most 4 each. Else those of the difference, per_unit and the
 * product do by at most 13. From says where the lowest value comes to lie, 32 above its edge: so
 * from an edge on, a value is in the right bin, and all that comes to lie less than 64 above one
 * counts as near, for it may be from below. The clamps keep the two ends, where many values may lie,
 * away from theirs.
 */
TARGET static int
avx2_float_bins(const float *x, int n, float low, float per_unit, float from, uint8_t *bins)
{
    const __m256 lowest = _mm256_set1_ps(low), scale = _mm256_set1_ps(per_unit);
    const __m256 begin = _mm256_set1_ps(from), least = _mm256_set1_ps(1024),
                 most = _mm256_set1_ps((1 << 26) - 1024);
    __m256i nearest = _mm256_set1_epi32(-1), bin[4];
    for (int i = 0; i < n; i += 32) {
        for (int j = 0; j < 4; j++) {
            __m256 value = _mm256_loadu_ps(x + i + 8 * j);
            if (low != 0)
                value = _mm256_sub_ps(value, lowest);
            __m256 at = _mm256_fmadd_ps(value, scale, begin);
            at = _mm256_min_ps(_mm256_max_ps(at, least), most);
            __m256i place = _mm256_cvttps_epi32(at);
            /* What is above the edge, without the bin. */
            nearest = _mm256_min_epu32(nearest, _mm256_slli_epi32(place, 10));
            bin[j] = _mm256_srli_epi32(place, 22);
        }
        __m256i first = _mm256_packs_epi32(bin[0], bin[1]), second = _mm256_packs_epi32(bin[2], bin[3]);
        _mm256_store_si256((__m256i *)(bins + i), _mm256_packus_epi16(first, second));
    }
    __m256i is_near = _mm256_cmpeq_epi32(_mm256_srli_epi32(nearest, 16), _mm256_setzero_si256());
    return _mm256_testz_si256(is_near, is_near);
}

/* counts[k] += how many of n bytes, a multiple of 32 and at most 255 times that, are k.
 *
 * Two bins share a byte, four bits each, of which one addition serves both; before they overflow
 * they are added to bytes.
 */
TARGET static void
avx2_count_bins(const uint8_t *bins, int n, int64_t *counts)
{
    const __m256i half = _mm256_set1_epi8(15);
    for (int first = 0; first < BINS; first += 8) {
        __m256i one[4], seen[8];
        for (int k = 0; k < 4; k++) {
            uint8_t of[32] = {0};
            of[first + 2 * k] = of[16 + first + 2 * k] = 1;
            of[first + 2 * k + 1] = of[16 + first + 2 * k + 1] = 16;
            one[k] = _mm256_loadu_si256((const __m256i *)of);
            seen[2 * k] = seen[2 * k + 1] = _mm256_setzero_si256();
        }
        for (int i = 0; i < n;) {
            int end = n - i < 15 * 32 ? n : i + 15 * 32;
            __m256i pair[4];
            for (int k = 0; k < 4; k++)
                pair[k] = _mm256_setzero_si256();
            for (; i < end; i += 32) {
                __m256i bin = _mm256_load_si256((const __m256i *)(bins + i));
                for (int k = 0; k < 4; k++)
                    pair[k] = _mm256_add_epi8(pair[k], _mm256_shuffle_epi8(one[k], bin));
            }
            for (int k = 0; k < 4; k++) {
                __m256i upper = _mm256_and_si256(_mm256_srli_epi16(pair[k], 4), half);
                seen[2 * k] = _mm256_add_epi8(seen[2 * k], _mm256_and_si256(pair[k], half));
                seen[2 * k + 1] = _mm256_add_epi8(seen[2 * k + 1], upper);
            }
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
