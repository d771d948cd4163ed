/* Part of _record.c: numbers of a JSON text, and whether Python's json writes them as they stand.
 *
 * A float is spelled canonically when it is the shortest text that reads back as the same double,
 * and of the shortest ones the nearest to it. Up to 15 digits no two decimals are the same double,
 * so there only the form is to be looked at. For 16 and 17 digits, whole numbers of 128 bits tell
 * exactly how far the decimal lies from the double, and whether one with a digit less would be read
 * as the same. What neither can decide, the interpreter's own conversion does.
 */

#include <float.h>

#if FLT_EVAL_METHOD < 0 || FLT_EVAL_METHOD == 2
#error "doubles of more bits than Python has: the code in Python is used instead"
#endif

enum { UNSURE = 0, SURE = 1, FAILED = -1 };
enum { IS_NULL, IS_TRUE, IS_FALSE, IS_INT, IS_FLOAT, IS_STRING, IS_ARRAY, IS_OBJECT };
enum { MAX_INT_DIGITS = 18, PLAIN_DIGITS = 15, MOST_DIGITS = 17, MAX_TOKEN = 40 };

typedef struct {
    int type; /* IS_INT or IS_FLOAT */
    long long whole;
    double real;
} Number;

static const double TENS[] = {
    1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11, 1e12, 1e13,
    1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22, 1e23, 1e24, 1e25, 1e26, 1e27};
enum { EXACT_TENS = 22, MOST_TENS = 27 };

static int
is_digit(char c)
{
    return c >= '0' && c <= '9';
}

#ifdef __SIZEOF_INT128__
/* Whether digits * 10**-scale, of 16 or 17 digits and no zero at their end, is the shortest text of
 * a double, which *value then is. UNSURE also where only a closer look can tell. */
static int
shortest(unsigned long long digits, int scale, double *value)
{
    unsigned long long five = 1, bits;
    double guess = (double)digits / TENS[scale];
    for (int i = 0; i < scale; i++)
        five *= 5; /* 5**27 has 63 bits */
    memcpy(&bits, &guess, sizeof bits);
    int exponent = (int)(bits >> 52) - 1075, shift = exponent + scale;
    unsigned long long mantissa = (bits & ((1ULL << 52) - 1)) | 1ULL << 52;
    if (shift < -68 || shift > 8)
        return UNSURE;
    /* In units in which all of these are whole: twice the decimal, one of its last digit, and the
     * distance of two doubles. */
    __int128 unit = shift < 0 ? (__int128)1 << -shift : 1;
    __int128 gap = shift < 0 ? (__int128)five : (__int128)five << shift;
    __int128 decimal = 2 * unit * (__int128)digits, off = decimal - 2 * gap * (__int128)mantissa;
    for (int i = 0; i < 3 && off >= gap; i++, mantissa++)
        off -= 2 * gap;
    for (int i = 0; i < 3 && off <= -gap; i++, mantissa--)
        off += 2 * gap;
    /* At a power of two the next double below is nearer. */
    if (off >= gap || off <= -gap || mantissa <= 1ULL << 52 || mantissa >= 1ULL << 53)
        return UNSURE;
    int last = (int)(digits % 10);
    __int128 below = 2 * unit * last - off, above = off + 2 * unit * (10 - last);
    if (off >= unit || off <= -unit || below <= gap || above <= gap)
        return UNSURE;
    bits = (unsigned long long)(exponent + 1075) << 52 | (mantissa & ((1ULL << 52) - 1));
    memcpy(value, &bits, sizeof bits);
    return SURE;
}
#else
static int
shortest(unsigned long long digits, int scale, double *value)
{
    return UNSURE;
}
#endif

/* As the interpreter reads and writes it. */
static int
as_python_writes(const char *from, const char *to, double *value)
{
    char text[MAX_TOKEN + 1];
    if (to - from > MAX_TOKEN)
        return UNSURE;
    memcpy(text, from, to - from);
    text[to - from] = '\0';
    *value = PyOS_string_to_double(text, NULL, NULL);
    if (*value == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return UNSURE;
    }
    char *written = PyOS_double_to_string(*value, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    if (written == NULL)
        return FAILED;
    int same = strcmp(written, text) == 0;
    PyMem_Free(written);
    return same ? SURE : UNSURE;
}

/* Reads the number at *at, which goes behind it. UNSURE for any that json would write otherwise. */
static int
read_number(const char **at, const char *end, Number *found)
{
    const char *from = *at, *p = from;
    unsigned long long digits = 0;
    int count = 0, scale = 0, negative = *p == '-';
    p += negative;
    const char *first = p;
    while (p < end && is_digit(*p)) {
        if (count < MAX_INT_DIGITS)
            digits = digits * 10 + (unsigned long long)(*p - '0');
        count += digits != 0;
        p++;
    }
    if (p == first || (*first == '0' && p - first > 1))
        return UNSURE;
    if (p == end || (*p != '.' && *p != 'e')) {
        *at = p;
        found->type = IS_INT;
        found->whole = negative ? -(long long)digits : (long long)digits;
        found->real = (double)found->whole;
        return count <= MAX_INT_DIGITS && !(negative && digits == 0) ? SURE : UNSURE;
    }
    int before = count, zeros = 0; /* digits before the point, zeros right behind it */
    if (*p == '.') {
        const char *fraction = ++p;
        while (p < end && is_digit(*p)) {
            if (count < MAX_INT_DIGITS)
                digits = digits * 10 + (unsigned long long)(*p - '0');
            count += digits != 0;
            zeros += digits == 0;
            p++;
        }
        scale = (int)(p - fraction);
        if (scale == 0)
            return UNSURE;
        if (p[-1] == '0') {
            if (scale != 1 || (p < end && *p == 'e'))
                return UNSURE;
            scale = 0;
            if (digits == 0) {
                *at = p;
                found->type = IS_FLOAT;
                found->real = negative ? -0.0 : 0.0;
                return SURE;
            }
            count--; /* the zero behind the point, and those before it that say nothing */
            if (count < MAX_INT_DIGITS)
                digits /= 10;
        }
    }
    if (count > MOST_DIGITS || digits == 0)
        return UNSURE;
    if (p < end && *p == 'e') {
        /* One digit before the point, and a sign and two digits at least. */
        if (before != 1 || end - p < 4 || (p[1] != '-' && p[1] != '+'))
            return UNSURE;
        int down = p[1] == '-', exponent = 0;
        const char *start = p += 2;
        while (p < end && is_digit(*p) && p - start < 4)
            exponent = exponent * 10 + (*p++ - '0');
        if (p - start < 2 || (p - start > 2 && *start == '0') || (down ? exponent <= 4 : exponent < 16))
            return UNSURE;
        scale += down ? exponent : -exponent;
    }
    else if (before > 16 || (before == 0 && zeros > 3))
        return UNSURE;
    *at = p;
    found->type = IS_FLOAT;
    int written = count;
    while (written > PLAIN_DIGITS && digits % 10 == 0) {
        digits /= 10;
        scale--;
        written--;
    }
    int sure = UNSURE;
    if (written <= PLAIN_DIGITS && scale <= EXACT_TENS && scale >= -EXACT_TENS) {
        found->real = scale < 0 ? (double)digits * TENS[-scale] : (double)digits / TENS[scale];
        sure = SURE;
    }
    else if (written > PLAIN_DIGITS && scale >= 0 && scale <= MOST_TENS)
        sure = shortest(digits, scale, &found->real);
    if (sure != SURE)
        return as_python_writes(from, p, &found->real);
    if (negative)
        found->real = -found->real;
    return SURE;
}
