/* Part of _record.c: plain data as canonical JSON, what line_text.py's encoder writes.
 *
 * Plain are exactly None, bool, int of 64 bits, finite float, str of up to a million characters,
 * list and dict with keys in ASCII that need no escape. For anything else the answer is None, and
 * Python writes it.
 */

enum { LONGEST_TEXT = 1 << 20, FEW = 40 };

static int encode_value(PyObject *value, Buffer *out, int depth);

static int
encode_string(PyObject *text, Buffer *out)
{
    Py_ssize_t size = PyUnicode_GET_LENGTH(text);
    int kind = PyUnicode_KIND(text);
    const void *data = PyUnicode_DATA(text);
    if (size > LONGEST_TEXT)
        return UNSURE; /* there would have to be room for it with every character escaped */
    char *to = more_room(out, 12 * size + 2);
    if (to == NULL)
        return FAILED;
    *to++ = '"';
    for (Py_ssize_t i = 0; i < size; i++) {
        Py_UCS4 c = PyUnicode_READ(kind, data, i);
        if (c < 0x80 && !special[c]) {
            *to++ = (char)c;
            continue;
        }
        const char *known = c == 0 || c > 0x7e ? NULL : strchr(MEANT, (int)c);
        if (known != NULL) {
            *to++ = '\\';
            *to++ = SHORT[known - MEANT];
            continue;
        }
        if (c >= 0xd800 && c <= 0xdfff)
            return UNSURE;
        if (c > 0xffff) {
            c -= 0x10000;
            to += sprintf(to, "\\u%04x", 0xd800 + (unsigned)(c >> 10));
            c = 0xdc00 + (c & 0x3ff);
        }
        to += sprintf(to, "\\u%04x", (unsigned)c);
    }
    *to++ = '"';
    out->size = to - out->bytes;
    return SURE;
}

static int
encode_number(PyObject *value, Buffer *out)
{
    char text[24];
    if (PyLong_CheckExact(value)) {
        int overflow;
        long long whole = PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow ? UNSURE : put(out, text, sprintf(text, "%lld", whole));
    }
    if (!isfinite(PyFloat_AS_DOUBLE(value)))
        return UNSURE;
    char *written =
        PyOS_double_to_string(PyFloat_AS_DOUBLE(value), 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    if (written == NULL)
        return FAILED;
    int sure = put(out, written, (Py_ssize_t)strlen(written));
    PyMem_Free(written);
    return sure;
}

typedef struct {
    Member member;
    PyObject *value;
} Item;

static int
encode_dict(PyObject *dict, Buffer *out, int depth)
{
    Item few[FEW], *items = few;
    Py_ssize_t count = 0, at = 0, size = PyDict_GET_SIZE(dict);
    PyObject *key, *value;
    int sure = SURE;
    if (size > FEW) {
        items = PyMem_Malloc(size * sizeof *items);
        if (items == NULL) {
            PyErr_NoMemory();
            return FAILED;
        }
    }
    while (sure == SURE && PyDict_Next(dict, &at, &key, &value)) {
        if (!PyUnicode_CheckExact(key) || !PyUnicode_IS_ASCII(key)) {
            sure = UNSURE;
            break;
        }
        Item *item = &items[count++];
        item->value = value;
        item->member.key.from = (const char *)PyUnicode_1BYTE_DATA(key);
        item->member.key.size = PyUnicode_GET_LENGTH(key);
        for (Py_ssize_t i = 0; i < item->member.key.size && sure == SURE; i++)
            sure = special[(unsigned char)item->member.key.from[i]] ? UNSURE : SURE;
    }
    if (sure == SURE) {
        qsort(items, count, sizeof *items, by_key); /* a member stands first in an item */
        sure = put_one(out, '{');
    }
    for (Py_ssize_t i = 0; i < count && sure == SURE; i++) {
        Span name = items[i].member.key;
        char *to = more_room(out, name.size + 4);
        if (to == NULL) {
            sure = FAILED;
            break;
        }
        if (i)
            *to++ = ',';
        *to++ = '"';
        memcpy(to, name.from, name.size);
        to += name.size;
        *to++ = '"';
        *to++ = ':';
        out->size = to - out->bytes;
        sure = encode_value(items[i].value, out, depth + 1);
    }
    if (items != few)
        PyMem_Free(items);
    return sure == SURE ? put_one(out, '}') : sure;
}

static int
encode_list(PyObject *list, Buffer *out, int depth)
{
    int sure = put_one(out, '[');
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list) && sure == SURE; i++) {
        if (i && put_one(out, ',') < 0)
            return FAILED;
        sure = encode_value(PyList_GET_ITEM(list, i), out, depth + 1);
    }
    return sure == SURE ? put_one(out, ']') : sure;
}

static int
encode_value(PyObject *value, Buffer *out, int depth)
{
    if (value == Py_None)
        return put(out, "null", 4);
    if (value == Py_True)
        return put(out, "true", 4);
    if (value == Py_False)
        return put(out, "false", 5);
    if (PyUnicode_CheckExact(value))
        return encode_string(value, out);
    if (PyFloat_CheckExact(value) || PyLong_CheckExact(value))
        return encode_number(value, out);
    if (depth > MAX_DEPTH)
        return UNSURE;
    if (PyDict_CheckExact(value))
        return encode_dict(value, out, depth);
    return PyList_CheckExact(value) ? encode_list(value, out, depth) : UNSURE;
}

/* encode(body): the canonical text of a dict, None where it holds more than plain data. */
static PyObject *
encode(PyObject *self, PyObject *body)
{
    Buffer out = {NULL, 0, 0};
    PyObject *text = NULL;
    int sure = PyDict_CheckExact(body) ? encode_dict(body, &out, 0) : UNSURE;
    if (sure == SURE)
        text = PyUnicode_DecodeASCII(out.bytes, out.size, NULL);
    PyMem_Free(out.bytes);
    return sure == UNSURE ? Py_NewRef(Py_None) : text;
}

static int
put_literal(Buffer *out, const char *text)
{
    return put(out, text, (Py_ssize_t)strlen(text));
}

/* diary_line(prev, body): the hash of a diary line and the line, as line_text.py makes them of plain
 * data; None for anything else, and where the processor has no instructions for the hash. */
static PyObject *
diary_line(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyUnicode_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "diary_line(prev, body)");
        return NULL;
    }
    if (!quick_sha || !PyDict_CheckExact(args[1]) || PyDict_GET_SIZE(args[1]) == 0
        || !PyUnicode_IS_ASCII(args[0]))
        Py_RETURN_NONE;
    const char *prev = (const char *)PyUnicode_1BYTE_DATA(args[0]);
    Py_ssize_t size = PyUnicode_GET_LENGTH(args[0]);
    char hex[65] = {0};
    Buffer out = {NULL, 0, 0};
    PyObject *made = NULL;
    int sure = put(&out, prev, size);
    if (sure == SURE)
        sure = encode_dict(args[1], &out, 0);
    if (sure == SURE) {
        hash_text(out.bytes, (size_t)out.size, hex);
        out.size--; /* the brace at the end */
        if (put_literal(&out, ",\"prev\":\"") < 0 || put(&out, prev, size) < 0
            || put_literal(&out, "\",\"hash\":\"") < 0 || put_literal(&out, hex) < 0
            || put_literal(&out, "\"}\n") < 0)
            sure = FAILED;
        else
            made = Py_BuildValue("s#y#", hex, (Py_ssize_t)64, out.bytes + size, out.size - size);
    }
    PyMem_Free(out.bytes);
    return sure == UNSURE ? Py_NewRef(Py_None) : made;
}
