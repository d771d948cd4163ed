/* What the flush thread asks of the file system, each in one go without the interpreter.
 *
 * The os module gives the interpreter away and asks for it back at each system call, and every
 * time a training loop has to stop for it: four times to write a file, twice for each file that a
 * scan of the directory looks at. POSIX only; elsewhere spool.py goes step by step, with the same
 * outcome.
 */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef IOV_MAX
#define IOV_MAX 16
#endif

/* --- a file, whole or not at all -------------------------------------------------------------- */

/* Writes all pieces, also where the system takes them bit by bit; 0, or an errno. */
static int
write_pieces(int fd, struct iovec *pieces, Py_ssize_t count)
{
    while (count > 0) {
        ssize_t written = writev(fd, pieces, count < IOV_MAX ? (int)count : IOV_MAX);
        if (written < 0) {
            if (errno == EINTR) {
                continue;
            }
            return errno;
        }
        while (count > 0 && (size_t)written >= pieces->iov_len) {
            written -= (ssize_t)pieces->iov_len;
            pieces++;
            count--;
        }
        if (count > 0) {
            if (written == 0 && pieces->iov_len == 0) {
                return EIO;
            }
            pieces->iov_base = (char *)pieces->iov_base + written;
            pieces->iov_len -= (size_t)written;
        }
    }
    return 0;
}

/* 0, or an errno, and then nothing of the file is left. Runs without the interpreter. */
static int
write_and_rename(const char *spare, const char *target, struct iovec *pieces, Py_ssize_t count)
{
    int fd, failed;
    do { /* O_EXCL: two writers of one file must never write into one another's */
        fd = open(spare, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) {
        return errno;
    }
    failed = write_pieces(fd, pieces, count);
    if (close(fd) < 0 && !failed && errno != EINTR) {
        failed = errno;
    }
    if (!failed && rename(spare, target) < 0) {
        failed = errno;
    }
    if (failed) {
        unlink(spare);
    }
    return failed;
}

static PyObject *
write_whole(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spare = NULL, *target = NULL, *chunks, *list = NULL, *result = NULL;
    Py_buffer *buffers = NULL;
    struct iovec *pieces = NULL;
    Py_ssize_t count = 0, held = 0, total = 0;

    if (!PyArg_ParseTuple(args, "O&O&O", PyUnicode_FSConverter, &spare, PyUnicode_FSConverter,
                          &target, &chunks)) {
        Py_XDECREF(spare);
        return NULL;
    }
    if ((list = PySequence_Tuple(chunks)) == NULL) {
        goto done;
    }
    count = PyTuple_GET_SIZE(list);
    buffers = PyMem_New(Py_buffer, count + 1);
    pieces = PyMem_New(struct iovec, count + 1);
    if (buffers == NULL || pieces == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; held < count; held++) {
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(list, held), &buffers[held], PyBUF_SIMPLE) < 0) {
            goto done;
        }
        pieces[held].iov_base = buffers[held].buf;
        pieces[held].iov_len = (size_t)buffers[held].len;
        total += buffers[held].len;
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = write_and_rename(PyBytes_AS_STRING(spare), PyBytes_AS_STRING(target), pieces, count);
    Py_END_ALLOW_THREADS
    if (failed) {
        errno = failed;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, PyBytes_AS_STRING(target));
    } else {
        result = PyLong_FromSsize_t(total);
    }
done:
    while (held > 0) {
        PyBuffer_Release(&buffers[--held]);
    }
    PyMem_Free(buffers);
    PyMem_Free(pieces);
    Py_XDECREF(list);
    Py_XDECREF(target);
    Py_DECREF(spare);
    return result;
}

/* --- what is in the spool directory ----------------------------------------------------------- */

enum { BATCH_NAME = 20 + 1 + 32 + 5 }; /* <created_ns>-<batch_id>.json */

typedef struct {
    char name[BATCH_NAME + 1];
    long long size;
} Found;

typedef struct {
    long long file_bytes, files, tmp_bytes, swept;
    Found *first; /* those of the lowest names: a heap, the highest of them on top */
    Py_ssize_t count, room, wanted;
} Scan;

static int
by_name(const void *one, const void *other)
{
    return strcmp(((const Found *)one)->name, ((const Found *)other)->name);
}

/* 1: a batch, 2: a batch that is not whole, 0: neither. */
static int
kind_of_name(const char *name)
{
    size_t digits = strspn(name, "0123456789");
    if (digits != 20 || name[20] != '-' || strspn(name + 21, "0123456789abcdef") != 32
        || strncmp(name + 53, ".json", 5) != 0) {
        return 0;
    }
    return name[58] == 0 ? 1 : strcmp(name + 58, ".tmp") == 0 ? 2 : 0;
}

static void
sink(Found *heap, Py_ssize_t count)
{
    Py_ssize_t at = 0, child;
    while ((child = 2 * at + 1) < count) {
        child += child + 1 < count && by_name(&heap[child], &heap[child + 1]) < 0;
        if (by_name(&heap[at], &heap[child]) >= 0) {
            return;
        }
        Found lower = heap[at];
        heap[at] = heap[child];
        heap[child] = lower;
        at = child;
    }
}

static int
remember(Scan *scan, const char *name, long long size)
{
    Found found;
    memcpy(found.name, name, sizeof(found.name));
    found.size = size;
    if (scan->wanted == 0) {
        return 0;
    }
    if (scan->count == scan->wanted) {
        if (by_name(&found, &scan->first[0]) < 0) {
            scan->first[0] = found;
            sink(scan->first, scan->count);
        }
        return 0;
    }
    if (scan->count == scan->room) {
        Py_ssize_t room = scan->room ? 2 * scan->room : 256;
        Found *more_room = PyMem_RawRealloc(scan->first, (size_t)room * sizeof(Found));
        if (more_room == NULL) {
            return ENOMEM;
        }
        scan->first = more_room;
        scan->room = room;
    }
    Py_ssize_t at = scan->count++;
    while (at > 0 && by_name(&scan->first[(at - 1) / 2], &found) < 0) {
        scan->first[at] = scan->first[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    scan->first[at] = found;
    return 0;
}

/* 0, or an errno; a directory that is not there is empty. Runs without the interpreter. */
static int
scan_directory(const char *directory, double oldest_tmp, Scan *scan)
{
    DIR *entries = opendir(directory);
    if (entries == NULL) {
        return errno == ENOENT ? 0 : errno;
    }
    int failed = 0;
    struct dirent *entry;
    while (!failed && (errno = 0, entry = readdir(entries)) != NULL) {
        struct stat is;
        int kind = kind_of_name(entry->d_name);
        if (!kind) {
            continue;
        }
        if (fstatat(dirfd(entries), entry->d_name, &is, 0) < 0) {
            failed = errno == ENOENT ? 0 : errno;
        } else if (!S_ISREG(is.st_mode)) {
            continue;
        } else if (kind == 1) {
            scan->file_bytes += is.st_size;
            scan->files++;
            failed = remember(scan, entry->d_name, is.st_size);
        } else if ((double)is.st_mtime < oldest_tmp
                   && unlinkat(dirfd(entries), entry->d_name, 0) == 0) {
            scan->swept++;
        } else {
            scan->tmp_bytes += is.st_size;
        }
    }
    if (!failed && errno) {
        failed = errno;
    }
    closedir(entries);
    if (scan->count) {
        qsort(scan->first, (size_t)scan->count, sizeof(Found), by_name);
    }
    return failed;
}

static PyObject *
scan_batches(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *directory, *first = NULL, *result = NULL;
    Scan scan = {0};
    double oldest_tmp;
    int failed;

    if (!PyArg_ParseTuple(args, "O&nd", PyUnicode_FSConverter, &directory, &scan.wanted,
                          &oldest_tmp)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    failed = scan_directory(PyBytes_AS_STRING(directory), oldest_tmp, &scan);
    Py_END_ALLOW_THREADS
    if (failed) {
        errno = failed;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, PyBytes_AS_STRING(directory));
        goto done;
    }
    if ((first = PyList_New(scan.count)) == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < scan.count; i++) {
        PyObject *one = Py_BuildValue("(isL)", 0, scan.first[i].name, scan.first[i].size);
        if (one == NULL) {
            goto done;
        }
        PyList_SET_ITEM(first, i, one);
    }
    result = Py_BuildValue("(LLLLO)", scan.file_bytes, scan.files, scan.tmp_bytes, scan.swept,
                           first);
done:
    PyMem_RawFree(scan.first);
    Py_XDECREF(first);
    Py_DECREF(directory);
    return result;
}
