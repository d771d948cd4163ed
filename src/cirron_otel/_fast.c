/* The hot path of a scope, compiled: scope_core.py says what it does, line by line.
 *
 * Both files define the same two classes with the same attributes and methods; scope_base.py takes
 * this one where it was built. It uses the public C API of CPython only, holds no state but the
 * constants handed to configure() and what it need not work out twice in a row, and runs under the
 * GIL, so that each method here is atomic.
 *
 * Every function that can fail leaves the scope as it was, or raises: there is no half-open scope.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <time.h>

#include "_rows.h"
#ifndef _WIN32
#include "_files.h"
#endif

enum { NEW, OPEN, ENDED, INHERITED };

static struct {
    PyObject *variable, *context_type, *span_key, *scope_key, *gone, *span_record, *mark_record,
        *no_attrs, *unset, *estimated, *overhead, *empty;
    long max_depth, max_mark_ids;
} C;

static PyObject *s_next_span_id, *s_open, *s_row, *s_guard, *s_swallow, *s_enter,
    *s_exit, *s_leave, *s_next_mark_id, *s_show_number, *s_float, *s_int, *s_point;

/* time.monotonic_ns, which is read without a call where a clock has it. */
static PyObject *system_clock;

/* PyObject_TypeCheck, without the walk for the class that was seen last: nearly always the same. */
static int
is_a(PyObject *object, PyTypeObject *base, PyTypeObject **seen)
{
    PyTypeObject *type = Py_TYPE(object), *before = *seen;
    if (type == before) {
        return 1;
    }
    if (!PyType_IsSubtype(type, base)) {
        return 0;
    }
    Py_INCREF(type); /* another may not come to lie where it lay */
    *seen = type;
    Py_XDECREF(before);
    return 1;
}

static PyTypeObject *seen_clock, *seen_recorder, *seen_trace, *seen_scope, *seen_joined;

/* --- Clock ------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    long long offset_ns;
    PyObject *monotonic_ns;
} Clock;

static PyMemberDef clock_members[] = {
    {"offset_ns", T_LONGLONG, offsetof(Clock, offset_ns), 0, NULL},
    {"monotonic_ns", T_OBJECT_EX, offsetof(Clock, monotonic_ns), 0, NULL},
    {NULL}
};

static int
clock_traverse(Clock *self, visitproc visit, void *arg)
{
    Py_VISIT(self->monotonic_ns);
    return 0;
}

static int
clock_clear(Clock *self)
{
    Py_CLEAR(self->monotonic_ns);
    return 0;
}

static void
clock_dealloc(Clock *self)
{
    PyObject_GC_UnTrack(self);
    clock_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject ClockType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._fast.ClockCore",
    .tp_basicsize = sizeof(Clock),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "What a scope reads of its clock.",
    .tp_traverse = (traverseproc)clock_traverse,
    .tp_clear = (inquiry)clock_clear,
    .tp_dealloc = (destructor)clock_dealloc,
    .tp_members = clock_members,
    .tp_new = PyType_GenericNew,
};

/* --- Recorder --------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    char active, busy, detour, shows_marks;
    double overhead_ns;
    Py_ssize_t headroom;
    PyObject *clock, *span_ids, *mark_ids, *open, *append_span, *append_mark, *pid, *rank,
        *span_rows, *mark_rows, *quick_kind;
} Recorder;

#define EACH_OBJECT(DO)                                                                            \
    DO(self->clock); DO(self->span_ids); DO(self->mark_ids); DO(self->open);                       \
    DO(self->append_span); DO(self->append_mark); DO(self->pid); DO(self->rank);                   \
    DO(self->span_rows); DO(self->mark_rows); DO(self->quick_kind)

#define OBJECT(field) {#field, T_OBJECT_EX, offsetof(Recorder, field), 0, NULL}
static PyMemberDef recorder_members[] = {
    {"busy", T_BOOL, offsetof(Recorder, busy), 0, NULL},
    {"detour", T_BOOL, offsetof(Recorder, detour), 0, NULL},
    {"shows_marks", T_BOOL, offsetof(Recorder, shows_marks), 0, NULL},
    {"active", T_BOOL, offsetof(Recorder, active), 0, NULL},
    {"quick_kind", T_OBJECT, offsetof(Recorder, quick_kind), 0, NULL},
    {"overhead_ns", T_DOUBLE, offsetof(Recorder, overhead_ns), 0, NULL},
    {"headroom", T_PYSSIZET, offsetof(Recorder, headroom), 0, NULL},
    OBJECT(clock),
    OBJECT(span_ids),
    OBJECT(mark_ids),
    OBJECT(open),
    OBJECT(append_span),
    OBJECT(append_mark),
    OBJECT(pid),
    OBJECT(rank),
    {"span_rows", T_OBJECT, offsetof(Recorder, span_rows), 0, NULL}, /* None: no text */
    {"mark_rows", T_OBJECT, offsetof(Recorder, mark_rows), 0, NULL},
    {NULL}
};
#undef OBJECT

static int
recorder_traverse(Recorder *self, visitproc visit, void *arg)
{
    EACH_OBJECT(Py_VISIT);
    return 0;
}

static int
recorder_clear(Recorder *self)
{
    EACH_OBJECT(Py_CLEAR);
    return 0;
}
#undef EACH_OBJECT

static void
recorder_dealloc(Recorder *self)
{
    PyObject_GC_UnTrack(self);
    recorder_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject RecorderType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._fast.RecorderCore",
    .tp_basicsize = sizeof(Recorder),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "What a scope reads of its recorder.",
    .tp_traverse = (traverseproc)recorder_traverse,
    .tp_clear = (inquiry)recorder_clear,
    .tp_dealloc = (destructor)recorder_dealloc,
    .tp_members = recorder_members,
    .tp_new = PyType_GenericNew,
};

/* The recorder of a scope, if it has all that is read here; NULL (no error): not the short way. */
static Recorder *
usable(PyObject *rec)
{
    if (rec == NULL || !is_a(rec, &RecorderType, &seen_recorder)) {
        return NULL;
    }
    Recorder *self = (Recorder *)rec;
    if (self->clock == NULL || !is_a(self->clock, &ClockType, &seen_clock)
        || ((Clock *)self->clock)->monotonic_ns == NULL
        || self->span_ids == NULL || !PyList_CheckExact(self->span_ids)
        || self->mark_ids == NULL || !PyList_CheckExact(self->mark_ids)
        || self->open == NULL || !PyDict_CheckExact(self->open)
        || self->append_span == NULL || self->append_mark == NULL || self->pid == NULL
        || self->rank == NULL) {
        return NULL;
    }
    return self;
}

/* --- Trace ------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    Py_ssize_t count;
    double limit;
    PyObject *low, *otel, *child_otel, *window, *last, *parent, *root_context;
    PyObject *otel_of[2], *json_of[2]; /* what was encoded last, and what came of it */
} Trace;

static PyMemberDef trace_members[] = {
    {"count", T_PYSSIZET, offsetof(Trace, count), 0, NULL},
    {"limit", T_DOUBLE, offsetof(Trace, limit), 0, NULL},
    {"low", T_OBJECT_EX, offsetof(Trace, low), 0, NULL},
    {"otel", T_OBJECT_EX, offsetof(Trace, otel), 0, NULL},
    {"child_otel", T_OBJECT_EX, offsetof(Trace, child_otel), 0, NULL},
    {"window", T_OBJECT_EX, offsetof(Trace, window), 0, NULL},
    {"last", T_OBJECT_EX, offsetof(Trace, last), 0, NULL},
    {"parent", T_OBJECT_EX, offsetof(Trace, parent), 0, NULL},
    {"root_context", T_OBJECT_EX, offsetof(Trace, root_context), 0, NULL},
    {NULL}
};

static int
trace_traverse(Trace *self, visitproc visit, void *arg)
{
    Py_VISIT(self->low);
    Py_VISIT(self->otel);
    Py_VISIT(self->child_otel);
    Py_VISIT(self->window);
    Py_VISIT(self->last);
    Py_VISIT(self->parent);
    Py_VISIT(self->root_context);
    Py_VISIT(self->otel_of[0]);
    Py_VISIT(self->otel_of[1]);
    return 0;
}

static int
trace_clear(Trace *self)
{
    Py_CLEAR(self->low);
    Py_CLEAR(self->otel);
    Py_CLEAR(self->child_otel);
    Py_CLEAR(self->window);
    Py_CLEAR(self->last);
    Py_CLEAR(self->parent);
    Py_CLEAR(self->root_context);
    for (int i = 0; i < 2; i++) {
        Py_CLEAR(self->otel_of[i]);
        Py_CLEAR(self->json_of[i]);
    }
    return 0;
}

static void
trace_dealloc(Trace *self)
{
    PyObject_GC_UnTrack(self);
    trace_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *more(PyObject *object);
static void put(PyObject **field, PyObject *value);

/* fill(low, otel, limit, context): a new trace's fields. */
static PyObject *
trace_fill(Trace *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "fill takes low, otel, limit and context");
        return NULL;
    }
    double limit = PyFloat_AsDouble(args[2]);
    if (limit == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    put(&self->low, more(args[0]));
    put(&self->otel, more(args[1]));
    put(&self->root_context, more(args[3]));
    put(&self->child_otel, more(Py_None));
    put(&self->window, more(Py_None));
    put(&self->last, more(Py_None));
    put(&self->parent, more(Py_None));
    self->limit = limit;
    self->count = 0;
    Py_RETURN_NONE;
}

static PyMethodDef trace_methods[] = {
    {"fill", (PyCFunction)(void (*)(void))trace_fill, METH_FASTCALL,
     "Make a new trace's fields, but for those that only Python reads."},
    {NULL}
};

static PyTypeObject TraceType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._fast.TraceCore",
    .tp_basicsize = sizeof(Trace),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "What a scope reads of its trace.",
    .tp_traverse = (traverseproc)trace_traverse,
    .tp_clear = (inquiry)trace_clear,
    .tp_dealloc = (destructor)trace_dealloc,
    .tp_members = trace_members,
    .tp_methods = trace_methods,
    .tp_new = PyType_GenericNew,
};

/* --- Scope ------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    int state, depth;
    long long offset, start_ns, end_ns, last_ns, ops, more_marks;
    unsigned long long thread_id;
    PyObject *rec, *name, *index, *attrs, *clean, *marks, *extra, *ctx, *id, *above, *trace, *otel,
        *prev, *iteration;
} Scope;

#define OBJECT(name, field) {name, T_OBJECT_EX, offsetof(Scope, field), 0, NULL}
static PyMemberDef scope_members[] = {
    {"_state", T_INT, offsetof(Scope, state), 0, NULL},
    {"depth", T_INT, offsetof(Scope, depth), 0, NULL},
    {"_offset", T_LONGLONG, offsetof(Scope, offset), 0, NULL},
    {"start_ns", T_LONGLONG, offsetof(Scope, start_ns), 0, NULL},
    {"end_ns", T_LONGLONG, offsetof(Scope, end_ns), 0, NULL},
    {"last_ns", T_LONGLONG, offsetof(Scope, last_ns), 0, NULL},
    {"ops", T_LONGLONG, offsetof(Scope, ops), 0, NULL},
    {"more_marks", T_LONGLONG, offsetof(Scope, more_marks), 0, NULL},
    {"thread_id", T_ULONGLONG, offsetof(Scope, thread_id), 0, NULL},
    OBJECT("_rec", rec),
    OBJECT("name", name),
    OBJECT("index", index),
    OBJECT("attrs", attrs),
    OBJECT("clean", clean),
    OBJECT("marks", marks),
    OBJECT("extra", extra),
    OBJECT("ctx", ctx),
    {"id", T_OBJECT, offsetof(Scope, id), 0, NULL}, /* None until the scope is opened */
    OBJECT("above", above),
    OBJECT("trace", trace),
    OBJECT("otel", otel),
    OBJECT("prev", prev),
    {"iteration", T_OBJECT, offsetof(Scope, iteration), 0, NULL},
    {NULL}
};
#undef OBJECT

static PyTypeObject ScopeType;

#define EACH_OBJECT(DO)                                                                            \
    DO(self->rec); DO(self->name); DO(self->index); DO(self->attrs); DO(self->clean);              \
    DO(self->marks); DO(self->extra); DO(self->ctx); DO(self->id); DO(self->above);                \
    DO(self->trace); DO(self->otel); DO(self->prev); DO(self->iteration)

static int
scope_traverse(Scope *self, visitproc visit, void *arg)
{
    EACH_OBJECT(Py_VISIT);
    return 0;
}

static int
scope_clear(Scope *self)
{
    EACH_OBJECT(Py_CLEAR);
    return 0;
}

static void
scope_dealloc(Scope *self)
{
    PyObject_GC_UnTrack(self);
    scope_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static void
put(PyObject **field, PyObject *value) /* steals value */
{
    PyObject *before = *field;
    *field = value;
    Py_XDECREF(before);
}

static PyObject *
more(PyObject *object)
{
    Py_INCREF(object);
    return object;
}

static int
scope_init(Scope *self, PyObject *args, PyObject *kwargs)
{
    PyObject *rec, *name, *index, *attrs;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "a scope takes its four arguments by position");
        return -1;
    }
    if (!PyArg_UnpackTuple(args, "Scope", 4, 4, &rec, &name, &index, &attrs)) {
        return -1;
    }
    put(&self->rec, more(rec));
    put(&self->name, more(name));
    put(&self->index, more(index));
    put(&self->attrs, more(attrs));
    put(&self->clean, more(Py_None));
    put(&self->marks, more(Py_None));
    put(&self->extra, more(Py_None));
    put(&self->ctx, more(Py_None));
    self->ops = self->more_marks = 0;
    self->state = NEW;
    return 0;
}

static int
monotonic(Clock *clock, long long *out)
{
    PyObject *read = clock->monotonic_ns;
    if (read == NULL) {
        PyErr_SetString(PyExc_AttributeError, "monotonic_ns");
        return -1;
    }
#ifdef __linux__
    struct timespec now;
    if (read == system_clock && clock_gettime(CLOCK_MONOTONIC, &now) == 0) {
        *out = now.tv_sec * 1000000000ll + now.tv_nsec; /* what it would have said */
        return 0;
    }
#endif
    Py_INCREF(clock); /* the call may take both away */
    Py_INCREF(read);
    PyObject *value = PyObject_CallNoArgs(read);
    Py_DECREF(read);
    Py_DECREF(clock);
    if (value == NULL) {
        return -1;
    }
    *out = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

/* The last of a list, taken off it; NULL when it is empty. */
static PyObject *
take_last(PyObject *list)
{
    Py_ssize_t left = PyList_GET_SIZE(list);
    if (left == 0) {
        return NULL;
    }
    PyObject *last = PyList_GET_ITEM(list, left - 1);
    Py_SET_SIZE(list, left - 1); /* list.pop() without the call, as generated code does it, too */
    return last;
}

/* A spool id: the next span id of the recorder, and the low half of the trace id. */
static PyObject *
new_id(Recorder *rec, Trace *trace)
{
    PyObject *half = take_last(rec->span_ids);
    if (half == NULL) {
        half = PyObject_CallMethodNoArgs((PyObject *)rec, s_next_span_id);
        if (half == NULL) {
            return NULL;
        }
    }
    if (trace->low == NULL) { /* what was called may have done anything */
        Py_DECREF(half);
        PyErr_SetString(PyExc_AttributeError, "the trace has lost its id");
        return NULL;
    }
    PyObject *whole = PyUnicode_Concat(half, trace->low);
    Py_DECREF(half);
    return whole;
}

/* The context below `context` where `span` and `scope` are the current ones. */
static PyObject *
new_context(PyObject *context, PyObject *span, PyObject *scope)
{
    PyTypeObject *type = (PyTypeObject *)C.context_type;
    PyObject *made = type->tp_new == PyDict_Type.tp_new && type->tp_init == PyDict_Type.tp_init
        ? type->tp_new(type, C.empty, NULL) /* there is nothing to begin with */
        : PyObject_CallNoArgs(C.context_type);
    if (made == NULL) {
        return NULL;
    }
    if ((PyDict_GET_SIZE(context) != 2 && PyDict_Update(made, context) < 0)
        || PyDict_SetItem(made, C.span_key, span) < 0
        || PyDict_SetItem(made, C.scope_key, scope) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}

static int
attach(PyObject *context)
{
#if PY_VERSION_HEX < 0x030C0000
    /* Up to 3.11 the collector may run inside the setting, and a finalizer that sets a variable, too,
       would take away the values that are being copied. Nobody can see that it is off: the setting
       calls nobody's code, and what was set before lives on in the token. */
    int collects = PyGC_Disable();
#endif
    PyObject *token = PyContextVar_Set(C.variable, context);
#if PY_VERSION_HEX < 0x030C0000
    if (collects) {
        PyGC_Enable();
    }
#endif
    Py_XDECREF(token);
    return token == NULL ? -1 : 0;
}

/* 1: opened, 0: not the short way, nothing has happened, -1: error */
static int
open_here(Scope *self, PyObject *start_ns, PyObject *iteration, double reserve)
{
    PyObject *context = NULL, *id = NULL, *made = NULL;
    long long start = 0;
    int result = -1;

    Recorder *rec = usable(self->rec);
    if (rec == NULL || rec->busy) {
        return 0;
    }
    if (self->state != NEW) {
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
    if (found == NULL || !is_a(found, &ScopeType, &seen_scope)) {
        Py_DECREF(context);
        return PyErr_Occurred() ? -1 : 0;
    }
    Scope *parent = (Scope *)found; /* the context holds it */
    Trace *trace = (Trace *)parent->trace;
    if (parent->state != OPEN || parent->ctx != context || parent->depth >= C.max_depth
        || trace == NULL || !is_a((PyObject *)trace, &TraceType, &seen_trace)) {
        Py_DECREF(context);
        return 0;
    }
    if ((double)trace->count >= trace->limit - reserve) {
        trace = (Trace *)trace->window;
        if (trace == NULL || !is_a((PyObject *)trace, &TraceType, &seen_trace)
            || (double)trace->count >= trace->limit - reserve) {
            Py_DECREF(context);
            return 0;
        }
    }
    PyObject *otel = (PyObject *)trace == parent->trace ? trace->otel : trace->child_otel;
    if (iteration == NULL) {
        iteration = parent->iteration;
    }
    if (otel == NULL || trace->low == NULL || iteration == NULL) {
        Py_DECREF(context);
        return 0;
    }
    Clock *clock = (Clock *)more(rec->clock);
    Py_INCREF(rec); /* what is called below may do anything */
    Py_INCREF(trace);
    Py_INCREF(otel);
    Py_INCREF(iteration);
    if ((id = new_id(rec, trace)) == NULL
        || (made = new_context(context, (PyObject *)self, (PyObject *)self)) == NULL) {
        goto done;
    }
    if (start_ns != NULL) {
        start = PyLong_AsLongLong(start_ns);
        if (start == -1 && PyErr_Occurred()) {
            goto done;
        }
    }
    put(&self->id, more(id));
    put(&self->trace, more((PyObject *)trace));
    put(&self->otel, more(otel));
    put(&self->above, more((PyObject *)parent));
    put(&self->iteration, more(iteration));
    put(&self->prev, more(context));
    self->depth = parent->depth + 1;
    self->thread_id = PyThread_get_thread_ident();
    self->offset = clock->offset_ns;
    if (start_ns == NULL) {
        if (monotonic(clock, &start) < 0) {
            goto done;
        }
        start += self->offset;
    }
    self->start_ns = self->last_ns = start;
    if (attach(made) < 0) {
        goto done;
    }
    put(&self->ctx, more(made));
    trace->count++;
    if ((PyObject *)trace != parent->trace) {
        put(&trace->last, more((PyObject *)self));
    }
    self->state = OPEN;
    result = rec->open == NULL || PyDict_SetItem(rec->open, id, (PyObject *)self) < 0 ? -1 : 1;
done:
    Py_XDECREF(made);
    Py_XDECREF(id);
    Py_DECREF(iteration);
    Py_DECREF(otel);
    Py_DECREF(trace);
    Py_DECREF(rec);
    Py_DECREF(clock);
    Py_DECREF(context);
    return result;
}

/* Whether a value can be written as it is, and never changes. */
static int
is_simple(PyObject *value)
{
    if (value == Py_None || PyBool_Check(value)) {
        return 1;
    }
    if (PyUnicode_CheckExact(value)) {
        return PyUnicode_IS_ASCII(value) && PyUnicode_GET_LENGTH(value) <= 4096;
    }
    if (PyFloat_CheckExact(value)) {
        double real = PyFloat_AS_DOUBLE(value);
        return real - real == 0.0; /* neither NaN nor infinite */
    }
    if (PyLong_CheckExact(value)) {
        int overflow;
        (void)PyLong_AsLongLongAndOverflow(value, &overflow);
        return !overflow;
    }
    return 0;
}

/* The attributes as the row may keep them: new reference; NULL without error: not the short way. */
static PyObject *
row_attrs(Scope *self)
{
    PyObject *attrs = self->attrs, *key, *value;
    Py_ssize_t at = 0;
    if (attrs == NULL || !PyDict_CheckExact(attrs)) {
        return NULL;
    }
    if (PyDict_GET_SIZE(attrs) == 0) {
        return more(C.no_attrs);
    }
    if (attrs == self->clean) {
        return more(attrs);
    }
    while (PyDict_Next(attrs, &at, &key, &value)) {
        if (!PyUnicode_CheckExact(key) || !is_simple(key) || !is_simple(value)) {
            return NULL;
        }
    }
    return PyDict_Copy(attrs);
}

/* Whether a row's field of 64 bits can hold it. */
static int
is_number(PyObject *value)
{
    int overflow;
    if (!PyLong_CheckExact(value)) {
        return 0;
    }
    (void)PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow;
}

/* Whether all is there that a row is made of: a user may have set or deleted an attribute. */
static int
is_whole(Scope *self)
{
    return self->id != NULL && self->name != NULL && PyUnicode_CheckExact(self->name)
        && self->index != NULL && (self->index == Py_None || is_number(self->index))
        && self->iteration != NULL
        && (self->iteration == C.unset || is_number(self->iteration))
        && self->otel != NULL;
}

/* The `otel` object of rows in a trace, as JSON: borrowed; NULL without error: not as text. */
static PyObject *
otel_json(Trace *trace, PyObject *otel)
{
    if (trace == NULL || !is_a((PyObject *)trace, &TraceType, &seen_trace)) {
        return NULL;
    }
    int slot = otel == trace->child_otel;
    if (otel != trace->otel_of[slot]) {
        PyObject *made = json_of(otel);
        if (made == NULL) {
            return NULL;
        }
        put(&trace->json_of[slot], made);
        put(&trace->otel_of[slot], more(otel));
    }
    return trace->json_of[slot];
}

typedef struct {
    PyObject *id, *name, *parent, *index, *attrs, *marks, *iteration, *otel;
    Trace *trace;
    long long start_ns, end_ns;
    unsigned long long thread_id;
} Row;

/* Where a span was recorded: mostly where the last one was. */
static char *
put_place(char *to, unsigned long long thread_id, long long pid, long long rank)
{
    static char text[96];
    static size_t length;
    static unsigned long long of_thread;
    static long long of_pid, of_rank;
    if (!length || thread_id != of_thread || pid != of_pid || rank != of_rank) {
        char *end = PUT(text, ",\"thread_id\":");
        end = put_natural(end, thread_id);
        end = PUT(end, ",\"pid\":");
        end = put_number(end, pid);
        end = PUT(end, ",\"rank\":");
        end = put_number(end, rank);
        length = (size_t)(end - text);
        of_thread = thread_id;
        of_pid = pid;
        of_rank = rank;
    }
    memcpy(to, text, sizeof(text)); /* there is room, and a known size is no call */
    return to + length;
}

/* Writes the row of a span as text. 1: written, 0: not this way, nothing has happened, -1: error */
static int
write_span(Recorder *rec, const Row *row)
{
    Attrs attrs;
    Text id, name, parent, mark;
    Number index, iteration, pid, rank;
    int result = 0;

    if (rec->span_rows == NULL || !Py_IS_TYPE(rec->span_rows, &RowBufferType)) {
        return 0;
    }
    PyObject *otel = otel_json(row->trace, row->otel);
    if (otel == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    RowBuffer *rows = (RowBuffer *)more(rec->span_rows);
    int known = attrs_of(row->attrs, &attrs);
    if (known <= 0) {
        result = known;
        goto done;
    }
    Py_ssize_t count = row->marks != NULL && PyList_CheckExact(row->marks)
        ? PyList_GET_SIZE(row->marks) : 0;
    if (!text_of(row->id, &id) || !text_of(row->name, &name) || !text_of(row->parent, &parent)
        || !number_of(row->index, Py_None, &index) || !number_of(row->iteration, C.unset, &iteration)
        || !number_of(rec->pid, NULL, &pid) || !number_of(rec->rank, NULL, &rank)
        || count > C.max_mark_ids) {
        goto done;
    }
    /* 640: what is always there, with nine numbers of 20 digits, and what is copied beyond */
    char *to = buffer_reserve(rows, 640 + text_room(&id) + text_room(&name) + text_room(&parent)
        + attrs.room + PyBytes_GET_SIZE(otel) + 35 * count);
    if (to == NULL) {
        result = -1;
        goto done;
    }
    to = PUT(to, "{\"id\":\"");
    to = put_text(to, &id);
    to = PUT(to, "\",\"name\":\"");
    to = put_text(to, &name);
    to = PUT(to, "\",\"parent_id\":\"");
    to = put_text(to, &parent);
    to = PUT(to, "\",\"index\":");
    to = index.is_there ? put_number(to, index.value) : PUT(to, "null");
    to = PUT(to, ",\"start_ns\":");
    to = put_time(to, row->start_ns);
    to = PUT(to, ",\"end_ns\":");
    to = put_time(to, row->end_ns);
    to = PUT(to, ",\"cpu_ns\":null,\"gpu_ns\":null,\"memory_peak_bytes\":null");
    to = put_place(to, row->thread_id, pid.value, rank.value);
    to = PUT(to, ",\"attrs\":");
    to = put_attrs(to, &attrs);
    to = PUT(to, ",\"mark_ids\":[");
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!text_of(PyList_GET_ITEM(row->marks, i), &mark) || !mark.plain || mark.size != 32) {
            goto done; /* what was not committed was not written */
        }
        if (i) {
            *to++ = ',';
        }
        *to++ = '"';
        memcpy(to, mark.at, 32);
        to += 32;
        *to++ = '"';
    }
    *to++ = ']';
    if (iteration.is_there) {
        to = PUT(to, ",\"iteration\":");
        to = put_number(to, iteration.value);
    }
    to = PUT(to, ",\"otel\":");
    to = put_json(to, otel);
    *to++ = '}';
    buffer_commit(rows, to);
    result = 1;
done:
    Py_XDECREF(attrs.json);
    Py_DECREF(rows);
    return result;
}

/* The row of a scope that ended the short way. 1: written, 0: not as text, -1: error */
static int
write_row(Scope *self, Scope *above, Recorder *rec)
{
    PyObject *attrs = self->attrs, *key, *value;
    Py_ssize_t at = 0;
    if (self->more_marks || !is_whole(self) || attrs == NULL || !PyDict_CheckExact(attrs)) {
        return 0;
    }
    while (PyDict_Next(attrs, &at, &key, &value)) { /* to encode these calls nobody's code */
        if (!PyUnicode_CheckExact(key) || !is_simple(key) || !is_simple(value)) {
            return 0;
        }
    }
    Row row = {self->id, self->name, above->id, self->index, attrs, self->marks, self->iteration,
               self->otel, (Trace *)self->trace, self->start_ns, self->end_ns, self->thread_id};
    return write_span(rec, &row);
}

static PyObject *
new_row(Scope *self, Scope *above, Recorder *rec)
{
    PyObject *row = NULL, *marks = NULL, *start = NULL, *end = NULL, *thread = NULL;
    PyObject *attrs = self->more_marks || !is_whole(self) || above->id == NULL
        || rec->pid == NULL || rec->rank == NULL ? NULL : row_attrs(self);
    if (attrs == NULL) {
        if (PyErr_Occurred() || (end = PyLong_FromLongLong(self->end_ns)) == NULL) {
            return NULL;
        }
        row = PyObject_CallMethodOneArg((PyObject *)self, s_row, end);
        Py_DECREF(end);
        return row;
    }
    marks = self->marks != NULL && PyList_CheckExact(self->marks)
        ? PyList_AsTuple(self->marks) : more(C.empty);
    if (marks != NULL && marks != C.empty) {
        PyObject_GC_UnTrack(marks); /* it holds text only: nothing for the collector to look at */
    }
    if (marks != NULL
        && (start = PyLong_FromLongLong(self->start_ns)) != NULL
        && (end = PyLong_FromLongLong(self->end_ns)) != NULL
        && (thread = PyLong_FromUnsignedLongLong(self->thread_id)) != NULL) {
        PyObject *fields[] = {
            self->id, self->name, above->id, self->index, start, end, Py_None, Py_None, Py_None,
            thread, rec->pid, rec->rank, attrs, marks, C.unset, self->iteration, C.unset, self->otel,
        };
        row = PyObject_Vectorcall(C.span_record, fields, sizeof(fields) / sizeof(*fields), NULL);
    }
    Py_XDECREF(thread);
    Py_XDECREF(end);
    Py_XDECREF(start);
    Py_XDECREF(marks);
    Py_DECREF(attrs);
    return row;
}

/* The first row of a process replaces the function that takes it: keep it alive meanwhile. */
static PyObject *
hand(PyObject *append, PyObject *row)
{
    if (append == NULL) {
        PyErr_SetString(PyExc_AttributeError, "the recorder takes no rows");
        return NULL;
    }
    Py_INCREF(append);
    PyObject *done = PyObject_CallOneArg(append, row);
    Py_DECREF(append);
    return done;
}

/* A number as 16 hex digits, written to `to`: half bytes spread over bytes, eight at a time. */
static void
put_hex(char *to, unsigned long long number)
{
    for (int at = 0; at < 16; at += 8, number <<= 32) {
        unsigned long long x = number >> 32, more_than_nine;
        x = ((x & 0xffff0000ull) << 16) | (x & 0xffffull);
        x = ((x & 0x0000ff000000ff00ull) << 8) | (x & 0x000000ff000000ffull);
        x = ((x & 0x00f000f000f000f0ull) << 4) | (x & 0x000f000f000f000full);
        more_than_nine = ((x + 0x0606060606060606ull) >> 4) & 0x0101010101010101ull;
        x += 0x3030303030303030ull + more_than_nine * ('a' - '0' - 10);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        x = __builtin_bswap64(x);
        memcpy(to + at, &x, 8);
#else
        for (int i = 0; i < 8; i++) {
            to[at + i] = (char)(x >> (56 - 8 * i));
        }
#endif
    }
}

/* hex_ids(random, size): the bytes as texts of 2 * size lowercase hex digits each, none all zero. */
static PyObject *
hex_ids(PyObject *Py_UNUSED(module), PyObject *args)
{
    const unsigned char *random;
    Py_ssize_t length, size;
    if (!PyArg_ParseTuple(args, "y#n", &random, &length, &size)) {
        return NULL;
    }
    if (size < 8 || size % 8 || length % size) {
        PyErr_SetString(PyExc_ValueError, "the bytes must be so many ids of 8 or 16");
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (Py_ssize_t at = 0; list != NULL && at < length; at += size) {
        PyObject *id = PyUnicode_New(2 * size, 127);
        if (id == NULL) {
            Py_CLEAR(list);
            break;
        }
        unsigned long long any = 0;
        for (Py_ssize_t i = 0; i < size; i += 8) {
            unsigned long long number = 0;
            for (int byte = 0; byte < 8; byte++) {
                number = number << 8 | random[at + i + byte];
            }
            put_hex((char *)PyUnicode_1BYTE_DATA(id) + 2 * i, number);
            any |= number;
        }
        if (any && PyList_Append(list, id) < 0) {
            Py_CLEAR(list);
        }
        Py_DECREF(id);
    }
    return list;
}

/* A mark's id, where the event that shows it tells it: half the scope's id, and the time. */
static PyObject *
id_from_time(PyObject *owner, long long ts_ns)
{
    if (!PyUnicode_IS_ASCII(owner) || PyUnicode_GET_LENGTH(owner) < 16) {
        PyErr_SetString(PyExc_ValueError, "a scope's id has 32 hex digits");
        return NULL;
    }
    PyObject *id = PyUnicode_New(32, 127);
    if (id != NULL) {
        char *to = (char *)PyUnicode_1BYTE_DATA(id);
        memcpy(to, PyUnicode_1BYTE_DATA(owner), 16);
        put_hex(to + 16, (unsigned long long)ts_ns);
    }
    return id;
}

static int
note_mark(Scope *scope, PyObject *id)
{
    if (scope->marks == Py_None) {
        PyObject *list = PyList_New(1);
        if (list == NULL) {
            return -1;
        }
        PyList_SET_ITEM(list, 0, more(id));
        put(&scope->marks, list);
        return 0;
    }
    if (PyList_CheckExact(scope->marks) && PyList_GET_SIZE(scope->marks) < C.max_mark_ids) {
        return PyList_Append(scope->marks, id);
    }
    scope->more_marks++;
    return 0;
}

static PyObject *
new_mark_id(Recorder *rec)
{
    PyObject *id = take_last(rec->mark_ids);
    return id != NULL ? id : PyObject_CallMethodNoArgs((PyObject *)rec, s_next_mark_id);
}

/* In _joined.h: shows a mark that is a finite number and a point on the OTel span. */
static int is_joined(Scope *scope);
static PyObject *show_mark(Scope *scope, PyObject *name, PyObject *value, PyObject *ts_ns,
                           PyObject *record);

/* Writes a mark as text. 1: written, 0: not this way, nothing has happened, -1: error */
static int
write_mark_text(Recorder *rec, Scope *scope, PyObject *id, PyObject *name, PyObject *kind,
                PyObject *value, PyObject *attrs, long long ts_ns)
{
    PyObject *json = NULL;
    Attrs said;
    Text mark, owner, what;
    Number whole = {0}, iteration;
    int result = 0;

    if (rec->mark_rows == NULL || !Py_IS_TYPE(rec->mark_rows, &RowBufferType)) {
        return 0;
    }
    RowBuffer *rows = (RowBuffer *)more(rec->mark_rows);
    said.json = NULL;
    char brief[MAX_BRIEF];
    Py_ssize_t briefly = PyFloat_CheckExact(value)
        ? put_brief(brief, PyFloat_AS_DOUBLE(value)) - brief : 0;
    if (!briefly && !number_of(value, NULL, &whole) && (json = json_of(value)) == NULL) {
        result = PyErr_Occurred() ? -1 : 0;
        goto done;
    }
    int known = attrs_of(attrs, &said);
    if (known <= 0) {
        result = known;
        goto done;
    }
    if (!made_text(id, &mark) || !text_of(scope->id, &owner) || !text_of(name, &what)
        || !number_of(scope->iteration, C.unset, &iteration)) {
        goto done;
    }
    char *to = buffer_reserve(rows, 352 + text_room(&mark) + text_room(&owner) + text_room(&what)
        + (json == NULL ? 0 : PyBytes_GET_SIZE(json)) + said.room);
    if (to == NULL) {
        result = -1;
        goto done;
    }
    to = PUT(to, "{\"id\":\"");
    to = put_text(to, &mark);
    to = PUT(to, "\",\"span_id\":\"");
    to = put_text(to, &owner);
    to = PUT(to, "\",\"name\":\"");
    to = put_text(to, &what);
    to = kind == s_float ? PUT(to, "\",\"value_type\":\"float\",\"value\":")
        : PUT(to, "\",\"value_type\":\"int\",\"value\":");
    if (briefly) {
        memcpy(to, brief, (size_t)briefly);
        to += briefly;
    } else {
        to = json == NULL ? put_number(to, whole.value) : put_json(to, json);
    }
    to = PUT(to, ",\"attrs\":");
    to = put_attrs(to, &said);
    to = PUT(to, ",\"ts_ns\":");
    to = put_time(to, ts_ns);
    to = PUT(to, ",\"kind\":\"point\"");
    if (iteration.is_there) {
        to = PUT(to, ",\"iteration\":");
        to = put_number(to, iteration.value);
    }
    *to++ = '}';
    buffer_commit(rows, to);
    result = 1;
done:
    Py_XDECREF(json);
    Py_XDECREF(said.json);
    Py_DECREF(rows);
    return result;
}

static int
write_mark(Recorder *rec, Scope *scope, PyObject *id, PyObject *name, PyObject *kind,
           PyObject *value, PyObject *attrs, long long ts_ns, int shown)
{
    PyObject *record = NULL, *done = NULL;
    if (scope->id == NULL || scope->iteration == NULL || scope->marks == NULL) {
        PyErr_SetString(PyExc_AttributeError, "the scope has lost an attribute");
        return -1;
    }
    if (note_mark(scope, id) < 0) {
        return -1;
    }
    /* Whoever shows it may want the record, but for a span of the application's tracer. */
    int written = shown && !is_joined(scope)
        ? 0 : write_mark_text(rec, scope, id, name, kind, value, attrs, ts_ns);
    if (written < 0 || (written && !shown)) {
        return written < 0 ? -1 : 0;
    }
    PyObject *ts = PyLong_FromLongLong(ts_ns);
    if (ts != NULL && written) {
        done = show_mark(scope, name, value, ts, NULL);
    } else if (ts != NULL && scope->id != NULL && scope->iteration != NULL) {
        PyObject *fields[] = {
            id, scope->id, name, kind, value, attrs, ts, s_point, scope->iteration,
        };
        record = PyObject_Vectorcall(C.mark_record, fields, sizeof(fields) / sizeof(*fields), NULL);
    }
    if (record != NULL && (done = hand(rec->append_mark, record)) != NULL && shown) {
        Py_DECREF(done);
        done = show_mark(scope, name, value, ts, record);
    }
    Py_XDECREF(record);
    Py_XDECREF(ts);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* marks.overhead_mark: what recording the children took, by the sampled cost of one. */
static int
say_overhead(Scope *self, Recorder *rec)
{
    if (rec->overhead_ns == 0.0) {
        return 0;
    }
    long long cost = (long long)((double)self->ops * rec->overhead_ns);
    long long length = self->end_ns - self->start_ns;
    cost = cost < length ? cost : (length > 0 ? length : 0);
    PyObject *id = new_mark_id(rec), *value = PyLong_FromLongLong(cost);
    int result = id == NULL || value == NULL
        ? -1
        : write_mark(rec, self, id, C.overhead, s_int, value, C.estimated, self->end_ns, 0);
    Py_XDECREF(value);
    Py_XDECREF(id);
    return result;
}

/* 1: closed, 0: not the short way, nothing has happened, -1: error */
static int
close_here(Scope *self)
{
    PyObject *context = NULL, *row = NULL, *done = NULL;
    long long now;
    int result = -1;

    Scope *above = (Scope *)self->above;
    Recorder *rec = usable(self->rec);
    if (self->state != OPEN || self->extra != Py_None || rec == NULL || rec->busy || above == NULL
        || !is_a((PyObject *)above, &ScopeType, &seen_scope) || above->state != OPEN
        || above->id == NULL || self->prev == NULL || !is_whole(self)) {
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
    PyObject *before = more(self->prev), *id = more(self->id), *open = more(rec->open);
    Py_INCREF(above); /* what is called below may do anything */
    Py_INCREF(rec);
    if (monotonic((Clock *)rec->clock, &now) < 0 || attach(before) < 0) {
        goto done;
    }
    self->state = ENDED;
    self->end_ns = now + self->offset;
    put(&self->ctx, more(C.gone));
    above->last_ns = self->end_ns;
    above->ops += self->ops + 1;
    if (self->ops && say_overhead(self, rec) < 0) {
        goto done;
    }
    int written = write_row(self, above, rec);
    if (written < 0
        || (written == 0 && ((row = new_row(self, above, rec)) == NULL
                             || (done = hand(rec->append_span, row)) == NULL))
        || PyDict_DelItem(open, id) < 0) {
        goto done;
    }
    result = 1;
done:
    Py_XDECREF(done);
    Py_XDECREF(row);
    Py_DECREF(before);
    Py_DECREF(id);
    Py_DECREF(open);
    Py_DECREF(rec);
    Py_DECREF(above);
    return result;
}

/* Hands an Exception that is set to the guard; -1 with it (or what the guard raises) still set. */
static int
swallow(Scope *self, PyObject *place)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
    if (self->rec == NULL) { /* deleted, or __init__ was never called: there is no guard */
        PyErr_Restore(type, error, traceback);
        return -1;
    }
    PyObject *guard = PyObject_GetAttr(self->rec, s_guard);
    PyObject *done = guard == NULL
        ? NULL : PyObject_CallMethodObjArgs(guard, s_swallow, place, error, NULL);
    Py_XDECREF(guard);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Hands an Exception that is set to the guard of a recorder; -1: it is still set. */
static int
swallow_for(PyObject *rec, PyObject *place)
{
    Scope stand_in = {.rec = rec};
    return swallow(&stand_in, place);
}

static PyObject *
scope_enter(Scope *self, PyObject *Py_UNUSED(nothing))
{
    int opened = open_here(self, NULL, NULL, 0.0);
    if (opened == 0) {
        PyObject *done = PyObject_CallMethodNoArgs((PyObject *)self, s_open);
        opened = done == NULL ? -1 : 1;
        Py_XDECREF(done);
    }
    if (opened < 0 && swallow(self, s_enter) < 0) {
        return NULL;
    }
    return more((PyObject *)self);
}

static PyObject *
scope_exit(Scope *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "__exit__ takes exactly three arguments");
        return NULL;
    }
    int closed = args[1] == Py_None && args[0] == Py_None ? close_here(self) : 0;
    if (closed == 0) {
        PyObject *done = PyObject_CallMethodObjArgs(
            (PyObject *)self, s_leave, args[0], args[1], args[2], NULL);
        closed = done == NULL ? -1 : 1;
        Py_XDECREF(done);
    }
    if (closed < 0 && swallow(self, s_exit) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
scope_open_here(Scope *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "open_here takes start_ns, iteration and reserve");
        return NULL;
    }
    double reserve = PyFloat_AsDouble(args[2]);
    if (reserve == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    int opened = open_here(self, args[0] == Py_None ? NULL : args[0],
                           args[1] == Py_None ? NULL : args[1], reserve);
    return opened < 0 ? NULL : PyBool_FromLong(opened);
}

/* open_in(parent, trace, otel, attach): open under `parent` at the beginning of `trace`, the short
   way; current only where it is to be attached. */
static PyObject *
scope_open_in(Scope *self, PyObject *const *args, Py_ssize_t count)
{
    PyObject *context = NULL, *id = NULL, *made = NULL;
    long long start = 0;
    int done = 0;

    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "open_in takes parent, trace, otel and attach");
        return NULL;
    }
    Recorder *rec = usable(self->rec);
    Scope *parent = (Scope *)args[0];
    Trace *trace = (Trace *)args[1];
    int attached = args[3] == Py_True;
    if (rec == NULL || rec->busy || self->state != NEW
        || !PyObject_TypeCheck(args[0], &ScopeType) || !PyObject_TypeCheck(args[1], &TraceType)
        || parent->state != OPEN || parent->depth >= C.max_depth || parent->iteration == NULL
        || trace->low == NULL) {
        Py_RETURN_FALSE;
    }
    if (PyContextVar_Get(C.variable, NULL, &context) < 0) {
        return NULL;
    }
    if (context == NULL || !PyDict_Check(context)
        || (PyDict_GET_SIZE(context) && parent->ctx != context)) {
        Py_XDECREF(context);
        Py_RETURN_FALSE;
    }
    Clock *clock = (Clock *)more(rec->clock);
    Py_INCREF(rec); /* what is called below may do anything; the caller holds the others */
    if ((id = new_id(rec, trace)) == NULL || monotonic(clock, &start) < 0
        || (attached && (made = new_context(context, (PyObject *)self, (PyObject *)self)) == NULL)) {
        goto done;
    }
    put(&self->id, more(id));
    put(&self->trace, more((PyObject *)trace));
    put(&self->otel, more(args[2]));
    put(&self->above, more((PyObject *)parent));
    put(&self->iteration, parent->iteration == NULL ? more(C.unset) : more(parent->iteration));
    self->depth = parent->depth + 1;
    self->thread_id = PyThread_get_thread_ident();
    self->offset = clock->offset_ns;
    self->start_ns = self->last_ns = start + self->offset;
    if (attached) {
        put(&self->prev, more(context));
        if (attach(made) < 0) {
            goto done;
        }
        put(&self->ctx, more(made));
    }
    trace->count++;
    self->state = OPEN;
    done = rec->open != NULL && PyDict_SetItem(rec->open, id, (PyObject *)self) == 0;
done:
    Py_XDECREF(made);
    Py_XDECREF(id);
    Py_DECREF(rec);
    Py_DECREF(clock);
    Py_DECREF(context);
    if (!done) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_AttributeError, "open");
        }
        return NULL;
    }
    Py_RETURN_TRUE;
}

/* A child that is over already, the short way: True, or False and nothing has happened. */
static PyObject *
scope_add_here(Scope *self, PyObject *const *args, Py_ssize_t count)
{
    PyObject *id, *thread = NULL, *row = NULL, *done = NULL;

    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "add_here takes name, start_ns and end_ns");
        return NULL;
    }
    Recorder *rec = usable(self->rec);
    Trace *trace = (Trace *)self->trace;
    if (rec == NULL || rec->busy || self->state != OPEN || self->id == NULL
        || self->iteration == NULL || trace == NULL
        || !is_a((PyObject *)trace, &TraceType, &seen_trace)
        || (double)trace->count >= trace->limit || trace->low == NULL || trace->otel == NULL) {
        Py_RETURN_FALSE;
    }
    long long end = PyLong_AsLongLong(args[2]);
    if ((end == -1 && PyErr_Occurred()) || (id = new_id(rec, trace)) == NULL) {
        return NULL;
    }
    long long start = PyLong_AsLongLong(args[1]);
    if (start == -1 && PyErr_Occurred()) {
        Py_DECREF(id);
        return NULL;
    }
    Row text = {id, args[0], self->id, Py_None, C.no_attrs, NULL, self->iteration, trace->otel,
                trace, start, end, self->thread_id};
    int written = write_span(rec, &text);
    if (written > 0) {
        done = more(Py_None);
    } else if (written == 0 && (thread = PyLong_FromUnsignedLongLong(self->thread_id)) != NULL) {
        PyObject *fields[] = {
            id, args[0], self->id, Py_None, args[1], args[2], Py_None, Py_None, Py_None, thread,
            rec->pid, rec->rank, C.no_attrs, C.empty, C.unset, self->iteration, C.unset,
            trace->otel,
        };
        row = PyObject_Vectorcall(C.span_record, fields, sizeof(fields) / sizeof(*fields), NULL);
    }
    if (row != NULL) {
        done = hand(rec->append_span, row);
    }
    if (done != NULL) {
        trace->count++;
        self->ops++;
        self->last_ns = self->last_ns > end ? self->last_ns : end;
    }
    Py_XDECREF(row);
    Py_XDECREF(thread);
    Py_DECREF(id);
    if (done == NULL) {
        return NULL;
    }
    Py_DECREF(done);
    Py_RETURN_TRUE;
}

/* Closes the scope around a call that gave `result` (NULL: it raised); takes and gives `result`. */
static PyObject *
leave_after(Scope *self, PyObject *result)
{
    PyObject *type = NULL, *error = NULL, *traceback = NULL;
    if (result == NULL) {
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback != NULL) {
            PyException_SetTraceback(error, traceback);
        }
    }
    PyObject *how[] = {type != NULL ? type : Py_None, error != NULL ? error : Py_None,
                       traceback != NULL ? traceback : Py_None};
    PyObject *left = scope_exit(self, how, 3);
    if (left == NULL && result != NULL) {
        Py_CLEAR(result);
    } else if (result == NULL && left != NULL) {
        PyErr_Restore(type, error, traceback);
        type = error = traceback = NULL;
    }
    Py_XDECREF(left);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return result;
}

/* around(call, args, kwargs): the call in this scope; its exceptions are recorded and fly on. */
static PyObject *
scope_around(Scope *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyTuple_CheckExact(args[1]) || !PyDict_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "around takes a call, a tuple and a dict");
        return NULL;
    }
    PyObject *entered = scope_enter(self, NULL);
    if (entered == NULL) {
        return NULL;
    }
    Py_DECREF(entered);
    return leave_after(self, PyObject_Call(args[0], args[1], args[2]));
}

static PyMethodDef scope_methods[] = {
    {"around", (PyCFunction)(void (*)(void))scope_around, METH_FASTCALL,
     "around(call, args, kwargs): the call in this scope."},
    {"add_here", (PyCFunction)(void (*)(void))scope_add_here, METH_FASTCALL,
     "Record a child that is over already the short way; says whether it was."},
    {"enter", (PyCFunction)scope_enter, METH_NOARGS, "Open the scope: the with statement's way."},
    {"exit", (PyCFunction)(void (*)(void))scope_exit, METH_FASTCALL, "Close the scope."},
    {"open_in", (PyCFunction)(void (*)(void))scope_open_in, METH_FASTCALL,
     "Open under a parent at the beginning of a trace the short way; says whether it was opened."},
    {"open_here", (PyCFunction)(void (*)(void))scope_open_here, METH_FASTCALL,
     "Open under the current scope the short way; says whether it was opened."},
    {NULL}
};

static PyTypeObject ScopeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._fast.ScopeCore",
    .tp_basicsize = sizeof(Scope),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A scope's fields and its hot path.",
    .tp_traverse = (traverseproc)scope_traverse,
    .tp_clear = (inquiry)scope_clear,
    .tp_dealloc = (destructor)scope_dealloc,
    .tp_members = scope_members,
    .tp_methods = scope_methods,
    .tp_init = (initproc)scope_init,
    .tp_new = PyType_GenericNew,
};

#include "_marks.h"
#include "_joined.h"
#include "_hooks.h"

/* --- module ------------------------------------------------------------------------------------ */

static PyObject *
configure(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *given[11];
    long depth, most;
    if (!PyArg_ParseTuple(args, "OO!UUOOOO!OO!Ull", &given[0], &PyType_Type, &given[1], &given[2],
                          &given[3], &given[4], &given[5], &given[6], &PyDict_Type, &given[7],
                          &given[8], &PyDict_Type, &given[9], &given[10], &depth, &most)) {
        return NULL;
    }
    if (!PyContextVar_CheckExact(given[0])) {
        PyErr_SetString(PyExc_TypeError, "the first argument must be a ContextVar");
        return NULL;
    }
    PyObject **fields[] = {&C.variable, &C.context_type, &C.span_key, &C.scope_key, &C.gone,
                           &C.span_record, &C.mark_record, &C.no_attrs, &C.unset,
                           &C.estimated, &C.overhead};
    for (int i = 0; i < 11; i++) {
        put(fields[i], more(given[i]));
    }
    C.max_depth = depth;
    C.max_mark_ids = most;
    Py_RETURN_NONE;
}

static PyObject *
configure_rows(PyObject *Py_UNUSED(module), PyObject *encode)
{
    put(&encode_value, more(encode));
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"configure", configure, METH_VARARGS,
     "configure(variable, Context, span_key, scope_key, gone, SpanRecord, MarkRecord, no_attrs, "
     "unset, estimated, overhead_name, max_depth, max_mark_ids)"},
#ifndef _WIN32
    {"write_whole", write_whole, METH_VARARGS,
     "write_whole(spare, target, chunks): a new file, whole or not at all; the bytes in it."},
    {"scan_batches", scan_batches, METH_VARARGS,
     "scan_batches(directory, wanted, oldest_tmp): bytes and number of the batch files, bytes of "
     "the .tmp files, how many of these were older and are gone, the first by name with sizes."},
#endif
    {"hex_ids", hex_ids, METH_VARARGS,
     "hex_ids(random, size): the bytes as texts of size bytes in hex each, none all zero."},
    {"configure_rows", configure_rows, METH_O,
     "configure_rows(encode): what makes JSON of attributes and numbers with a point."},
    {"record_number", (PyCFunction)(void (*)(void))record_number, METH_FASTCALL,
     "record_number(rec, name, value): a plain number on the current scope; False: not this way."},
    {"make_mark", make_mark, METH_VARARGS,
     "make_mark(general, namespace, signature): general, but for plain numbers the short way, on "
     "the recorder that lies in the namespace as _current."},
    {"configure_joined", configure_joined, METH_VARARGS,
     "configure_joined(ReadableSpan, INTERNAL, UNSET, index_key, mark_prefix, value_key)"},
    {"nothing", (PyCFunction)(void (*)(void))nothing, METH_FASTCALL | METH_KEYWORDS,
     "nothing(...): a span processor's method that has nothing to do."},
    HOOK_FUNCTIONS,
    {NULL}
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_fast", "The hot path of a scope, compiled.", -1, module_methods,
};

PyMODINIT_FUNC
PyInit__fast(void)
{
    static const struct { PyObject **where; const char *text; } names[] = {
        {&s_next_span_id, "next_span_id"}, {&s_open, "open"},
        {&s_row, "row"},
        {&s_guard, "guard"}, {&s_swallow, "swallow"}, {&s_enter, "scope.enter"},
        {&s_exit, "scope.exit"}, {&s_leave, "leave"}, {&s_next_mark_id, "next_mark_id"},
        {&s_show_number, "show_number"}, {&s_float, "float"},
        {&s_int, "int"}, {&s_point, "point"}, {&s_current, "_current"}, {&s_mark, "mark"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        if ((*names[i].where = PyUnicode_InternFromString(names[i].text)) == NULL) {
            return NULL;
        }
    }
    PyObject *time = PyImport_ImportModule("time");
    if (time == NULL || (system_clock = PyObject_GetAttrString(time, "monotonic_ns")) == NULL) {
        Py_XDECREF(time);
        return NULL;
    }
    Py_DECREF(time);
    if ((C.empty = PyTuple_New(0)) == NULL || PyType_Ready(&ClockType) < 0
        || PyType_Ready(&RecorderType) < 0 || PyType_Ready(&TraceType) < 0
        || PyType_Ready(&ScopeType) < 0 || PyType_Ready(&BlockType) < 0
        || PyType_Ready(&RowBufferType) < 0) {
        return NULL;
    }
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddObjectRef(made, "ClockCore", (PyObject *)&ClockType) < 0
        || PyModule_AddObjectRef(made, "RecorderCore", (PyObject *)&RecorderType) < 0
        || PyModule_AddObjectRef(made, "TraceCore", (PyObject *)&TraceType) < 0
        || PyModule_AddObjectRef(made, "ScopeCore", (PyObject *)&ScopeType) < 0
        || PyModule_AddObjectRef(made, "RowBuffer", (PyObject *)&RowBufferType) < 0
        || ready_joined(made) < 0 || add_hooks(made) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
