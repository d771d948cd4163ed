/* Rows as the spool writes them, written where they are made.
 *
 * A RowBuffer is text in blocks, each the inside of a JSON array, that go to a queue as they become
 * full, between the rows that were queued as objects: all in the order in which they were made. A
 * row is measured, its room made, then written and counted without a call that could let another
 * thread run: under the GIL it is there whole or not at all. What is not plain (text with a NUL,
 * say) is left to the encoder of the flush thread, which can clean it.
 *
 * The bytes are those that msgspec writes for the same row; tests hold both against each other.
 */

enum { BLOCK_BYTES = 128 * 1024, MAX_TEXT = 1024, MAX_VALUE = 65536, MAX_SPARE = 32 };

static PyObject *encode_value; /* encode(value) -> bytes of JSON */

/* --- Block: rows that are text ---------------------------------------------------------------- */

/* Room of blocks that were written to the disk, used again: the kernel need not find new pages. */
static char *spare[MAX_SPARE];
static int spares;

typedef struct {
    PyObject_HEAD
    char *data;
    Py_ssize_t size, room, rows;
} Block;

static char *
take_room(Py_ssize_t room)
{
    if (room == BLOCK_BYTES && spares > 0) {
        return spare[--spares];
    }
    char *data = PyMem_RawMalloc((size_t)room);
    if (data == NULL) {
        PyErr_NoMemory();
    }
    return data;
}

static void
give_room(char *data, Py_ssize_t room)
{
    if (data != NULL && room == BLOCK_BYTES && spares < MAX_SPARE) {
        spare[spares++] = data;
    } else {
        PyMem_RawFree(data);
    }
}

static void
block_dealloc(Block *self)
{
    give_room(self->data, self->room);
    PyObject_Free(self);
}

static int
block_buffer(Block *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->data, self->size, 1, flags);
}

static Py_ssize_t
block_length(Block *self)
{
    return self->size;
}

static PyMemberDef block_members[] = {
    {"rows", T_PYSSIZET, offsetof(Block, rows), READONLY, NULL},
    {NULL}
};

static PyBufferProcs block_as_buffer = {.bf_getbuffer = (getbufferproc)block_buffer};
static PySequenceMethods block_as_sequence = {.sq_length = (lenfunc)block_length};

static PyTypeObject BlockType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._fast.Block",
    .tp_basicsize = sizeof(Block),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Bytes: rows as the inside of a JSON array, and how many they are.",
    .tp_dealloc = (destructor)block_dealloc,
    .tp_members = block_members,
    .tp_as_buffer = &block_as_buffer,
    .tp_as_sequence = &block_as_sequence,
};

/* --- RowBuffer -------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *append;                  /* of the queue */
    char *data;                        /* being filled, or NULL */
    Py_ssize_t used, room, block_rows; /* of that */
    Py_ssize_t rows, blocks, bytes;    /* not taken yet; blocks: those in the queue */
} RowBuffer;

static PyMemberDef buffer_members[] = {
    {"rows", T_PYSSIZET, offsetof(RowBuffer, rows), READONLY, NULL},
    {"blocks", T_PYSSIZET, offsetof(RowBuffer, blocks), READONLY, NULL},
    {"bytes", T_PYSSIZET, offsetof(RowBuffer, bytes), READONLY, NULL},
    {NULL}
};

static int
buffer_init(RowBuffer *self, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *append, *before = self->append;
    if (!PyArg_UnpackTuple(args, "RowBuffer", 1, 1, &append)) {
        return -1;
    }
    Py_INCREF(append);
    self->append = append;
    Py_XDECREF(before);
    return 0;
}

static void
buffer_dealloc(RowBuffer *self)
{
    Py_XDECREF(self->append);
    give_room(self->data, self->room);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Puts what is begun into the queue; 0, or -1 with an error and nothing has happened. */
static int
buffer_close(RowBuffer *self)
{
    if (self->block_rows == 0) {
        return 0;
    }
    int is_copy = self->used < self->room / 2; /* then the room is used again at once */
    char *data = self->data;
    if (is_copy) {
        if ((data = take_room(self->used)) == NULL) {
            return -1;
        }
        memcpy(data, self->data, (size_t)self->used);
    }
    Block *block = PyObject_New(Block, &BlockType);
    PyObject *done = NULL;
    if (block != NULL) {
        block->data = data;
        block->room = is_copy ? self->used : self->room;
        block->size = self->used;
        block->rows = self->block_rows;
        done = self->append == NULL ? NULL : PyObject_CallOneArg(self->append, (PyObject *)block);
        if (done == NULL && !is_copy) {
            block->data = NULL; /* it stays here */
        }
        Py_DECREF(block);
    } else if (is_copy) {
        give_room(data, self->used);
    }
    if (done == NULL) {
        return -1;
    }
    Py_DECREF(done);
    if (!is_copy) {
        self->data = NULL;
        self->room = 0;
    }
    self->blocks++;
    self->block_rows = self->used = 0;
    return 0;
}

/* Room for one row of at most this size, behind a comma where there are others; NULL with error. */
static char *
buffer_reserve(RowBuffer *self, Py_ssize_t size)
{
    if (self->used + size + 1 > self->room) {
        if (buffer_close(self) < 0) {
            return NULL;
        }
        if (size + 1 > self->room) {
            give_room(self->data, self->room);
            self->room = size + 1 > BLOCK_BYTES ? size + 1 : BLOCK_BYTES;
            if ((self->data = take_room(self->room)) == NULL) {
                self->room = 0;
                return NULL;
            }
        }
    }
    char *at = self->data + self->used;
    if (self->block_rows) {
        *at++ = ',';
    }
    return at;
}

static void
buffer_commit(RowBuffer *self, const char *end)
{
    Py_ssize_t used = end - self->data;
    self->bytes += used - self->used;
    self->used = used;
    self->block_rows++;
    self->rows++;
}

static PyObject *
buffer_append(RowBuffer *self, PyObject *row)
{
    if (buffer_close(self) < 0) {
        return NULL;
    }
    return PyObject_CallOneArg(self->append, row);
}

static PyObject *
buffer_close_method(RowBuffer *self, PyObject *Py_UNUSED(nothing))
{
    if (buffer_close(self) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
buffer_took(RowBuffer *self, PyObject *taken)
{
    if (!Py_IS_TYPE(taken, &BlockType)) {
        PyErr_SetString(PyExc_TypeError, "took takes a block");
        return NULL;
    }
    self->blocks--;
    self->rows -= ((Block *)taken)->rows;
    self->bytes -= ((Block *)taken)->size;
    Py_RETURN_NONE;
}

static PyObject *
buffer_clear(RowBuffer *self, PyObject *Py_UNUSED(nothing))
{
    self->rows = self->blocks = self->bytes = self->block_rows = self->used = 0;
    Py_RETURN_NONE;
}

static PyMethodDef buffer_methods[] = {
    {"append", (PyCFunction)buffer_append, METH_O,
     "Queue a row that is no text, behind those written before."},
    {"close", (PyCFunction)buffer_close_method, METH_NOARGS,
     "Put what was written into the queue."},
    {"took", (PyCFunction)buffer_took, METH_O, "Count a block that was taken from the queue."},
    {"clear", (PyCFunction)buffer_clear, METH_NOARGS,
     "Forget what was written; whoever calls this empties the queue."},
    {NULL}
};

static PyTypeObject RowBufferType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._fast.RowBuffer",
    .tp_basicsize = sizeof(RowBuffer),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "RowBuffer(append): rows as text, on their way into a queue.",
    .tp_dealloc = (destructor)buffer_dealloc,
    .tp_members = buffer_members,
    .tp_methods = buffer_methods,
    .tp_init = (initproc)buffer_init,
    .tp_new = PyType_GenericNew,
};

/* --- pieces of JSON --------------------------------------------------------------------------- */

typedef struct {
    const char *at;
    Py_ssize_t size;
    int plain; /* nothing in it has to be escaped */
} Text;

static int
is_plain(const char *at, Py_ssize_t size)
{
    const unsigned long long ones = 0x0101010101010101ull, tops = 0x8080808080808080ull;
    Py_ssize_t i = 0;
    for (; i + 8 <= size; i += 8) {
        unsigned long long x, quote, slash;
        memcpy(&x, at + i, 8);
        quote = x ^ (ones * '"');
        slash = x ^ (ones * '\\');
        if ((((x - ones * 0x20) & ~x) | ((quote - ones) & ~quote) | ((slash - ones) & ~slash))
            & tops) {
            return 0;
        }
    }
    if (i < size) {
        unsigned long long x = ones * ' ', quote, slash;
        memcpy(&x, at + i, (size_t)(size - i));
        quote = x ^ (ones * '"');
        slash = x ^ (ones * '\\');
        return !((((x - ones * 0x20) & ~x) | ((quote - ones) & ~quote) | ((slash - ones) & ~slash))
                 & tops);
    }
    return 1;
}

/* Whether text can be written as it is. An error that this makes (lone surrogates) is cleared. */
static int
text_of(PyObject *object, Text *text)
{
    if (object == NULL || !PyUnicode_CheckExact(object) || PyUnicode_GET_LENGTH(object) > MAX_TEXT) {
        return 0;
    }
    if (PyUnicode_IS_ASCII(object)) {
        text->at = (const char *)PyUnicode_1BYTE_DATA(object);
        text->size = PyUnicode_GET_LENGTH(object);
    } else if ((text->at = PyUnicode_AsUTF8AndSize(object, &text->size)) == NULL) {
        PyErr_Clear();
        return 0;
    }
    text->plain = is_plain(text->at, text->size);
    return text->plain || memchr(text->at, 0, (size_t)text->size) == NULL;
}

/* As text_of, for text that was made here, of hex digits: there is nothing to look for. */
static int
made_text(PyObject *object, Text *text)
{
    if (!PyUnicode_CheckExact(object) || !PyUnicode_IS_ASCII(object)) {
        return text_of(object, text);
    }
    text->at = (const char *)PyUnicode_1BYTE_DATA(object);
    text->size = PyUnicode_GET_LENGTH(object);
    text->plain = 1;
    return text->size <= MAX_TEXT;
}

static Py_ssize_t
text_room(const Text *text)
{
    return text->plain ? text->size : 6 * text->size;
}

static char *
put_escaped(char *to, const Text *text)
{
    for (Py_ssize_t i = 0; i < text->size; i++) {
        unsigned char c = (unsigned char)text->at[i];
        const char *found;
        if (c == '"' || c == '\\') {
            *to++ = '\\';
            *to++ = (char)c;
        } else if (c >= 0x20) {
            *to++ = (char)c;
        } else if ((found = memchr("\bb\tt\nn\ff\rr", c, 10)) != NULL) {
            *to++ = '\\';
            *to++ = found[1];
        } else {
            memcpy(to, c < 0x10 ? "\\u000" : "\\u001", 5);
            to[5] = "0123456789abcdef"[c & 15];
            to += 6;
        }
    }
    return to;
}

static char *
put_text(char *to, const Text *text)
{
    if (!text->plain) {
        return put_escaped(to, text);
    }
    memcpy(to, text->at, (size_t)text->size);
    return to + text->size;
}

static const char pairs[] =
    "00010203040506070809101112131415161718192021222324252627282930313233343536373839"
    "40414243444546474849505152535455565758596061626364656667686970717273747576777879"
    "8081828384858687888990919293949596979899";

static char *
put_natural(char *to, unsigned long long number)
{
    char digits[20], *at = digits + 20;
    while (number >= 100) {
        at -= 2;
        memcpy(at, pairs + 2 * (number % 100), 2);
        number /= 100;
    }
    if (number >= 10) {
        at -= 2;
        memcpy(at, pairs + 2 * number, 2);
    } else {
        *--at = (char)('0' + number);
    }
    memcpy(to, at, (size_t)(digits + 20 - at));
    return to + (digits + 20 - at);
}

static char *
put_number(char *to, long long number)
{
    if (number < 0) {
        *to++ = '-';
        return put_natural(to, 0ull - (unsigned long long)number);
    }
    return put_natural(to, (unsigned long long)number);
}

/* A time in ns. The digits of its second are mostly those that were written last. */
static char *
put_time(char *to, long long ns)
{
    static unsigned long long second;
    static char digits[20];
    static size_t length;
    if (ns < 1000000000) {
        return put_number(to, ns);
    }
    unsigned long long whole = (unsigned long long)ns / 1000000000;
    unsigned rest = (unsigned)((unsigned long long)ns % 1000000000);
    if (whole != second) {
        length = (size_t)(put_natural(digits, whole) - digits);
        second = whole;
    }
    memcpy(to, digits, sizeof(digits)); /* there is room, and a known size is no call */
    to += length;
    for (int at = 7; at > 0; at -= 2, rest /= 100) {
        memcpy(to + at, pairs + 2 * (rest % 100), 2);
    }
    *to = (char)('0' + rest);
    return to + 9;
}

enum { MAX_BRIEF = 24 };

/* A number that has at most six digits behind the point and nine before it, as it is printed
 * everywhere (the shortest digits that read back as the same number); nothing for any other.
 *
 * If n / 10^6, rounded, is the number, then n's digits are those: no two decimals of at most 15
 * digits are read as the same number. From 10^-4 on nobody writes an exponent.
 */
static char *
put_brief(char *to, double number)
{
    double size = number < 0 ? -number : number;
    if (!(size >= 1e-4 && size < 1e9)) {
        return to;
    }
    unsigned long long whole = (unsigned long long)(size * 1e6 + 0.5);
    if ((double)whole / 1e6 != size) {
        return to;
    }
    unsigned behind = (unsigned)(whole % 1000000);
    if (number < 0) {
        *to++ = '-';
    }
    to = put_natural(to, whole / 1000000);
    *to++ = '.';
    for (unsigned place = 100000; place && (behind || place == 100000); place /= 10) {
        *to++ = (char)('0' + behind / place);
        behind %= place;
    }
    return to;
}

#define PUT(to, literal) (memcpy((to), (literal), sizeof(literal) - 1), (to) + sizeof(literal) - 1)

/* 64 bits, or absent: an int that fits is a number, `none` is not written. -1: neither. */
typedef struct {
    int is_there;
    long long value;
} Number;

static int
number_of(PyObject *object, PyObject *none, Number *number)
{
    int overflow;
    number->is_there = 0;
    number->value = 0;
    if (object == none && object != NULL) {
        return 1;
    }
    if (object == NULL || !PyLong_CheckExact(object)) {
        return 0;
    }
    number->is_there = 1;
    number->value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow;
}

/* The JSON of a value: new reference; NULL without error where the row has to go the other way. */
static PyObject *
json_of(PyObject *value)
{
    if (encode_value == NULL) {
        return NULL;
    }
    PyObject *made = PyObject_CallOneArg(encode_value, value);
    if (made == NULL) {
        if (PyErr_ExceptionMatches(PyExc_Exception)) {
            PyErr_Clear(); /* the flush thread will find it too, and can clean the row */
        }
        return NULL;
    }
    if (!PyBytes_CheckExact(made) || PyBytes_GET_SIZE(made) > MAX_VALUE) {
        Py_CLEAR(made);
        return NULL;
    }
    const char *at = PyBytes_AS_STRING(made), *end = at + PyBytes_GET_SIZE(made);
    while ((at = memchr(at, '\\', (size_t)(end - at))) != NULL) {
        if (end - at >= 6 && memcmp(at, "\\u0000", 6) == 0) {
            Py_CLEAR(made);
            return NULL;
        }
        at += 2; /* what is escaped cannot begin another escape; JSON never ends in a backslash */
    }
    return made;
}

static char *
put_json(char *to, PyObject *json)
{
    memcpy(to, PyBytes_AS_STRING(json), (size_t)PyBytes_GET_SIZE(json));
    return to + PyBytes_GET_SIZE(json);
}

/* --- attributes ------------------------------------------------------------------------------- */

enum { MAX_PLAIN = 8 };

/* A dict as JSON: its items where they are few and plain, else what the encoder makes of it. The
   pieces lie in objects that the dict holds: nobody's code may run until they are written. */
typedef struct {
    PyObject *json;
    Py_ssize_t count, room;
    struct {
        PyObject *value;
        Text key, text;
    } items[MAX_PLAIN];
} Attrs;

/* Room for a value that can be written here; 0: it cannot. */
static Py_ssize_t
value_room(PyObject *value, Text *text)
{
    char brief[MAX_BRIEF];
    int overflow;
    if (PyUnicode_CheckExact(value)) {
        return text_of(value, text) ? text_room(text) + 2 : 0;
    }
    if (value == Py_None || PyBool_Check(value)) {
        return 5;
    }
    if (PyLong_CheckExact(value)) {
        (void)PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow ? 0 : 20;
    }
    return PyFloat_CheckExact(value) && put_brief(brief, PyFloat_AS_DOUBLE(value)) != brief
        ? MAX_BRIEF : 0;
}

/* 1: they can be written, 0 or -1 (an error): they cannot. Whoever calls this releases `json`. */
static int
attrs_of(PyObject *dict, Attrs *attrs)
{
    PyObject *key, *value;
    Py_ssize_t at = 0, room;
    attrs->json = NULL;
    attrs->count = 0;
    attrs->room = 2;
    if (dict == NULL || !PyDict_CheckExact(dict)) {
        return 0;
    }
    int plain = PyDict_GET_SIZE(dict) <= MAX_PLAIN;
    while (plain && PyDict_Next(dict, &at, &key, &value)) {
        Text *name = &attrs->items[attrs->count].key;
        plain = PyUnicode_CheckExact(key) && text_of(key, name)
            && (room = value_room(value, &attrs->items[attrs->count].text)) != 0;
        if (plain) {
            attrs->items[attrs->count++].value = value;
            attrs->room += text_room(name) + 4 + room;
        }
    }
    if (!plain) {
        if ((attrs->json = json_of(dict)) == NULL) {
            return PyErr_Occurred() ? -1 : 0;
        }
        attrs->room = PyBytes_GET_SIZE(attrs->json);
    }
    return 1;
}

static char *
put_attrs(char *to, const Attrs *attrs)
{
    if (attrs->json != NULL) {
        return put_json(to, attrs->json);
    }
    *to++ = '{';
    for (Py_ssize_t i = 0; i < attrs->count; i++) {
        PyObject *value = attrs->items[i].value;
        to = i ? PUT(to, ",\"") : PUT(to, "\"");
        to = put_text(to, &attrs->items[i].key);
        to = PUT(to, "\":");
        if (PyUnicode_CheckExact(value)) {
            *to++ = '"';
            to = put_text(to, &attrs->items[i].text);
            *to++ = '"';
        } else if (value == Py_None) {
            to = PUT(to, "null");
        } else if (PyBool_Check(value)) {
            to = value == Py_True ? PUT(to, "true") : PUT(to, "false");
        } else if (PyLong_CheckExact(value)) {
            to = put_number(to, PyLong_AsLongLong(value));
        } else {
            to = put_brief(to, PyFloat_AS_DOUBLE(value));
        }
    }
    *to++ = '}';
    return to;
}
