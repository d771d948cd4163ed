/* The loops of _weights.c over one block of elements, included once per instruction set.
 *
 * Before the inclusion, V(name) makes the names of one set, TARGET says what it may use, and
 * FLOAT_BINS names the two functions of a quicker histogram, or is NULL, NULL; FLOAT_SUMS may name
 * quicker sums of floats. The loops are plain C; `omp simd` tells the compiler that their sums may
 * be taken in any order, which strict C forbids and a vector unit needs.
 */

/* Sums of x - pivot and of its square, and the range; the caller looks whether they are finite. */
#ifndef FLOAT_SUMS
#define FLOAT_SUMS V(float_sums)
TARGET static void
V(float_sums)(const float *x, int n, double pivot, Moments *out)
{
    double first = 0, second = 0;
    float lo = INFINITY, hi = -INFINITY;
#pragma omp simd reduction(+ : first, second) reduction(min : lo) reduction(max : hi)
    for (int i = 0; i < n; i++) {
        float value = x[i];
        double from = (double)value - pivot;
        first += from;
        second += from * from;
        lo = value < lo ? value : lo;
        hi = value > hi ? value : hi;
    }
    out->first = first;
    out->second = second;
    out->lo = lo;
    out->hi = hi;
}
#endif

TARGET static void
V(double_sums)(const double *x, int n, double pivot, double scale, Moments *out)
{
    double first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
    for (int i = 0; i < n; i++) {
        double from = x[i] * scale - pivot;
        first += from;
        second += from * from;
    }
    out->first = first;
    out->second = second;
}

/* The range; answers how many elements are not finite, which the range then does not tell of. */
TARGET static int64_t
V(double_range)(const double *x, int n, Moments *out)
{
    double lo = INFINITY, hi = -INFINITY;
    int64_t bad = 0;
#pragma omp simd reduction(+ : bad) reduction(min : lo) reduction(max : hi)
    for (int i = 0; i < n; i++) {
        double value = x[i];
        bad += !(fabs(value) <= DBL_MAX);
        lo = value < lo ? value : lo;
        hi = value > hi ? value : hi;
    }
    out->lo = lo;
    out->hi = hi;
    return bad;
}

/* above[k] += how many elements are at or above at[k], for the fifteen inner edges. */
TARGET static void
V(float_above)(const float *x, int n, const float *at, int64_t *above)
{
    for (int k = 0; k < EDGES; k += 5) {
        float e0 = at[k], e1 = at[k + 1], e2 = at[k + 2], e3 = at[k + 3], e4 = at[k + 4];
        int32_t n0 = 0, n1 = 0, n2 = 0, n3 = 0, n4 = 0;
#pragma omp simd reduction(+ : n0, n1, n2, n3, n4)
        for (int i = 0; i < n; i++) {
            float value = x[i];
            n0 += value >= e0;
            n1 += value >= e1;
            n2 += value >= e2;
            n3 += value >= e3;
            n4 += value >= e4;
        }
        above[k] += n0;
        above[k + 1] += n1;
        above[k + 2] += n2;
        above[k + 3] += n3;
        above[k + 4] += n4;
    }
}

TARGET static void
V(double_above)(const double *x, int n, const double *at, int64_t *above)
{
    for (int k = 0; k < EDGES; k += 5) {
        double e0 = at[k], e1 = at[k + 1], e2 = at[k + 2], e3 = at[k + 3], e4 = at[k + 4];
        int64_t n0 = 0, n1 = 0, n2 = 0, n3 = 0, n4 = 0;
#pragma omp simd reduction(+ : n0, n1, n2, n3, n4)
        for (int i = 0; i < n; i++) {
            double value = x[i];
            n0 += value >= e0;
            n1 += value >= e1;
            n2 += value >= e2;
            n3 += value >= e3;
            n4 += value >= e4;
        }
        above[k] += n0;
        above[k + 1] += n1;
        above[k + 2] += n2;
        above[k + 3] += n3;
        above[k + 4] += n4;
    }
}

/* --- To float --------------------------------------------------------------------------------- */

TARGET static void
V(from_bf16)(const uint16_t *in, int n, float *out)
{
    uint32_t *bits = (uint32_t *)out;
    for (int i = 0; i < n; i++)
        bits[i] = (uint32_t)in[i] << 16;
}

/* The exponent moves by 112; the multiplication also makes normal floats of subnormal halves. */
TARGET static void
V(from_f16)(const uint16_t *in, int n, float *out)
{
    union { uint32_t bits; float value; } up = {.bits = (127 + 112) << 23};
    float factor = up.value;
    for (int i = 0; i < n; i++) {
        union { uint32_t bits; float value; } u;
        uint32_t half = in[i], special = (half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
        u.bits = (half & 0x7fff) << 13;
        u.value *= factor;
        u.bits |= special | (half & 0x8000) << 16;
        out[i] = u.value;
    }
}

#define FROM(name, from, to)                                                                       \
    TARGET static void V(name)(const from *in, int n, to *out)                                     \
    {                                                                                              \
        for (int i = 0; i < n; i++)                                                                \
            out[i] = (to)in[i];                                                                    \
    }
FROM(from_i16, int16_t, float)
FROM(from_u16, uint16_t, float)
FROM(from_i32, int32_t, double)
FROM(from_u32, uint32_t, double)
FROM(from_i64, int64_t, double)
FROM(from_u64, uint64_t, double)
#undef FROM

static const Kernel V(kernel) = {
    FLOAT_BINS, FLOAT_SUMS, V(double_sums), V(double_range), V(float_above), V(double_above),
    V(from_bf16), V(from_f16), V(from_i16), V(from_u16),
    V(from_i32), V(from_u32), V(from_i64), V(from_u64),
};

#undef V
#undef FLOAT_BINS
#undef FLOAT_SUMS
#undef TARGET
