/* What _weights.c does with one chunk of an item: sums, bins, and the counts of bytes.
 *
 * Nothing here knows of threads or of Python's objects, but for the two that an Item holds for its
 * owner; every function works on what it is given and may run on any thread.
 */

/* --- Sums -------------------------------------------------------------------------------------- */

/* Of finite values divided by 2^exponent; lo and hi are not divided. */
typedef struct {
    int64_t count, nans, pos_infs, neg_infs;
    double lo, hi, mean, m2;
    int exponent;
} Sums;

static void
change_exponent(Sums *sums, int exponent)
{
    if (sums->exponent != exponent) {
        sums->mean = ldexp(sums->mean, sums->exponent - exponent);
        sums->m2 = ldexp(sums->m2, 2 * (sums->exponent - exponent));
        sums->exponent = exponent;
    }
}

/* Chan, Golub and LeVeque's pairwise merge of means and sums of squared distances. */
static void
merge(Sums *into, const Sums *from)
{
    into->nans += from->nans;
    into->pos_infs += from->pos_infs;
    into->neg_infs += from->neg_infs;
    if (from->count == 0)
        return;
    Sums more = *from;
    if (into->count == 0) {
        more.nans = into->nans;
        more.pos_infs = into->pos_infs;
        more.neg_infs = into->neg_infs;
        *into = more;
        return;
    }
    int exponent = into->exponent > more.exponent ? into->exponent : more.exponent;
    change_exponent(into, exponent);
    change_exponent(&more, exponent);
    double count = (double)(into->count + more.count), share = (double)more.count / count;
    double away = more.mean - into->mean;
    into->m2 += more.m2 + away * away * ((double)into->count * share);
    into->mean += away * share;
    into->count += more.count;
    into->lo = more.lo < into->lo ? more.lo : into->lo;
    into->hi = more.hi > into->hi ? more.hi : into->hi;
}

/* --- Items and their chunks -------------------------------------------------------------------- */

typedef struct {
    const unsigned char *data;
    int64_t size; /* elements */
    int code;
    const double *values; /* of the 256 bytes, for BYTE */
    PyObject *table;      /* keeps them */
    Py_buffer view;       /* keeps the data, where it was given as a buffer */
    int64_t chunks, summed, binned, left; /* chunks taken and not yet done */
    Sums *parts; /* of each chunk */
    Sums sums;
    int64_t *bytes; /* how often each byte was seen */
    double edges[EDGES];
    float float_edges[EDGES];
    float low, per_unit, from; /* of float_bins; per_unit 0: compare with the edges */
    int apart; /* no value of the type lies just below an edge */
    int64_t counts[BINS];
} Item;

static int
is_double(int code)
{
    return code == F64 || code == I32 || code == U32 || code == I64 || code == U64;
}

/* Up to BLOCK elements as float or double: where they lie, or in room. */
static const void *
load(const Item *item, int64_t at, int n, void *room)
{
    const unsigned char *from = item->data + at * SIZES[item->code];
    uint64_t copy[BLOCK];
    int floating = item->code == F32 || item->code == F64;
    if ((uintptr_t)from % SIZES[item->code] == 0) {
        if (floating)
            return from;
    } else { /* a file's memory begins where it likes */
        memcpy(floating ? room : copy, from, (size_t)n * SIZES[item->code]);
        if (floating)
            return room;
        from = (const unsigned char *)copy;
    }
    const void *in = from;
    switch (item->code) {
    case BF16:
        kernel->from_bf16(in, n, room);
        break;
    case F16:
        kernel->from_f16(in, n, room);
        break;
    case I16:
        kernel->from_i16(in, n, room);
        break;
    case U16:
        kernel->from_u16(in, n, room);
        break;
    case I32:
        kernel->from_i32(in, n, room);
        break;
    case U32:
        kernel->from_u32(in, n, room);
        break;
    case I64:
        kernel->from_i64(in, n, room);
        break;
    case U64:
        kernel->from_u64(in, n, room);
        break;
    }
    return room;
}

/* Counts what is not finite and moves the rest together into room; answers how much that is. */
#define KEEP_FINITE(name, type)                                                                    \
    static int name(const type *x, int n, type *room, Sums *sums)                                  \
    {                                                                                              \
        int kept = 0;                                                                              \
        for (int i = 0; i < n; i++) {                                                              \
            type value = x[i];                                                                     \
            if (isfinite(value))                                                                   \
                room[kept++] = value;                                                              \
            else if (isnan(value))                                                                 \
                sums->nans++;                                                                      \
            else if (value > 0)                                                                    \
                sums->pos_infs++;                                                                  \
            else                                                                                   \
                sums->neg_infs++;                                                                  \
        }                                                                                          \
        return kept;                                                                               \
    }
KEEP_FINITE(keep_finite_floats, float)
KEEP_FINITE(keep_finite_doubles, double)

/* Whether a pivot was so far from the mean that taking squares from squares cost digits. */
static int
is_far(const Moments *found, int n)
{
    return found->first * (found->first / n) > 0.9 * found->second;
}

static void
add_block(Sums *sums, const Moments *found, int n, double pivot, int exponent)
{
    double from = found->first / n, m2 = found->second - found->first * from;
    Sums block = {n, 0, 0, 0, found->lo, found->hi, pivot + from, m2 > 0 ? m2 : 0, exponent};
    merge(sums, &block);
}

static void
sum_floats(const float *x, int n, float *room, double *pivot, Sums *sums)
{
    Moments found;
    kernel->float_sums(x, n, *pivot, &found);
    if (!isfinite(found.first)) { /* floats cannot sum up to more than a double holds */
        n = keep_finite_floats(x, n, room, sums);
        if (n == 0)
            return;
        kernel->float_sums(x = room, n, *pivot, &found);
    }
    if (is_far(&found, n)) {
        *pivot += found.first / n;
        kernel->float_sums(x, n, *pivot, &found);
    }
    add_block(sums, &found, n, *pivot, 0);
    *pivot += found.first / n;
}

static void
sum_doubles(const double *x, int n, double *room, double *pivot, Sums *sums)
{
    Moments found, range;
    if (kernel->double_range(x, n, &range) != 0) {
        n = keep_finite_doubles(x, n, room, sums);
        if (n == 0)
            return;
        x = room;
        kernel->double_range(x, n, &range);
    }
    int exponent;
    double most = fabs(range.lo) > fabs(range.hi) ? fabs(range.lo) : fabs(range.hi);
    frexp(most, &exponent);
    if (exponent > -PLAIN_EXPONENT && exponent < PLAIN_EXPONENT)
        exponent = 0;
    else if (exponent > MAX_EXPONENT)
        exponent = MAX_EXPONENT;
    else if (exponent < -MAX_EXPONENT)
        exponent = -MAX_EXPONENT;
    double scale = ldexp(1, -exponent), from = exponent == 0 ? *pivot : range.lo * scale;
    kernel->double_sums(x, n, from, scale, &found);
    if (!isfinite(found.second) || is_far(&found, n)) {
        from = isfinite(found.first) ? from + found.first / n : range.lo * scale;
        kernel->double_sums(x, n, from, scale, &found);
        if (is_far(&found, n)) {
            from += found.first / n;
            kernel->double_sums(x, n, from, scale, &found);
        }
    }
    found.lo = range.lo;
    found.hi = range.hi;
    add_block(sums, &found, n, from, exponent);
    if (exponent == 0)
        *pivot = from + found.first / n;
}

static void
sum_chunk(const Item *item, int64_t chunk, Sums *sums)
{
    double room[BLOCK], kept[BLOCK], pivot = 0;
    int64_t at = chunk * CHUNK, end = at + CHUNK < item->size ? at + CHUNK : item->size;
    memset(sums, 0, sizeof *sums);
    for (; at < end; at += BLOCK) {
        int n = end - at < BLOCK ? (int)(end - at) : BLOCK;
        const void *x = load(item, at, n, room);
        if (is_double(item->code))
            sum_doubles(x, n, kept, &pivot, sums);
        else
            sum_floats(x, n, (float *)kept, &pivot, sums);
    }
}

/* --- Histograms -------------------------------------------------------------------------------- */

/* The least float that is not below. */
static float
float_at_least(double value)
{
    float near = (float)value;
    return near < value ? nextafterf(near, INFINITY) : near;
}

/* Whether the numbers of so many binary digits leave room below an edge; digits 0: not known. */
static int
is_apart(double edge, int digits, double room)
{
    int exponent;
    double most = floor(ldexp(frexp(edge, &exponent), digits));
    double below = ldexp(most, exponent - digits);
    if (below >= edge)
        below = ldexp(most - 1, exponent - digits);
    return digits > 0 && edge - below > room;
}

/* As edges() in numbers.py, but for the ends. */
static void
plan_edges(Item *item)
{
    double lo = item->sums.lo, hi = item->sums.hi, width = (hi - lo) / BINS;
    if (!isfinite(width))
        width = hi / BINS - lo / BINS;
    for (int k = 0; k < EDGES; k++) {
        volatile double step = (k + 1) * width; /* rounded by itself, as in Python */
        double edge = lo + step;
        item->edges[k] = edge < hi ? edge : hi;
        item->float_edges[k] = float_at_least(item->edges[k]);
    }
    int clean = item->sums.count == item->size;
    item->apart = 1;
    for (int k = 0; k < EDGES; k++)
        item->apart &= is_apart(item->edges[k], DIGITS[item->code], width * 64 / (1 << 22));
    double per_unit = (double)(1 << 26) / (hi - lo);
    item->per_unit =
        clean && hi - lo < FLT_MAX && per_unit < FLT_MAX && per_unit > FLT_MIN ? (float)per_unit : 0;
    int holds_zero = lo <= 0 && hi >= 0;
    item->low = holds_zero ? 0 : (float)lo;
    item->from = holds_zero ? (float)(32 - lo * item->per_unit) : 32;
}

/* Adds up bins where that is quicker, else in above; answers how many were compared. */
static int
bin_floats(const Item *item, const float *x, int n, int64_t *counts, int64_t *above)
{
    uint8_t bins[BLOCK] __attribute__((aligned(32)));
    int quick = kernel->float_bins != NULL && item->per_unit > 0 ? n / 32 * 32 : 0;
    int compared = n - quick;
    kernel->float_above(x + quick, n - quick, item->float_edges, above);
    for (int at = 0; at < quick; at += PART) {
        int size = quick - at < PART ? quick - at : PART;
        if (!kernel->float_bins(x + at, size, item->low, item->per_unit, item->from, bins + at)
            && !item->apart) {
            kernel->float_above(x + at, size, item->float_edges, above);
            compared += size;
            memset(bins + at, NO_BIN, (size_t)size);
        }
    }
    if (compared < n)
        kernel->count_bins(bins, quick, counts);
    return compared;
}

static void
bin_chunk(const Item *item, int64_t chunk, int64_t *counts)
{
    double room[BLOCK];
    int64_t above[EDGES] = {0}, compared = 0, at = chunk * CHUNK;
    int64_t end = item->size - at < CHUNK ? item->size : at + CHUNK;
    for (; at < end; at += BLOCK) {
        int n = end - at < BLOCK ? (int)(end - at) : BLOCK;
        const void *x = load(item, at, n, room);
        if (is_double(item->code)) {
            kernel->double_above(x, n, item->edges, above);
            compared += n;
        } else {
            compared += bin_floats(item, x, n, counts, above);
        }
    }
    counts[0] += compared - above[0];
    for (int k = 1; k < EDGES; k++)
        counts[k] += above[k - 1] - above[k];
    counts[EDGES] += above[EDGES - 1];
}

/* NaN and infinities were counted with the values: NaN and -inf are above no edge, inf above all. */
static void
forget_odd(Item *item)
{
    item->counts[0] -= item->sums.nans + item->sums.neg_infs;
    item->counts[BINS - 1] -= item->sums.pos_infs;
}

/* --- Types of one byte ------------------------------------------------------------------------- */

static void
count_bytes(const Item *item, int64_t chunk, int64_t *total)
{
    uint32_t seen[4][256] = {{0}};
    int64_t at = chunk * CHUNK, end = at + CHUNK < item->size ? at + CHUNK : item->size;
    const unsigned char *data = item->data;
    for (; at + 4 <= end; at += 4) { /* four tables: equal neighbours do not wait for each other */
        seen[0][data[at]]++;
        seen[1][data[at + 1]]++;
        seen[2][data[at + 2]]++;
        seen[3][data[at + 3]]++;
    }
    for (; at < end; at++)
        seen[0][data[at]]++;
    for (int byte = 0; byte < 256; byte++)
        total[byte] += (int64_t)seen[0][byte] + seen[1][byte] + seen[2][byte] + seen[3][byte];
}

/* Everything that 256 counts tell; no edge is compared with more than 256 times. */
static void
finish_bytes(Item *item, int histogram)
{
    Sums *sums = &item->sums;
    double total = 0;
    sums->lo = INFINITY;
    sums->hi = -INFINITY;
    for (int byte = 0; byte < 256; byte++) {
        double value = item->values[byte];
        int64_t times = item->bytes[byte];
        if (times == 0)
            continue;
        if (isnan(value))
            sums->nans += times;
        else if (isinf(value))
            *(value > 0 ? &sums->pos_infs : &sums->neg_infs) += times;
        else {
            sums->count += times;
            total += (double)times * value;
            sums->lo = value < sums->lo ? value : sums->lo;
            sums->hi = value > sums->hi ? value : sums->hi;
        }
    }
    if (sums->count == 0)
        return;
    sums->mean = total / (double)sums->count;
    if (histogram)
        plan_edges(item);
    for (int byte = 0; byte < 256; byte++) {
        double value = item->values[byte], away = value - sums->mean;
        int64_t times = item->bytes[byte];
        if (times == 0 || !isfinite(value))
            continue;
        sums->m2 += (double)times * away * away;
        int bin = 0;
        while (histogram && sums->lo < sums->hi && bin < EDGES && value >= item->edges[bin])
            bin++;
        item->counts[bin] += times;
    }
}
