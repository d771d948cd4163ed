/* Statistics of tensors in the host's memory: weights/reductions_kernel.py calls this.
 *
 * Every stretch of memory is cut into chunks. A thread takes a chunk, reads it in blocks that fit
 * the first cache, and keeps mean, sum of squared distances and range of it; when the last chunk of
 * a stretch is done, its edges are known and its chunks are taken a second time, latest first, for
 * the histogram. A stretch of one chunk is thus read from memory once, from the cache twice.
 *
 * All sums are in double precision, of distances from a value near the mean, and merged in the
 * order of the chunks: the result does not depend on the number of threads. The GIL is released
 * throughout; threads live as long as one call.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <fenv.h>
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

enum { BINS = 16, NO_BIN = 128, EDGES = 15, BLOCK = 2048, PART = 512 };
enum { CHUNK = 1 << 17, MAX_THREADS = 64 };
enum { F32, F64, BF16, F16, I16, U16, I32, U32, I64, U64, BYTE, CODES };

static const int SIZES[CODES] = {4, 8, 2, 2, 2, 2, 4, 4, 8, 8, 1};
/* Of the types that are read as float and are less than that: binary digits, and one to be sure. */
static const int DIGITS[CODES] = {0, 0, 9, 12, 17, 17, 0, 0, 0, 0, 0};

/* As scale_exponent() in numbers.py. */
enum { PLAIN_EXPONENT = 400, MAX_EXPONENT = 1000 };

/* Of one block: sums of distances from a pivot, and the range. */
typedef struct {
    double first, second, lo, hi;
} Moments;

typedef struct {
    int (*float_bins)(const float *, int, float, float, float, uint8_t *);
    void (*count_bins)(const uint8_t *, int, int64_t *);
    void (*float_sums)(const float *, int, double, Moments *);
    void (*double_sums)(const double *, int, double, double, Moments *);
    int64_t (*double_range)(const double *, int, Moments *);
    void (*float_above)(const float *, int, const float *, int64_t *);
    void (*double_above)(const double *, int, const double *, int64_t *);
    void (*from_bf16)(const uint16_t *, int, float *);
    void (*from_f16)(const uint16_t *, int, float *);
    void (*from_i16)(const int16_t *, int, float *);
    void (*from_u16)(const uint16_t *, int, float *);
    void (*from_i32)(const int32_t *, int, double *);
    void (*from_u32)(const uint32_t *, int, double *);
    void (*from_i64)(const int64_t *, int, double *);
    void (*from_u64)(const uint64_t *, int, double *);
} Kernel;

#define V(name) plain_##name
#define TARGET
#define FLOAT_BINS NULL, NULL
#include "_weights_kernel.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2 1
#include "_weights_avx2.h"
#define V(name) avx2_##name
#define TARGET __attribute__((target("avx2,fma")))
#define FLOAT_BINS avx2_float_bins, avx2_count_bins
#define FLOAT_SUMS avx2_float_sums
#include "_weights_kernel.h"
#endif

static const Kernel *kernel = &plain_kernel;

#include "_weights_sums.h"
#include "_weights_threads.h"

/* --- Python ------------------------------------------------------------------------------------ */

static int
take_item(PyObject *tuple, Item *item)
{
    PyObject *where, *table;
    long long size;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "an item is (where, size, code, values)");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "OLiO:item", &where, &size, &item->code, &table))
        return -1;
    if (item->code < 0 || item->code >= CODES || size < 1) {
        PyErr_SetString(PyExc_ValueError, "no such type, or nothing to read");
        return -1;
    }
    if (PyLong_Check(where)) {
        item->data = PyLong_AsVoidPtr(where);
        if (PyErr_Occurred())
            return -1;
    } else {
        if (PyObject_GetBuffer(where, &item->view, PyBUF_SIMPLE) < 0)
            return -1;
        if (item->view.len / SIZES[item->code] >= size)
            item->data = item->view.buf;
    }
    if (item->data == NULL) {
        PyErr_SetString(PyExc_ValueError, "there is less memory than elements");
        return -1;
    }
    item->size = size;
    item->chunks = item->left = (size + CHUNK - 1) / CHUNK;
    if (item->code == BYTE) {
        if (!PyBytes_Check(table) || PyBytes_GET_SIZE(table) != 256 * 8) {
            PyErr_SetString(PyExc_ValueError, "values must be 256 doubles");
            return -1;
        }
        item->values = (const double *)PyBytes_AS_STRING(table);
        item->bytes = PyMem_Calloc(256, sizeof *item->bytes);
    } else {
        item->parts = PyMem_Calloc((size_t)item->chunks, sizeof *item->parts);
    }
    item->table = Py_NewRef(table);
    if (item->bytes == NULL && item->parts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *
item_result(const Item *item, int histogram)
{
    const Sums *s = &item->sums;
    PyObject *counts = Py_None;
    if (s->count == 0)
        return Py_BuildValue("(LLLLdddddO)", 0LL, (long long)s->nans, (long long)s->pos_infs,
                             (long long)s->neg_infs, 0.0, 0.0, 0.0, 0.0, 0.0, Py_None);
    double count = (double)s->count;
    double norm = ldexp(sqrt(s->m2 + count * s->mean * s->mean), s->exponent);
    double mean = ldexp(s->mean, s->exponent), std = ldexp(sqrt(s->m2 / count), s->exponent);
    mean = mean < s->lo ? s->lo : mean > s->hi ? s->hi : mean;
    if (s->lo == s->hi)
        std = 0;
    if (histogram) {
        if ((counts = PyTuple_New(BINS)) == NULL)
            return NULL;
        for (int k = 0; k < BINS; k++) {
            PyObject *number = PyLong_FromLongLong(item->counts[k]);
            if (number == NULL) {
                Py_DECREF(counts);
                return NULL;
            }
            PyTuple_SET_ITEM(counts, k, number);
        }
    } else {
        Py_INCREF(counts);
    }
    /* + 0.0: 0 rather than -0 */
    return Py_BuildValue("(LLLLdddddN)", (long long)s->count, (long long)s->nans,
                         (long long)s->pos_infs, (long long)s->neg_infs, s->lo + 0.0, s->hi + 0.0,
                         mean + 0.0, std, norm, counts);
}

static PyObject *
reduce(PyObject *self, PyObject *args)
{
    PyObject *given, *list = NULL, *result = NULL;
    int threads, histogram;
    if (!PyArg_ParseTuple(args, "Oip:reduce", &given, &threads, &histogram))
        return NULL;
    if ((given = PySequence_Fast(given, "items must be a sequence")) == NULL)
        return NULL;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(given);
    Job job = {.size = size, .histogram = histogram};
    job.items = PyMem_Calloc((size_t)size + 1, sizeof *job.items);
    job.ready = PyMem_Calloc((size_t)size + 1, sizeof *job.ready);
    if (job.items == NULL || job.ready == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    int64_t elements = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (take_item(PySequence_Fast_GET_ITEM(given, i), &job.items[i]) < 0)
            goto done;
        elements += job.items[i].size;
    }
    /* To start and end a thread takes as long as some ten thousand elements. */
    if (threads > 1 + elements / CHUNK)
        threads = (int)(1 + elements / CHUNK);
    Py_BEGIN_ALLOW_THREADS
    run(&job, threads);
    Py_END_ALLOW_THREADS
    if ((list = PyList_New(size)) == NULL)
        goto done;
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *one = item_result(&job.items[i], histogram);
        if (one == NULL)
            goto done;
        PyList_SET_ITEM(list, i, one);
    }
    result = Py_NewRef(list);
done:
    for (Py_ssize_t i = 0; job.items != NULL && i < size; i++) {
        PyMem_Free(job.items[i].bytes);
        PyMem_Free(job.items[i].parts);
        Py_XDECREF(job.items[i].table);
        if (job.items[i].view.obj != NULL)
            PyBuffer_Release(&job.items[i].view);
    }
    PyMem_Free(job.items);
    PyMem_Free(job.ready);
    Py_XDECREF(list);
    Py_DECREF(given);
    return result;
}

/* For tests: which loops to use. Answers whether there are such. */
static PyObject *
use_loops(PyObject *self, PyObject *name)
{
    if (PyUnicode_CompareWithASCIIString(name, "plain") == 0) {
        kernel = &plain_kernel;
        Py_RETURN_TRUE;
    }
#ifdef HAS_AVX2
    if (PyUnicode_CompareWithASCIIString(name, "avx2") == 0 && __builtin_cpu_supports("avx2")
        && __builtin_cpu_supports("fma")) {
        kernel = &avx2_kernel;
        Py_RETURN_TRUE;
    }
#endif
    Py_RETURN_FALSE;
}

static PyMethodDef methods[] = {
    {"reduce", reduce, METH_VARARGS,
     "reduce(items, threads, histogram): for each (address or buffer, size, code, values) count, nans, "
     "pos_infs, neg_infs, lo, hi, mean, std, norm, counts."},
    {"use_loops", use_loops, METH_O, "use_loops(name): plain or avx2; whether they are there."},
    {NULL}
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_weights", "Statistics of tensors in memory.", -1, methods,
};

PyMODINIT_FUNC
PyInit__weights(void)
{
#ifdef HAS_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        kernel = &avx2_kernel;
#endif
    return PyModule_Create(&module);
}
