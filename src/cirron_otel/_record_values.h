/* Part of _record.c: the values that a line holds, as json.loads makes them. */

enum { KNOWN_STRINGS = 1024, LONGEST_KNOWN = 64 };

/* Strings of which a file has many: keys, names of layers. */
typedef struct {
    PyObject *strings[KNOWN_STRINGS];
} Known;

static void
forget(Known *known)
{
    for (int i = 0; i < KNOWN_STRINGS; i++)
        Py_CLEAR(known->strings[i]);
}

static PyObject *
string_of(Known *known, Span span, int escaped)
{
    if (escaped) {
        Py_UCS4 *characters = PyMem_Malloc(span.size * sizeof *characters);
        if (characters == NULL)
            return PyErr_NoMemory();
        const char *p = span.from, *end = span.from + span.size;
        Py_ssize_t count = 0;
        while (p < end) {
            int size = 1;
            characters[count++] = *p == '\\' ? escaped_character(p, end, &size) : (Py_UCS4)*p;
            p += size;
        }
        PyObject *made = PyUnicode_FromKindAndData(PyUnicode_4BYTE_KIND, characters, count);
        PyMem_Free(characters);
        return made;
    }
    if (span.size > LONGEST_KNOWN)
        return PyUnicode_FromStringAndSize(span.from, span.size);
    uint32_t hash = 2166136261u ^ (uint32_t)span.size;
    for (Py_ssize_t i = 0; i < span.size; i++)
        hash = (hash ^ (unsigned char)span.from[i]) * 16777619u;
    PyObject **place = &known->strings[(hash ^ hash >> 16) % KNOWN_STRINGS];
    if (*place != NULL) {
        Py_ssize_t size;
        const char *bytes = PyUnicode_AsUTF8AndSize(*place, &size);
        if (bytes == NULL)
            return NULL;
        if (same_span(span, bytes, size))
            return Py_NewRef(*place);
    }
    PyObject *made = PyUnicode_FromStringAndSize(span.from, span.size);
    if (made != NULL)
        Py_XSETREF(*place, Py_NewRef(made));
    return made;
}

static int make_value(Text *text, Known *known, int depth, PyObject **made);

static int
make_object(Text *text, Known *known, int depth, PyObject **made)
{
    PyObject *object = PyDict_New();
    Py_ssize_t count = 0;
    int sure = object == NULL ? FAILED : SURE;
    text->at++;
    int done = text->at < text->end && *text->at == '}';
    while (!done && sure == SURE) {
        Span key;
        PyObject *name, *value = NULL;
        sure = read_string(text, &key);
        if (sure != SURE || text->escaped) {
            sure = UNSURE;
            break;
        }
        name = string_of(known, key, 0);
        if (name == NULL)
            sure = FAILED;
        else if ((sure = read_separator(text, ':')) == SURE)
            sure = make_value(text, known, depth + 1, &value);
        if (sure == SURE && PyDict_SetItem(object, name, value) < 0)
            sure = FAILED;
        Py_XDECREF(name);
        Py_XDECREF(value);
        if (sure != SURE)
            break;
        count++;
        done = text->at < text->end && *text->at == '}';
        if (!done)
            sure = read_separator(text, ',');
    }
    if (sure == SURE && PyDict_GET_SIZE(object) != count)
        sure = UNSURE; /* a key that stands twice */
    if (sure != SURE) {
        Py_XDECREF(object);
        return sure;
    }
    text->at++;
    *made = object;
    return SURE;
}

static int
make_array(Text *text, Known *known, int depth, PyObject **made)
{
    PyObject *list = PyList_New(0);
    int sure = list == NULL ? FAILED : SURE;
    text->at++;
    int done = text->at < text->end && *text->at == ']';
    while (!done && sure == SURE) {
        PyObject *value = NULL;
        sure = make_value(text, known, depth + 1, &value);
        if (sure == SURE && PyList_Append(list, value) < 0)
            sure = FAILED;
        Py_XDECREF(value);
        if (sure != SURE)
            break;
        done = text->at < text->end && *text->at == ']';
        if (!done)
            sure = read_separator(text, ',');
    }
    if (sure != SURE) {
        Py_XDECREF(list);
        return sure;
    }
    text->at++;
    *made = list;
    return SURE;
}

static int
make_value(Text *text, Known *known, int depth, PyObject **made)
{
    if (depth > MAX_DEPTH)
        return UNSURE;
    int kind = kind_of(text);
    if (kind == IS_OBJECT)
        return make_object(text, known, depth, made);
    if (kind == IS_ARRAY)
        return make_array(text, known, depth, made);
    Number number;
    Span string;
    int sure = read_scalar(text, kind, &number, &string);
    if (sure != SURE)
        return sure;
    switch (kind) {
    case IS_STRING:
        *made = string_of(known, string, text->escaped);
        break;
    case IS_INT:
        *made = number.type == IS_FLOAT ? PyFloat_FromDouble(number.real)
                                       : PyLong_FromLongLong(number.whole);
        break;
    case IS_NULL:
        *made = Py_NewRef(Py_None);
        break;
    default:
        *made = Py_NewRef(kind == IS_TRUE ? Py_True : Py_False);
    }
    return *made == NULL ? FAILED : SURE;
}
