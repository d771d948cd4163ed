/* Part of _record.c: SHA-256 (FIPS 180-4) of a short text, by the processor's own instructions.
 *
 * hashlib takes longer to begin than to hash a line, and a diary has a hash a line. Where the
 * processor has no such instructions, and for whole files, hashlib it is.
 */

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

static const uint32_t ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static int
has_sha(void)
{
    unsigned int a, b, c, d;
    return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1;
}

__attribute__((target("sha,sse4.1"))) static void
hash_blocks(uint32_t *state, const unsigned char *data, size_t blocks)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i first = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i second = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(first, second, 8), cdgh = _mm_blend_epi16(second, first, 0xf0);
    for (; blocks; blocks--, data += 64) {
        __m128i before_abef = abef, before_cdgh = cdgh, words[4];
        for (int i = 0; i < 4; i++)
            words[i] =
                _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), swap);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i now = words[i % 4];
            __m128i sum = _mm_add_epi32(now, _mm_loadu_si128((const __m128i *)(ROUNDS + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            __m128i next = _mm_add_epi32(
                _mm_sha256msg1_epu32(now, words[(i + 1) % 4]),
                _mm_alignr_epi8(words[(i + 3) % 4], words[(i + 2) % 4], 4));
            words[i % 4] = _mm_sha256msg2_epu32(next, words[(i + 3) % 4]);
        }
        abef = _mm_add_epi32(abef, before_abef);
        cdgh = _mm_add_epi32(cdgh, before_cdgh);
    }
    first = _mm_shuffle_epi32(abef, 0x1b);
    second = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(first, second, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(second, first, 8));
}

#else

static int
has_sha(void)
{
    return 0;
}

static void
hash_blocks(uint32_t *state, const unsigned char *data, size_t blocks)
{
}

#endif

static int quick_sha;

/* The digest in hex, 64 characters. Only where `quick_sha`. */
static void
hash_text(const char *text, size_t size, char *hex)
{
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    unsigned char last[128] = {0};
    size_t rest = size % 64, padded = rest < 56 ? 64 : 128;
    hash_blocks(state, (const unsigned char *)text, size / 64);
    memcpy(last, text + size - rest, rest);
    last[rest] = 0x80;
    for (int i = 0; i < 8; i++)
        last[padded - 1 - i] = (unsigned char)((uint64_t)size * 8 >> 8 * i);
    hash_blocks(state, last, padded / 64);
    for (int i = 0; i < 64; i++)
        hex[i] = "0123456789abcdef"[state[i / 8] >> (28 - 4 * (i % 8)) & 15];
}

/* hash_hex(text): the SHA-256 of bytes in hex, None where the processor has no instructions for it. */
static PyObject *
hash_hex(PyObject *self, PyObject *text)
{
    char hex[64];
    if (!quick_sha)
        Py_RETURN_NONE;
    if (!PyBytes_Check(text)) {
        PyErr_SetString(PyExc_TypeError, "hash_hex(bytes)");
        return NULL;
    }
    hash_text(PyBytes_AS_STRING(text), (size_t)PyBytes_GET_SIZE(text), hex);
    return PyUnicode_FromStringAndSize(hex, 64);
}

/* use_sha(wanted): for tests: whether the processor's instructions are used, where it has them. */
static PyObject *
use_sha(PyObject *self, PyObject *wanted)
{
    quick_sha = PyObject_IsTrue(wanted) == 1 && has_sha();
    Py_RETURN_NONE;
}
