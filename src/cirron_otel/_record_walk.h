/* Part of _record.c: a diary walked through, line by line, as checking/diary.py does it.
 *
 * A line is quiet when it is beyond doubt: spelled as json spells, linked to the line before, in
 * order, with all that its event type asks for, and, where there are rows, the very event that they
 * call for next. Quiet lines are passed here; at the first other one the walk stops, having changed
 * nothing, and Python looks at it.
 */

static int
is_text(const Field *field)
{
    return field != NULL && field->kind == IS_STRING && !field->escaped;
}

static int
is_number(const Field *field)
{
    return field != NULL && (field->kind == IS_INT || field->kind == IS_FLOAT);
}

static int
is_one_of(const Field *field, const Needed *needed)
{
    if (!is_text(field))
        return 0;
    for (int i = 0; i < needed->count; i++)
        if (same_span(field->string, needed->allowed[i].from, needed->allowed[i].size))
            return 1;
    return 0;
}

/* Both are sorted. */
static int
has_needed(const Line *line, const Form *form)
{
    int at = 0;
    for (int i = 0; i < form->count; i++) {
        const Needed *needed = &form->needed[i];
        const Field *field;
        do {
            if (at == line->ordered)
                return 0;
            field = &line->fields[line->order[at++]];
        } while (!same_span(field->key, needed->name.from, needed->name.size));
        if (needed->count && !is_one_of(field, needed))
            return 0;
    }
    return 1;
}

static int
is_in_order(const Walk *walk, const Line *line, const Form *form)
{
    const Field *step = line->step;
    if (line->seq == NULL || line->seq->kind != IS_INT || line->seq->number.whole != walk->count
        || !is_number(line->time) || line->time->number.real < walk->last_time - 1.0
        || line->rule != NULL || line->lost_before != NULL)
        return 0;
    if (line->severity != NULL && !is_one_of(line->severity, &walk->severities))
        return 0;
    if (step != NULL
        && (step->kind != IS_INT || step->number.whole < 0 || step->number.whole < walk->last_step))
        return 0;
    if (walk->with_rows) {
        if (line->metrics_digest != NULL
            && (!is_text(line->metrics_digest)
                || !same_span(line->metrics_digest->string, walk->digest, HASH_SIZE)
                || line->metrics_rows == NULL || line->metrics_rows->kind != IS_INT
                || line->metrics_rows->number.whole != walk->rows))
            return 0;
        if (step != NULL && step->number.whole != walk->row_step)
            return 0;
    }
    return has_needed(line, form);
}

static const Field *
field_named(const Line *line, PyObject *name)
{
    Py_ssize_t size;
    const char *bytes = PyUnicode_AsUTF8AndSize(name, &size);
    if (bytes == NULL) {
        PyErr_Clear();
        return NULL;
    }
    for (int i = 0; i < line->count; i++)
        if (same_span(line->fields[i].key, bytes, size))
            return &line->fields[i];
    return NULL;
}

static int
is_same(const Field *field, PyObject *value)
{
    if (field == NULL)
        return 0;
    if (PyFloat_CheckExact(value))
        return is_number(field) && field->number.real == PyFloat_AS_DOUBLE(value);
    if (PyUnicode_CheckExact(value) && PyUnicode_IS_ASCII(value) && is_text(field))
        return same_span(
            field->string, (const char *)PyUnicode_1BYTE_DATA(value), PyUnicode_GET_LENGTH(value));
    return 0;
}

/* Whether the fields of a tuple of pairs are on the line, with these values. */
static int
has_fields(const Line *line, PyObject *pairs)
{
    if (!PyTuple_Check(pairs))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2
            || !PyUnicode_Check(PyTuple_GET_ITEM(pair, 0))
            || !is_same(field_named(line, PyTuple_GET_ITEM(pair, 0)), PyTuple_GET_ITEM(pair, 1)))
            return 0;
    }
    return 1;
}

/* Whether the event that the rows call for next is this one, to the last bit. */
static int
is_called_for(const Walk *walk, const Line *line)
{
    Py_ssize_t size = PyObject_Size(walk->expected);
    if (size <= 0)
        return size < 0 ? FAILED : UNSURE;
    PyObject *next = PySequence_GetItem(walk->expected, 0);
    if (next == NULL)
        return FAILED;
    int fits = 0;
    if (PyTuple_Check(next) && PyTuple_GET_SIZE(next) >= 4 && line->step != NULL) {
        int overflow = 0;
        PyObject *step = PyTuple_GET_ITEM(next, 0);
        fits = PyLong_Check(step)
               && PyLong_AsLongLongAndOverflow(step, &overflow) == line->step->number.whole
               && !overflow && is_same(line->event, PyTuple_GET_ITEM(next, 1))
               && has_fields(line, PyTuple_GET_ITEM(next, 2))
               && has_fields(line, PyTuple_GET_ITEM(next, 3));
    }
    Py_DECREF(next);
    return fits;
}

static int
is_stop(const Walk *walk)
{
    if (walk->stops == Py_None)
        return 0;
    PyObject *index = PyLong_FromLongLong(walk->count);
    int found = index == NULL ? FAILED : PySequence_Contains(walk->stops, index);
    Py_XDECREF(index);
    return found;
}

/* Whether `hash` is the SHA-256 of what `body` has. */
static int
is_hash_of_body(Walk *walk, const Field *hash)
{
    if (quick_sha) {
        char hex[HASH_SIZE];
        hash_text(walk->body.bytes, (size_t)walk->body.size, hex);
        return same_span(hash->string, hex, HASH_SIZE);
    }
    PyObject *view = PyMemoryView_FromMemory(walk->body.bytes, walk->body.size, PyBUF_READ);
    PyObject *state = view == NULL ? NULL : PyObject_CallOneArg(walk->sha256, view);
    PyObject *digest = state == NULL ? NULL : PyObject_CallMethod(state, "hexdigest", NULL);
    int same = digest == NULL ? FAILED : is_same(hash, digest);
    Py_XDECREF(view);
    Py_XDECREF(state);
    Py_XDECREF(digest);
    return same;
}

/* Passes the line if it is quiet. */
static int
pass_line(Walk *walk, const char *from, const char *to)
{
    Line line;
    int sure = read_fields(walk, from, to, &line);
    if (sure != SURE)
        return sure;
    if (!is_text(line.event) || !is_text(line.prev) || !is_text(line.hash)
        || !same_span(line.prev->string, walk->chained, HASH_SIZE))
        return UNSURE;
    Form *form = NULL;
    for (int i = 0; i < walk->form_count && form == NULL; i++)
        if (same_span(line.event->string, walk->forms[i].kind.from, walk->forms[i].kind.size))
            form = &walk->forms[i];
    if (form == NULL || order_fields(&line, form) != SURE || !is_in_order(walk, &line, form))
        return UNSURE;
    walk->body.size = 0;
    if (put(&walk->body, walk->chained, HASH_SIZE) < 0 || put_body(walk, from, &line) < 0)
        return FAILED;
    if ((sure = is_hash_of_body(walk, line.hash)) != SURE)
        return sure;
    if ((sure = is_stop(walk)) != 0)
        return sure < 0 ? FAILED : UNSURE;
    if (walk->with_rows && form->replayed && walk->expected != Py_None) {
        if ((sure = is_called_for(walk, &line)) != SURE)
            return sure;
        PyObject *taken = PyObject_CallMethod(walk->expected, "popleft", NULL);
        if (taken == NULL)
            return FAILED;
        Py_DECREF(taken);
        walk->matched++;
    }
    memcpy(walk->chained, line.hash->string.from, HASH_SIZE);
    walk->last_time = line.time->number.real;
    if (line.step != NULL)
        walk->last_step = line.step->number.whole;
    walk->count++;
    form->seen++;
    return SURE;
}

static PyObject *
walk_follow(Walk *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "follow(block, start)");
        return NULL;
    }
    const char *bytes = PyBytes_AS_STRING(args[0]), *end = bytes + PyBytes_GET_SIZE(args[0]);
    Py_ssize_t start = PyLong_AsSsize_t(args[1]);
    if (start < 0 || start > end - bytes)
        return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(0);
    const char *at = bytes + start;
    self->last_start = -1;
    while (at < end) {
        const char *to = memchr(at, '\n', end - at);
        int sure = to == NULL ? UNSURE : pass_line(self, at, to);
        if (sure == FAILED)
            return NULL;
        if (sure != SURE)
            break;
        self->last_start = at - bytes;
        at = to + 1;
    }
    return PyLong_FromSsize_t(at - bytes);
}

/* (value, body) of one line that is spelled as json spells it, else None. */
static PyObject *
walk_line(Walk *self, PyObject *raw)
{
    Line line;
    if (!PyBytes_Check(raw)) {
        PyErr_SetString(PyExc_TypeError, "line(bytes)");
        return NULL;
    }
    const char *from = PyBytes_AS_STRING(raw), *to = from + PyBytes_GET_SIZE(raw);
    int sure = read_fields(self, from, to, &line);
    if (sure == SURE)
        sure = order_fields(&line, NULL);
    self->body.size = 0;
    if (sure == SURE)
        sure = put_body(self, from, &line);
    PyObject *value = NULL;
    Text text = {from, to, STYLE_OPEN, 0};
    if (sure == SURE)
        sure = make_object(&text, &self->known, 0, &value);
    if (sure == SURE)
        return Py_BuildValue("Ny#", value, self->body.bytes, self->body.size);
    return sure == FAILED ? NULL : Py_NewRef(Py_None);
}

static PyObject *
walk_seen(Walk *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *seen = PyDict_New();
    for (int i = 0; i < self->form_count && seen != NULL; i++) {
        Form *form = &self->forms[i];
        PyObject *count = form->seen ? PyLong_FromLongLong(form->seen) : NULL;
        PyObject *name = count ? PyUnicode_FromStringAndSize(form->kind.from, form->kind.size) : NULL;
        int wrong = form->seen && (name == NULL || PyDict_SetItem(seen, name, count) < 0);
        Py_XDECREF(count);
        Py_XDECREF(name);
        if (wrong)
            Py_CLEAR(seen);
    }
    return seen;
}

/* --- the object ---------------------------------------------------------------------------------- */

static int
span_of(PyObject *text, Span *span)
{
    span->from = PyUnicode_AsUTF8AndSize(text, &span->size);
    return span->from == NULL ? FAILED : SURE;
}

static int
take_needed(PyObject *given, Needed *needed)
{
    PyObject *name, *allowed;
    if (!PyArg_ParseTuple(given, "UO!", &name, &PyTuple_Type, &allowed) || span_of(name, &needed->name) < 0)
        return FAILED;
    Py_ssize_t count = PyTuple_GET_SIZE(allowed);
    needed->allowed = PyMem_Calloc(count + 1, sizeof *needed->allowed);
    if (needed->allowed == NULL) {
        PyErr_NoMemory();
        return FAILED;
    }
    needed->count = (int)count;
    for (Py_ssize_t i = 0; i < count; i++)
        if (span_of(PyTuple_GET_ITEM(allowed, i), &needed->allowed[i]) < 0)
            return FAILED;
    return SURE;
}

static int
take_form(PyObject *given, Form *form)
{
    PyObject *kind, *needed;
    if (!PyArg_ParseTuple(given, "UO!p", &kind, &PyTuple_Type, &needed, &form->replayed)
        || span_of(kind, &form->kind) < 0)
        return FAILED;
    Py_ssize_t count = PyTuple_GET_SIZE(needed);
    form->needed = PyMem_Calloc(count + 1, sizeof *form->needed);
    if (form->needed == NULL) {
        PyErr_NoMemory();
        return FAILED;
    }
    form->count = (int)count;
    for (Py_ssize_t i = 0; i < count; i++)
        if (take_needed(PyTuple_GET_ITEM(needed, i), &form->needed[i]) < 0)
            return FAILED;
    return SURE;
}

static void
walk_dealloc(Walk *self)
{
    for (int i = 0; self->forms != NULL && i < self->form_count; i++) {
        for (int j = 0; self->forms[i].needed != NULL && j < self->forms[i].count; j++)
            PyMem_Free(self->forms[i].needed[j].allowed);
        PyMem_Free(self->forms[i].needed);
    }
    PyMem_Free(self->forms);
    PyMem_Free(self->severities.allowed);
    PyMem_Free(self->body.bytes);
    PyMem_Free(self->nested.bytes);
    PyMem_Free(self->members.bytes);
    forget(&self->known);
    Py_XDECREF(self->sha256);
    Py_XDECREF(self->names);
    Py_XDECREF(self->expected);
    Py_XDECREF(self->stops);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
walk_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *sha256, *forms, *severities;
    if (!PyArg_ParseTuple(args, "OO!O!", &sha256, &PyTuple_Type, &forms, &PyTuple_Type, &severities))
        return NULL;
    Walk *self = (Walk *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->sha256 = Py_NewRef(sha256);
    self->names = Py_BuildValue("OO", forms, severities);
    self->expected = Py_NewRef(Py_None);
    self->stops = Py_NewRef(Py_None);
    self->last_step = self->row_step = self->last_start = -1;
    self->last_time = -Py_HUGE_VAL;
    Py_ssize_t count = PyTuple_GET_SIZE(forms);
    self->forms = PyMem_Calloc(count + 1, sizeof *self->forms);
    if (self->names == NULL || self->forms == NULL) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    self->form_count = (int)count;
    int sure = take_needed(severities, &self->severities);
    for (Py_ssize_t i = 0; i < count && sure >= 0; i++)
        sure = take_form(PyTuple_GET_ITEM(forms, i), &self->forms[i]);
    if (sure < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *
hash_get(Walk *self, void *place)
{
    return PyUnicode_FromString((char *)self + (size_t)place);
}

/* Texts of another length than a hash are kept as none: no line fits them. */
static int
hash_set(Walk *self, PyObject *value, void *place)
{
    char *to = (char *)self + (size_t)place;
    memset(to, 0, HASH_SIZE + 1);
    if (value == NULL || !PyUnicode_Check(value))
        return 0;
    if (PyUnicode_IS_ASCII(value) && PyUnicode_GET_LENGTH(value) == HASH_SIZE)
        memcpy(to, PyUnicode_1BYTE_DATA(value), HASH_SIZE);
    return 0;
}

static PyMethodDef walk_methods[] = {
    {"follow", (PyCFunction)(void (*)(void))walk_follow, METH_FASTCALL,
     "follow(block, start): pass the quiet lines from there on; where the first other one begins."},
    {"line", (PyCFunction)walk_line, METH_O,
     "line(raw): value and canonical body of a line as json.dumps writes it, else None."},
    {"seen", (PyCFunction)walk_seen, METH_NOARGS, "seen(): lines passed, by event type."},
    {NULL}};

static PyMemberDef walk_members[] = {
    {"count", T_LONGLONG, offsetof(Walk, count), 0, NULL},
    {"last_step", T_LONGLONG, offsetof(Walk, last_step), 0, NULL},
    {"last_time", T_DOUBLE, offsetof(Walk, last_time), 0, NULL},
    {"matched", T_LONGLONG, offsetof(Walk, matched), READONLY, NULL},
    {"last_start", T_LONGLONG, offsetof(Walk, last_start), READONLY, NULL},
    {"with_rows", T_BOOL, offsetof(Walk, with_rows), 0, NULL},
    {"row_step", T_LONGLONG, offsetof(Walk, row_step), 0, NULL},
    {"rows", T_LONGLONG, offsetof(Walk, rows), 0, NULL},
    {"expected", T_OBJECT, offsetof(Walk, expected), 0, NULL},
    {"stops", T_OBJECT, offsetof(Walk, stops), 0, NULL},
    {NULL}};

static PyGetSetDef walk_hashes[] = {
    {"chained", (getter)hash_get, (setter)hash_set, NULL, (void *)offsetof(Walk, chained)},
    {"digest", (getter)hash_get, (setter)hash_set, NULL, (void *)offsetof(Walk, digest)},
    {NULL}};

static PyTypeObject WalkType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._record.Walk",
    .tp_basicsize = sizeof(Walk),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = walk_new,
    .tp_dealloc = (destructor)walk_dealloc,
    .tp_methods = walk_methods,
    .tp_members = walk_members,
    .tp_getset = walk_hashes,
};
