/* The hot path of a scope whose span the application's tracer makes: joined_core.py says what it
 * does. A part of _fast.c, which says what holds for all of it.
 */

typedef struct {
    Scope base;
    char exported;
    PyObject *span, *given, *seen, *shared, *values;
} Joined;

static struct {
    PyObject *readable, *kind, *unset;
} J;

static PyObject *j_add_event, *j_attributes, *j_batcher, *j_blame_end, *j_emit, *j_end, *j_events,
    *j_finish, *j_get_span_context, *j_index, *j_is_recording, *j_links, *j_mark, *j_name,
    *j_no_span, *j_relieve, *j_set_attributes, *j_span_id, *j_spans, *j_start_span, *j_start_slowly,
    *j_status, *j_status_code, *j_take_span, *j_trace_flags, *j_tracer, *j_ts_ns, *j_value;

static PyMemberDef joined_members[] = {
    {"exported", T_BOOL, offsetof(Joined, exported), 0, NULL},
    {"span", T_OBJECT_EX, offsetof(Joined, span), 0, NULL},
    {"_given", T_OBJECT_EX, offsetof(Joined, given), 0, NULL},
    {"_seen", T_OBJECT, offsetof(Joined, seen), 0, NULL},
    {"_shared", T_OBJECT_EX, offsetof(Joined, shared), 0, NULL},
    {"values", T_OBJECT, offsetof(Joined, values), 0, NULL},
    {NULL}
};

static PyTypeObject JoinedType;

static int
joined_traverse(Joined *self, visitproc visit, void *arg)
{
    Py_VISIT(self->span);
    Py_VISIT(self->given);
    Py_VISIT(self->seen);
    Py_VISIT(self->shared);
    Py_VISIT(self->values);
    return scope_traverse(&self->base, visit, arg);
}

static int
joined_clear(Joined *self)
{
    Py_CLEAR(self->span);
    Py_CLEAR(self->given);
    Py_CLEAR(self->seen);
    Py_CLEAR(self->shared);
    Py_CLEAR(self->values);
    return scope_clear(&self->base);
}

static void
joined_dealloc(Joined *self)
{
    PyObject_GC_UnTrack(self);
    joined_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* --- opening ---------------------------------------------------------------------------------- */

/* 1 or 0 as `object` calls itself true in a method or an attribute; -1: error */
static int
answers(PyObject *object, PyObject *method)
{
    PyObject *said = PyObject_CallMethodNoArgs(object, method);
    int truth = said == NULL ? -1 : said == Py_True ? 1 : said == Py_False ? 0
        : PyObject_IsTrue(said);
    Py_XDECREF(said);
    return truth;
}

static int
unsigned_attribute(PyObject *object, PyObject *name, unsigned long long *out)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL) {
        return -1;
    }
    *out = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return *out == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 0;
}

/* A spool id from the number of a span. */
static PyObject *
id_from_number(unsigned long long number, PyObject *low)
{
    if (!PyUnicode_Check(low) || PyUnicode_READY(low) < 0 || !PyUnicode_IS_ASCII(low)) {
        PyErr_SetString(PyExc_TypeError, "the low half of a trace id is text");
        return NULL;
    }
    Py_ssize_t length = PyUnicode_GET_LENGTH(low);
    PyObject *id = PyUnicode_New(16 + length, 127);
    if (id == NULL) {
        return NULL;
    }
    char *to = (char *)PyUnicode_1BYTE_DATA(id);
    put_hex(to, number);
    memcpy(to + 16, PyUnicode_1BYTE_DATA(low), (size_t)length);
    return id;
}

/* Takes the exception that is set, if it is an Exception: new reference; else NULL, still set. */
static PyObject *
take_exception(void)
{
    PyObject *type, *error, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return NULL;
    }
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}

/* Calls method(context, what): what is not as it mostly is, is Python's to judge. */
static int
leave_to(Joined *self, PyObject *method, PyObject *one, PyObject *two)
{
    PyObject *done = PyObject_CallMethodObjArgs((PyObject *)self, method, one, two, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Has the application's tracer make the span, where it is started with no attributes of the
   user's. */
static int
start_plain(Joined *joined, PyObject *context, PyObject *given, long long start_ns)
{
    Scope *self = &joined->base;
    PyObject *tracer = NULL, *span = NULL, *made = NULL, *id = NULL;
    unsigned long long flags, number;
    int result = -1;

    PyObject *spans = PyObject_GetAttr(self->rec, j_spans);
    PyObject *start = PyLong_FromLongLong(start_ns);
    if (spans == NULL || start == NULL || (tracer = PyObject_GetAttr(spans, j_tracer)) == NULL) {
        goto done;
    }
    PyObject *args[] = {
        tracer, self->name, context, J.kind, PyDict_GET_SIZE(given) ? given : Py_None, Py_None,
        start,
    };
    span = PyObject_VectorcallMethod(j_start_span, args, sizeof(args) / sizeof(*args), NULL);
    if (span == NULL) {
        PyObject *error = take_exception();
        if (error != NULL) {
            result = leave_to(joined, j_no_span, context, error);
            Py_DECREF(error);
        }
        goto done;
    }
    if (PyObject_TypeCheck(span, (PyTypeObject *)J.readable)) {
        int recording = answers(span, j_is_recording);
        if (recording < 0 || (made = PyObject_CallMethodNoArgs(span, j_get_span_context)) == NULL
            || unsigned_attribute(made, j_trace_flags, &flags) < 0
            || unsigned_attribute(made, j_span_id, &number) < 0) {
            goto done;
        }
        if (recording && (flags & 1) && self->trace != NULL
            && is_a(self->trace, &TraceType, &seen_trace) && ((Trace *)self->trace)->low != NULL) {
            id = id_from_number(number, ((Trace *)self->trace)->low);
            if (id != NULL) {
                put(&self->id, more(id));
                put(&joined->span, more(span));
                joined->exported = 1;
                result = 0;
            }
            goto done;
        }
    }
    result = leave_to(joined, j_take_span, context, span);
done:
    Py_XDECREF(id);
    Py_XDECREF(made);
    Py_XDECREF(span);
    Py_XDECREF(tracer);
    Py_XDECREF(start);
    Py_XDECREF(spans);
    return result;
}

/* With attributes of the user's: Python cleans them. */
static int
start_slowly(Joined *joined, PyObject *context, PyObject *given, long long start_ns)
{
    PyObject *start = PyLong_FromLongLong(start_ns);
    PyObject *done = start == NULL ? NULL : PyObject_CallMethodObjArgs(
        (PyObject *)joined, j_start_slowly, context, given, start, NULL);
    Py_XDECREF(start);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int
relieve(Recorder *rec)
{
    PyObject *batcher = PyObject_GetAttr((PyObject *)rec, j_batcher);
    PyObject *done = batcher == NULL ? NULL : PyObject_CallMethodNoArgs(batcher, j_relieve);
    Py_XDECREF(batcher);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* What the span is started with beside the user's attributes: new reference. */
static PyObject *
own_attributes(Scope *self, PyObject *shared)
{
    if (self->index == NULL || self->index == Py_None) {
        return more(shared);
    }
    PyObject *own = PyDict_Copy(shared);
    if (own != NULL && PyDict_SetItem(own, j_index, self->index) < 0) {
        Py_CLEAR(own);
    }
    return own;
}

/* The trace to open in, and the context to start the span in; NULL: not the short way. */
static Trace *
place(Joined *parent, double reserve, PyObject **start_in)
{
    Trace *trace = (Trace *)parent->base.trace;
    if (trace == NULL || !is_a((PyObject *)trace, &TraceType, &seen_trace)) {
        return NULL;
    }
    if ((double)trace->count < trace->limit - reserve) {
        return trace->otel == NULL || trace->low == NULL ? NULL : trace;
    }
    trace = (Trace *)trace->window;
    if (trace == NULL || !is_a((PyObject *)trace, &TraceType, &seen_trace)
        || (double)trace->count >= trace->limit - reserve || trace->parent != (PyObject *)parent
        || PyDict_GET_SIZE(*start_in) != 2 || trace->root_context == NULL
        || trace->child_otel == NULL || trace->low == NULL) {
        return NULL;
    }
    *start_in = trace->root_context;
    return trace;
}

static int
is_epoch(PyObject *name)
{
    return PyUnicode_GET_LENGTH(name) == 5
        && PyUnicode_CompareWithASCIIString(name, "epoch") == 0;
}

/* 1: opened, 0: not the short way, nothing has happened, -1: error */
static int
joined_open(Joined *joined, PyObject *start_ns, double reserve)
{
    Scope *self = &joined->base;
    PyObject *context = NULL, *given = NULL, *made = NULL;
    long long start = 0;
    int result = -1;

    Recorder *rec = usable(self->rec);
    if (rec == NULL || rec->detour || self->state != NEW || self->name == NULL
        || !PyUnicode_CheckExact(self->name) || is_epoch(self->name) || self->attrs == NULL
        || !PyDict_CheckExact(self->attrs)) {
        return 0;
    }
    if (PyContextVar_Get(C.variable, NULL, &context) < 0) {
        return -1;
    }
    if (context == NULL || !PyDict_Check(context)) {
        Py_XDECREF(context);
        return 0;
    }
    PyObject *found = PyDict_GetItemWithError(context, C.scope_key);
    if (found == NULL || !is_a(found, &JoinedType, &seen_joined)) {
        Py_DECREF(context);
        return PyErr_Occurred() ? -1 : 0;
    }
    Joined *parent = (Joined *)found; /* the context holds it */
    Scope *above = &parent->base;
    PyObject *start_in = context;
    Trace *trace;
    if (above->state != OPEN || above->ctx != context || above->rec != self->rec
        || !parent->exported || above->thread_id != PyThread_get_thread_ident()
        || above->depth >= C.max_depth || above->iteration == NULL || parent->shared == NULL
        || !PyDict_CheckExact(parent->shared)
        || (trace = place(parent, reserve, &start_in)) == NULL) {
        Py_DECREF(context);
        return 0;
    }
    Py_INCREF(rec); /* what is called below may do anything */
    Py_INCREF(trace);
    Py_INCREF(start_in);
    Clock *clock = (Clock *)more(rec->clock);
    self->offset = clock->offset_ns;
    if (start_ns == NULL) {
        if (monotonic(clock, &start) < 0) {
            goto done;
        }
        start += self->offset;
    } else if ((start = PyLong_AsLongLong(start_ns)) == -1 && PyErr_Occurred()) {
        goto done;
    }
    if ((given = own_attributes(self, parent->shared)) == NULL) {
        goto done;
    }
    trace->count++;
    if ((PyObject *)trace == above->trace) {
        put(&self->otel, more(trace->otel));
    } else {
        put(&self->otel, more(trace->child_otel));
        put(&trace->last, more((PyObject *)self));
    }
    put(&self->trace, more((PyObject *)trace));
    put(&self->above, more((PyObject *)parent));
    put(&self->iteration, more(above->iteration));
    put(&self->prev, more(context));
    put(&joined->shared, more(parent->shared));
    put(&joined->given, more(given));
    put(&joined->seen, more(Py_None));
    self->depth = above->depth + 1;
    self->thread_id = above->thread_id;
    self->start_ns = self->last_ns = start;
    if (!(trace->count & 63) && relieve(rec) < 0) {
        goto done;
    }
    if ((PyDict_GET_SIZE(self->attrs) ? start_slowly(joined, start_in, given, start)
                                      : start_plain(joined, start_in, given, start)) < 0
        || joined->span == NULL || self->id == NULL
        || (made = new_context(context, joined->span, (PyObject *)joined)) == NULL
        || attach(made) < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_AttributeError, "the scope has lost its span");
        }
        goto done;
    }
    put(&self->ctx, more(made));
    self->state = OPEN;
    result = rec->open == NULL
        || PyDict_SetItem(rec->open, self->id, (PyObject *)self) < 0 ? -1 : 1;
done:
    Py_XDECREF(made);
    Py_XDECREF(given);
    Py_DECREF(clock);
    Py_DECREF(start_in);
    Py_DECREF(trace);
    Py_DECREF(rec);
    Py_DECREF(context);
    return result;
}

/* --- closing ---------------------------------------------------------------------------------- */

/* How many of the span's `what` (events, links, attributes) there are; -1: error */
static Py_ssize_t
how_many(PyObject *span, PyObject *what)
{
    PyObject *found = PyObject_GetAttr(span, what);
    if (found == NULL) {
        return -1;
    }
    Py_ssize_t count = PyTuple_CheckExact(found) ? PyTuple_GET_SIZE(found) : PyObject_Size(found);
    Py_DECREF(found);
    return count;
}

/* Whether nobody but us has set anything on the span. 1, 0; -1: error */
static int
is_untouched(Joined *joined, PyObject *span)
{
    Scope *self = &joined->base;
    if (!PyObject_TypeCheck(span, (PyTypeObject *)J.readable)) {
        return 1; /* no SDK span: nothing can be read back */
    }
    Py_ssize_t marks = self->more_marks;
    if (self->marks != NULL && PyList_CheckExact(self->marks)) {
        marks += PyList_GET_SIZE(self->marks);
    }
    Py_ssize_t count = how_many(span, j_events);
    if (count < 0 || count > marks) {
        return count < 0 ? -1 : 0;
    }
    if ((count = how_many(span, j_links)) != 0) {
        return count < 0 ? -1 : 0;
    }
    if ((count = how_many(span, j_attributes)) < 0 || joined->given == NULL
        || !PyDict_Check(joined->given) || count != PyDict_GET_SIZE(joined->given)) {
        return count < 0 ? -1 : 0;
    }
    PyObject *name = PyObject_GetAttr(span, j_name);
    if (name == NULL) {
        return -1;
    }
    int same = name == self->name
        || (self->name != NULL && PyUnicode_CheckExact(name) && PyUnicode_CheckExact(self->name)
            && PyUnicode_Compare(name, self->name) == 0);
    Py_DECREF(name);
    if (!same) {
        return 0;
    }
    PyObject *status = PyObject_GetAttr(span, j_status);
    PyObject *code = status == NULL ? NULL : PyObject_GetAttr(status, j_status_code);
    Py_XDECREF(status);
    Py_XDECREF(code); /* a member of an enum: it does not go away */
    return code == NULL ? -1 : code == J.unset;
}

/* The last value of each mark, as attributes of the span. 1: set, 0: not this way, -1: error */
static int
set_values(Joined *joined, PyObject *span)
{
    PyObject *given = joined->given, *name, *value;
    Py_ssize_t at = 0;
    int result = -1;
    if (given == NULL || !PyDict_CheckExact(given) || !PyDict_CheckExact(joined->values)) {
        return 0;
    }
    PyObject *late = PyDict_New(), *all = PyDict_Copy(given), *done = NULL;
    if (late == NULL || all == NULL) {
        goto done;
    }
    while (PyDict_Next(joined->values, &at, &name, &value)) {
        PyObject *key = PyUnicode_CheckExact(name) ? PyUnicode_Concat(j_mark, name) : NULL;
        int known = key == NULL ? -1 : PyDict_Contains(given, key);
        int failed = known != 0 || PyDict_SetItem(late, key, value) < 0
            || PyDict_SetItem(all, key, value) < 0;
        Py_XDECREF(key);
        if (failed) {
            result = PyErr_Occurred() ? -1 : 0;
            goto done;
        }
    }
    done = PyObject_CallMethodOneArg(span, j_set_attributes, late);
    if (done != NULL) {
        put(&joined->given, more(all)); /* these are no stranger's */
        result = 1;
    }
done:
    Py_XDECREF(done);
    Py_XDECREF(all);
    Py_XDECREF(late);
    return result;
}

/* Ends a span to which we add nothing but the values of marks. 1: it is as we know it, 0: somebody
   set something on it, or it was not ended here (`*ended` is false), -1: error */
static int
end_plain(Joined *joined, PyObject *span, PyObject *end, int *ended)
{
    int recording = answers(span, j_is_recording);
    *ended = 1;
    if (recording > 0) {
        int set = joined->values == NULL || joined->values == Py_None
            ? 1 : set_values(joined, span);
        if (set == 0) {
            *ended = 0;
            return 0;
        }
        PyObject *done = set < 0 ? NULL : PyObject_CallMethodOneArg(span, j_end, end);
        Py_XDECREF(done);
        recording = done == NULL ? -1 : 0;
    }
    if (recording < 0) {
        PyObject *error = take_exception();
        PyObject *done = error == NULL ? NULL
            : PyObject_CallMethodOneArg((PyObject *)joined, j_blame_end, error);
        Py_XDECREF(error);
        Py_XDECREF(done);
        if (done == NULL) {
            return -1;
        }
    }
    return is_untouched(joined, span);
}

static int
call_with(PyObject *object, PyObject *method, PyObject *argument)
{
    PyObject *done = PyObject_CallMethodOneArg(object, method, argument);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Makes the row of an ended scope and hands it on. */
static int
give_row(Scope *self, Scope *above, Recorder *rec)
{
    int written = write_row(self, above, rec);
    if (written) {
        return written < 0 ? -1 : 0;
    }
    PyObject *row = new_row(self, above, rec);
    PyObject *done = row == NULL ? NULL : hand(rec->append_span, row);
    Py_XDECREF(row);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* 1: closed, 0: not the short way, nothing has happened, -1: error */
static int
joined_close(Joined *joined)
{
    Scope *self = &joined->base, *above = (Scope *)self->above;
    PyObject *context = NULL, *end = NULL;
    long long now;
    int result = -1, ended = 0, plain = 0;

    Recorder *rec = usable(self->rec);
    if (self->state != OPEN || self->extra != Py_None || rec == NULL || rec->detour || above == NULL
        || !is_a((PyObject *)above, &ScopeType, &seen_scope) || above->state != OPEN
        || above->id == NULL || self->prev == NULL || self->id == NULL || joined->span == NULL
        || self->attrs == NULL || !PyDict_CheckExact(self->attrs)) {
        return 0;
    }
    if (PyContextVar_Get(C.variable, NULL, &context) < 0) {
        return -1;
    }
    int current = context != NULL && context == self->ctx;
    Py_XDECREF(context);
    if (!current) {
        return 0;
    }
    PyObject *before = more(self->prev), *id = more(self->id), *open = more(rec->open),
             *span = more(joined->span);
    Py_INCREF(above); /* what is called below may do anything */
    Py_INCREF(rec);
    if (monotonic((Clock *)rec->clock, &now) < 0
        || (end = PyLong_FromLongLong(now + self->offset)) == NULL || attach(before) < 0) {
        goto done;
    }
    self->state = ENDED;
    self->end_ns = now + self->offset;
    put(&self->ctx, more(C.gone));
    above->last_ns = self->end_ns;
    above->ops += self->ops + 1;
    if (joined->exported && PyDict_GET_SIZE(self->attrs) == 0
        && (plain = end_plain(joined, span, end, &ended)) < 0) {
        goto done;
    }
    if (!ended && call_with((PyObject *)self, j_finish, end) < 0) {
        goto done;
    }
    if ((plain ? give_row(self, above, rec)
               : call_with((PyObject *)rec, j_emit, (PyObject *)self)) < 0) {
        goto done;
    }
    if (PyDict_DelItem(open, id) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_KeyError)) {
            goto done;
        }
        PyErr_Clear();
    }
    result = 1;
done:
    Py_XDECREF(end);
    Py_DECREF(before);
    Py_DECREF(id);
    Py_DECREF(open);
    Py_DECREF(span);
    Py_DECREF(rec);
    Py_DECREF(above);
    return result;
}

/* --- marks ------------------------------------------------------------------------------------ */

/* Shows a mark on the span, and keeps its value for when that ends. */
static int
joined_show(Joined *joined, PyObject *name, PyObject *value, PyObject *ts_ns)
{
    if (!joined->exported || joined->span == NULL) {
        return 0;
    }
    PyObject *attrs = PyDict_New(), *span = more(joined->span), *done = NULL;
    if (attrs != NULL && PyDict_SetItem(attrs, j_value, value) == 0) {
        PyObject *args[] = {span, name, attrs, ts_ns};
        done = PyObject_VectorcallMethod(j_add_event, args, 4, NULL);
    }
    Py_XDECREF(attrs);
    Py_XDECREF(done);
    Py_DECREF(span);
    if (done == NULL) {
        return -1;
    }
    if (joined->values == NULL || !PyDict_CheckExact(joined->values)) {
        PyObject *values = PyDict_New();
        if (values == NULL) {
            return -1;
        }
        put(&joined->values, values);
    }
    return PyDict_SetItem(joined->values, name, value);
}

static int
is_joined(Scope *scope)
{
    return is_a((PyObject *)scope, &JoinedType, &seen_joined);
}

/* `record` is there where the scope is no joined one. */
static PyObject *
show_mark(Scope *scope, PyObject *name, PyObject *value, PyObject *ts_ns, PyObject *record)
{
    if (!is_joined(scope)) {
        return PyObject_CallMethodOneArg((PyObject *)scope, s_show_number, record);
    }
    return joined_show((Joined *)scope, name, value, ts_ns) < 0 ? NULL : more(Py_None);
}

static PyObject *
joined_show_number(Joined *self, PyObject *record)
{
    PyObject *name = PyObject_GetAttr(record, j_name);
    PyObject *value = PyObject_GetAttr(record, j_value);
    PyObject *ts = PyObject_GetAttr(record, j_ts_ns);
    int shown = name == NULL || value == NULL || ts == NULL ? -1
        : joined_show(self, name, value, ts);
    Py_XDECREF(ts);
    Py_XDECREF(value);
    Py_XDECREF(name);
    if (shown < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* --- the type --------------------------------------------------------------------------------- */

static PyObject *
joined_enter(Joined *self, PyObject *Py_UNUSED(nothing))
{
    int opened = joined_open(self, NULL, 0.0);
    if (opened == 0) {
        PyObject *done = PyObject_CallMethodNoArgs((PyObject *)self, s_open);
        opened = done == NULL ? -1 : 1;
        Py_XDECREF(done);
    }
    if (opened < 0 && swallow(&self->base, s_enter) < 0) {
        return NULL;
    }
    return more((PyObject *)self);
}

static PyObject *
joined_exit(Joined *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "__exit__ takes exactly three arguments");
        return NULL;
    }
    int closed = args[1] == Py_None && args[0] == Py_None ? joined_close(self) : 0;
    if (closed == 0) {
        PyObject *done = PyObject_CallMethodObjArgs(
            (PyObject *)self, s_leave, args[0], args[1], args[2], NULL);
        closed = done == NULL ? -1 : 1;
        Py_XDECREF(done);
    }
    if (closed < 0 && swallow(&self->base, s_exit) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
joined_open_here(Joined *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "open_here takes start_ns, iteration and reserve");
        return NULL;
    }
    double reserve = PyFloat_AsDouble(args[2]);
    if (reserve == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    if (args[1] != Py_None) { /* a step: its children share more than it bears */
        Py_RETURN_FALSE;
    }
    int opened = joined_open(self, args[0] == Py_None ? NULL : args[0], reserve);
    return opened < 0 ? NULL : PyBool_FromLong(opened);
}

static PyMethodDef joined_methods[] = {
    {"enter", (PyCFunction)joined_enter, METH_NOARGS, "Open the scope: the with statement's way."},
    {"exit", (PyCFunction)(void (*)(void))joined_exit, METH_FASTCALL, "Close the scope."},
    {"open_here", (PyCFunction)(void (*)(void))joined_open_here, METH_FASTCALL,
     "Open under the current scope the short way; says whether it was opened."},
    {"show_number", (PyCFunction)joined_show_number, METH_O,
     "Show a mark that is a finite number and a point on the span."},
    {NULL}
};

static PyTypeObject JoinedType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._fast.JoinedCore",
    .tp_basicsize = sizeof(Joined),
    .tp_base = &ScopeType,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A scope's fields and its hot path, where the application's tracer makes the span.",
    .tp_traverse = (traverseproc)joined_traverse,
    .tp_clear = (inquiry)joined_clear,
    .tp_dealloc = (destructor)joined_dealloc,
    .tp_members = joined_members,
    .tp_methods = joined_methods,
    .tp_new = PyType_GenericNew,
};

/* A span processor's method that has nothing to do, whatever it is called with. */
static PyObject *
nothing(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(count),
        PyObject *Py_UNUSED(names))
{
    Py_RETURN_NONE;
}

static PyObject *
configure_joined(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *readable, *kind, *unset, *index, *mark, *value;
    if (!PyArg_ParseTuple(args, "O!OOUUU", &PyType_Type, &readable, &kind, &unset, &index, &mark,
                          &value)) {
        return NULL;
    }
    put(&J.readable, more(readable));
    put(&J.kind, more(kind));
    put(&J.unset, more(unset));
    put(&j_index, more(index));
    put(&j_mark, more(mark));
    put(&j_value, more(value));
    Py_RETURN_NONE;
}

static int
ready_joined(PyObject *module)
{
    static const struct { PyObject **where; const char *text; } names[] = {
        {&j_add_event, "add_event"}, {&j_attributes, "attributes"}, {&j_batcher, "batcher"},
        {&j_blame_end, "_blame_end"}, {&j_emit, "emit"}, {&j_end, "end"}, {&j_events, "events"},
        {&j_finish, "_finish"}, {&j_get_span_context, "get_span_context"},
        {&j_is_recording, "is_recording"}, {&j_links, "links"}, {&j_name, "name"},
        {&j_no_span, "_no_span"}, {&j_relieve, "relieve"}, {&j_set_attributes, "set_attributes"},
        {&j_span_id, "span_id"}, {&j_spans, "spans"}, {&j_start_span, "start_span"},
        {&j_start_slowly, "_start_span"}, {&j_status, "status"}, {&j_status_code, "status_code"},
        {&j_take_span, "_take_span"}, {&j_trace_flags, "trace_flags"}, {&j_tracer, "tracer"},
        {&j_ts_ns, "ts_ns"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        if ((*names[i].where = PyUnicode_InternFromString(names[i].text)) == NULL) {
            return -1;
        }
    }
    return PyType_Ready(&JoinedType) < 0
        || PyModule_AddObjectRef(module, "JoinedCore", (PyObject *)&JoinedType) < 0 ? -1 : 0;
}
