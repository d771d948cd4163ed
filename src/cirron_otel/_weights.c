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

enum { BINS = 16, EDGES = 15, BLOCK = 2048, PART = 512, CHUNK = 1 << 17, MAX_THREADS = 64 };
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
    int (*float_bins)(const float *, int, float, float, uint8_t *);
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
#include "_weights_kernel.h"
#endif

static const Kernel *kernel = &plain_kernel;

#include "_weights_sums.h"

/* --- Threads ----------------------------------------------------------------------------------- */

typedef struct {
    Item *items;
    Py_ssize_t size, next; /* next: the first with chunks that nobody has summed */
    Py_ssize_t *ready, readies; /* items whose chunks wait for their bins */
    int histogram, running;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} Job;

/* When every chunk was summed; answers whether the chunks are to be read again, for their bins. */
static int
finish_sums(Item *item, int histogram)
{
    if (item->code == BYTE) {
        finish_bytes(item, histogram);
        return 0;
    }
    for (int64_t chunk = 0; chunk < item->chunks; chunk++)
        merge(&item->sums, &item->parts[chunk]);
    if (!histogram || item->sums.count == 0)
        return 0;
    if (item->sums.lo == item->sums.hi) {
        item->counts[0] = item->sums.count;
        return 0;
    }
    plan_edges(item);
    return 1;
}

/* An item of one chunk, both times: it is still in the cache. */
static void
reduce_small(Item *item, int histogram)
{
    if (item->code == BYTE)
        count_bytes(item, 0, item->bytes);
    else
        sum_chunk(item, 0, &item->parts[0]);
    if (finish_sums(item, histogram)) {
        bin_chunk(item, 0, item->counts);
        forget_odd(item);
    }
}

/* The next three are called with the lock held, and hold it when they return. */

static void
bin_next(Job *job)
{
    Item *item = &job->items[job->ready[job->readies - 1]];
    int64_t chunk = item->chunks - ++item->binned, counts[BINS] = {0};
    if (item->binned == item->chunks)
        job->readies--;
    pthread_mutex_unlock(&job->lock);
    bin_chunk(item, chunk, counts);
    pthread_mutex_lock(&job->lock);
    for (int k = 0; k < BINS; k++)
        item->counts[k] += counts[k];
    if (--item->left == 0)
        forget_odd(item);
}

static void
reduce_next_small(Job *job)
{
    Py_ssize_t first = job->next;
    int64_t elements = 0;
    do {
        elements += job->items[job->next++].size;
    } while (job->next < job->size && job->items[job->next].chunks == 1 && elements < CHUNK / 4);
    Py_ssize_t end = job->next;
    pthread_mutex_unlock(&job->lock);
    for (; first < end; first++)
        reduce_small(&job->items[first], job->histogram);
    pthread_mutex_lock(&job->lock);
}

static void
sum_next(Job *job)
{
    Item *item = &job->items[job->next];
    int64_t chunk = item->summed++, seen[256] = {0};
    if (item->summed == item->chunks)
        job->next++;
    job->running++;
    pthread_mutex_unlock(&job->lock);
    if (item->code == BYTE)
        count_bytes(item, chunk, seen);
    else
        sum_chunk(item, chunk, &item->parts[chunk]);
    pthread_mutex_lock(&job->lock);
    if (item->code == BYTE)
        for (int byte = 0; byte < 256; byte++)
            item->bytes[byte] += seen[byte];
    job->running--;
    if (--item->left == 0 && finish_sums(item, job->histogram)) {
        item->left = item->chunks;
        job->ready[job->readies++] = item - job->items;
        pthread_cond_broadcast(&job->changed);
    } else if (job->running == 0) {
        pthread_cond_broadcast(&job->changed);
    }
}

static void *
work(void *argument)
{
    Job *job = argument;
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV); /* torch.set_flush_denormal() is not for us */
    pthread_mutex_lock(&job->lock);
    for (;;) {
        if (job->readies > 0)
            bin_next(job);
        else if (job->next < job->size && job->items[job->next].chunks == 1)
            reduce_next_small(job);
        else if (job->next < job->size)
            sum_next(job);
        else if (job->running > 0)
            pthread_cond_wait(&job->changed, &job->lock);
        else
            break;
    }
    pthread_mutex_unlock(&job->lock);
    fesetenv(&before);
    return NULL;
}

static void
run(Job *job, int threads)
{
    pthread_t started[MAX_THREADS];
    int count = 0;
    sigset_t all, before;
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->changed, NULL);
    if (threads > 1) {
        /* Signals are for the program's threads. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (count < threads - 1 && count < MAX_THREADS
               && pthread_create(&started[count], NULL, work, job) == 0)
            count++; /* with fewer threads it takes longer, no more */
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    work(job);
    while (count > 0)
        pthread_join(started[--count], NULL);
    pthread_cond_destroy(&job->changed);
    pthread_mutex_destroy(&job->lock);
}

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
