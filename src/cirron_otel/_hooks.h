/* Part of _fast.c: what a framework hook does around each call it records, and at each fetch.
 *
 * After the tensor work of a step the caches are cold, and every object and code line that is
 * touched costs as much as a hundred instructions: so one function here does what would be six
 * frames of Python. hooks/torch/calls.py and loops.py say what it does, line by line.
 */

static PyObject *s_training, *s_name,
    *s_optimizer, *s_run, *s_note, *s_here, *s_fetching, *s_owner, *s_dict, *s_fetched,
    *s_counters, *s_iteration, *s_step, *s_data_load, *s_add_closed, *s_open_slowly,
    *s_evaluation, *s_mode, *s_train, *s_eval, *s_qualname;

/* What this thread is in the middle of. The pointers are compared, never followed. */
static _Thread_local struct {
    int depth, in_backward, seen_learning;
    void *stepping, *seen;
    unsigned long seen_by, seen_at, thread;
} here;

/* Threads are numbered, too: their identifiers come again. */
static unsigned long threads_seen;

/* Hooks are numbered, and modules that were told of and have gone are counted: an address may come
   again. */
static unsigned long hooks_made, modules_gone;

/* --- a hook ------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    char active, timed;
    unsigned long number;
    PyObject *rec, *compiling, *compiling_key, *graph_task, *grad_enabled;
} Hook;

#define OBJECT(field) {#field, T_OBJECT_EX, offsetof(Hook, field), 0, NULL}
static PyMemberDef hook_members[] = {
    {"active", T_BOOL, offsetof(Hook, active), 0, NULL},
    {"timed", T_BOOL, offsetof(Hook, timed), 0, NULL},
    OBJECT(rec),
    OBJECT(compiling),
    OBJECT(compiling_key),
    OBJECT(graph_task),
    OBJECT(grad_enabled),
    {NULL}
};
#undef OBJECT

static int
hook_traverse(Hook *self, visitproc visit, void *arg)
{
    Py_VISIT(self->rec);
    Py_VISIT(self->compiling);
    Py_VISIT(self->compiling_key);
    Py_VISIT(self->graph_task);
    Py_VISIT(self->grad_enabled);
    return 0;
}

static int
hook_clear(Hook *self)
{
    Py_CLEAR(self->rec);
    Py_CLEAR(self->compiling);
    Py_CLEAR(self->compiling_key);
    Py_CLEAR(self->graph_task);
    Py_CLEAR(self->grad_enabled);
    return 0;
}

static void
hook_dealloc(Hook *self)
{
    PyObject_GC_UnTrack(self);
    hook_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* 1: what attribute `name` of `object` says is true, 0: it is not, -1: error */
static int
says(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL) {
        return -1;
    }
    int answer = PyObject_IsTrue(value);
    Py_DECREF(value);
    return answer;
}

/* 1: a call that begins now is none to record, 0: it is one, -1: error */
static int
is_silent(Hook *hook)
{
    if (!hook->active || hook->rec == NULL || hook->compiling == NULL
        || hook->compiling_key == NULL || hook->graph_task == NULL) {
        return 1;
    }
    if (!is_a(hook->rec, &RecorderType, &seen_recorder) || !((Recorder *)hook->rec)->active) {
        return 1;
    }
    if (PyDict_CheckExact(hook->compiling)) {
        if (PyDict_GetItemWithError(hook->compiling, hook->compiling_key) != Py_False) {
            return PyErr_Occurred() ? -1 : 1;
        }
    } else {
        PyObject *flag = PyObject_CallNoArgs(hook->compiling);
        int compiling = flag == NULL ? -1 : PyObject_IsTrue(flag);
        Py_XDECREF(flag);
        if (compiling != 0) {
            return compiling;
        }
    }
    PyObject *task = PyObject_CallNoArgs(hook->graph_task);
    if (task == NULL) {
        return -1;
    }
    long number = PyLong_AsLong(task);
    Py_DECREF(task);
    return number == -1 ? (PyErr_Occurred() ? -1 : 0) : 1;
}

static PyObject *
hook_silent(Hook *self, PyObject *Py_UNUSED(nothing))
{
    int silent = is_silent(self);
    return silent < 0 ? NULL : PyBool_FromLong(silent);
}

static PyMethodDef hook_methods[] = {
    {"silent", (PyCFunction)hook_silent, METH_NOARGS,
     "Whether a call that begins now is none to record."},
    {NULL}
};

static PyObject *
hook_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    Hook *self = (Hook *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->number = ++hooks_made;
    }
    return (PyObject *)self;
}

static PyTypeObject HookType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._fast.HookCore",
    .tp_basicsize = sizeof(Hook),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "What a recorded call reads of its hook.",
    .tp_traverse = (traverseproc)hook_traverse,
    .tp_clear = (inquiry)hook_clear,
    .tp_dealloc = (destructor)hook_dealloc,
    .tp_members = hook_members,
    .tp_methods = hook_methods,
    .tp_new = hook_new,
};

/* --- a recorded call --------------------------------------------------------------------------- */

enum { FORWARD, BACKWARD, OPTIMIZER_STEP };

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int what;
    Hook *hook;
    PyObject *name, *original, *method, *dict;
} Call;

static PyMemberDef call_members[] = {
    {"original", T_OBJECT, offsetof(Call, original), READONLY, NULL},
    {NULL}
};

static int
call_traverse(Call *self, visitproc visit, void *arg)
{
    Py_VISIT(self->hook);
    Py_VISIT(self->name);
    Py_VISIT(self->original);
    Py_VISIT(self->method);
    Py_VISIT(self->dict);
    return 0;
}

static int
call_clear(Call *self)
{
    Py_CLEAR(self->hook);
    Py_CLEAR(self->name);
    Py_CLEAR(self->original);
    Py_CLEAR(self->method);
    Py_CLEAR(self->dict);
    return 0;
}

static void
call_dealloc(Call *self)
{
    PyObject_GC_UnTrack(self);
    call_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* A scope of a class of ours, as calling the class makes it. */
static PyObject *
new_scope(PyObject *kind, PyObject *rec, PyObject *name, PyObject *index, PyObject *attrs)
{
    PyTypeObject *type = (PyTypeObject *)kind;
    if (!PyType_Check(kind) || type->tp_init != (initproc)scope_init
        || type->tp_new != PyType_GenericNew) {
        PyObject *args[] = {rec, name, index, attrs};
        return PyObject_Vectorcall(kind, args, 4, NULL);
    }
    Scope *scope = (Scope *)type->tp_alloc(type, 0);
    if (scope != NULL) {
        scope->rec = more(rec);
        scope->name = more(name);
        scope->index = more(index);
        scope->attrs = more(attrs);
        scope->clean = more(Py_None);
        scope->marks = more(Py_None);
        scope->extra = more(Py_None);
        scope->ctx = more(Py_None);
    }
    return (PyObject *)scope;
}

/* What is recorded, without a scope. */
static PyObject *
run_bare(Call *self, PyObject *const *args, size_t given, PyObject *names)
{
    return self->method != NULL && PyVectorcall_NARGS(given)
        ? PyObject_VectorcallMethod(self->method, args, given, names)
        : PyObject_Vectorcall(self->original, args, given, names);
}

/* The call in the scope; its exceptions are recorded and fly on. */
static PyObject *
run_in(Scope *scope, Call *self, PyObject *const *args, size_t given, PyObject *names)
{
    PyObject *entered = scope_enter(scope, NULL);
    if (entered == NULL) {
        return NULL;
    }
    Py_DECREF(entered);
    return leave_after(scope, run_bare(self, args, given, names));
}

/* Tell the hook which module this thread called, and whether in order to learn, where it is news. */
static int
note_module(Hook *hook, PyObject *module, int training)
{
    int learning = 0;
    if (training && hook->grad_enabled != NULL) {
        PyObject *enabled = PyObject_CallNoArgs(hook->grad_enabled);
        learning = enabled == Py_True;
        Py_XDECREF(enabled);
        if (enabled == NULL) {
            return -1;
        }
    }
    if (here.seen == module && here.seen_by == hook->number && here.seen_learning == learning
        && here.seen_at == modules_gone) {
        return 0;
    }
    PyObject *flag = learning ? Py_True : Py_False;
    PyObject *told = PyObject_CallMethodObjArgs((PyObject *)hook, s_note, module, flag, NULL);
    if (told == NULL) {
        return -1;
    }
    Py_DECREF(told);
    here.seen = module;
    here.seen_by = hook->number;
    here.seen_learning = learning;
    here.seen_at = modules_gone;
    return 0;
}

/* What the scope of the call bears: new reference. */
static PyObject *
call_attrs(Call *self, PyObject *const *args)
{
    PyObject *attrs = PyDict_New(), *value = NULL;
    int failed = attrs == NULL;
    if (!failed && self->what == FORWARD) {
        int training = says(args[0], s_training);
        failed = training < 0 || note_module(self->hook, args[0], training) < 0
            || PyDict_SetItem(attrs, s_mode, training ? s_train : s_eval) < 0;
    } else if (!failed && self->what == OPTIMIZER_STEP) {
        value = PyObject_GetAttr((PyObject *)Py_TYPE(args[0]), s_name);
        failed = value == NULL || PyDict_SetItem(attrs, s_optimizer, value) < 0;
    }
    Py_XDECREF(value);
    if (failed) {
        Py_CLEAR(attrs);
    }
    return attrs;
}

/* The scope for a call, by the short way: NULL without error: there is none. */
static Scope *
call_scope(Call *self, PyObject *attrs)
{
    Recorder *rec = usable(self->hook->rec);
    if (rec == NULL || rec->busy || self->hook->timed) {
        return NULL;
    }
    PyObject *kind = rec->quick_kind; /* none while a scope is to be timed */
    if (kind == NULL || kind == Py_None) {
        return NULL;
    }
    Py_INCREF(kind);
    PyObject *scope = new_scope(kind, (PyObject *)rec, self->name, Py_None, attrs);
    Py_DECREF(kind);
    if (scope != NULL && !is_a(scope, &ScopeType, &seen_scope)) {
        Py_CLEAR(scope);
    }
    return (Scope *)scope;
}

/* Phases.run(name, attrs, call, args, kwargs): the general way. */
static PyObject *
run_slowly(Call *self, PyObject *attrs, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    PyObject *result = NULL, *keywords = PyDict_New(), *positional = PyTuple_New(count);
    if (keywords == NULL || positional == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyTuple_SET_ITEM(positional, i, more(args[i]));
    }
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        if (PyDict_SetItem(keywords, PyTuple_GET_ITEM(names, i), args[count + i]) < 0) {
            goto done;
        }
    }
    result = PyObject_CallMethodObjArgs((PyObject *)self->hook, s_run, self->name, attrs,
                                        self->original, positional, keywords, NULL);
done:
    Py_XDECREF(keywords);
    Py_XDECREF(positional);
    return result;
}

static PyObject *
call_vectorcall(Call *self, PyObject *const *args, size_t given, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(given);
    void *before = here.stepping;
    int silent = 1;
    if (self->hook == NULL || self->original == NULL || self->name == NULL) {
        PyErr_SetString(PyExc_AttributeError, "this call was taken apart");
        return NULL;
    }
    if (self->what == FORWARD ? count > 0 && !here.depth
        : self->what == BACKWARD ? !here.in_backward
        : count > 0 && before != args[0]) {
        silent = is_silent(self->hook);
    }
    PyObject *attrs = NULL;
    Scope *scope = NULL;
    if (!silent && (attrs = call_attrs(self, args)) != NULL) {
        scope = call_scope(self, attrs);
    }
    if (PyErr_Occurred() && swallow_for(self->hook->rec, self->name) < 0) {
        Py_XDECREF(attrs);
        return NULL;
    }
    if (silent || attrs == NULL) {
        Py_XDECREF(attrs);
        return run_bare(self, args, given, names);
    }
    Py_INCREF(self); /* the hook may be taken away by what is called */
    if (self->what == FORWARD) {
        here.depth = 1;
    } else if (self->what == BACKWARD) {
        here.in_backward = 1;
    } else {
        here.stepping = args[0];
    }
    PyObject *result;
    if (scope != NULL) {
        put(&scope->clean, more(attrs));
        result = run_in(scope, self, args, given, names);
    } else {
        result = run_slowly(self, attrs, args, count, names);
    }
    if (self->what == FORWARD) {
        here.depth = 0;
    } else if (self->what == BACKWARD) {
        here.in_backward = 0;
    } else {
        here.stepping = before;
    }
    Py_XDECREF(scope);
    Py_DECREF(attrs);
    Py_DECREF(self);
    return result;
}

enum { FEW = 8 };

/* packed([first, ]args, kwargs): the call, from a function that was given these. */
static PyObject *
call_packed(Call *self, PyObject *const *given, Py_ssize_t count)
{
    if (count < 2 || count > 3 || !PyTuple_CheckExact(given[count - 2])
        || !PyDict_CheckExact(given[count - 1])) {
        PyErr_SetString(PyExc_TypeError, "packed takes a tuple and a dict, and what comes first");
        return NULL;
    }
    PyObject *positional = given[count - 2], *keywords = given[count - 1], *names = NULL;
    Py_ssize_t first = count - 2, number = first + PyTuple_GET_SIZE(positional), at = 0;
    Py_ssize_t all = number + PyDict_GET_SIZE(keywords);
    PyObject *few[FEW + 1], **args = few, *key, *value, *result = NULL;
    if (all > FEW && (args = PyMem_New(PyObject *, (size_t)all + 1)) == NULL) {
        return PyErr_NoMemory();
    }
    args[0] = NULL; /* for whoever puts something in front */
    if (first) {
        args[1] = given[0];
    }
    for (Py_ssize_t i = first; i < number; i++) {
        args[1 + i] = PyTuple_GET_ITEM(positional, i - first);
    }
    if (all > number) {
        if ((names = PyTuple_New(all - number)) == NULL) {
            goto done;
        }
        for (Py_ssize_t i = 0; i < all - number && PyDict_Next(keywords, &at, &key, &value); i++) {
            PyTuple_SET_ITEM(names, i, more(key));
            args[1 + number + i] = value;
        }
    }
    result = call_vectorcall(self, args + 1, (size_t)number | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
done:
    Py_XDECREF(names);
    if (args != few) {
        PyMem_Free(args);
    }
    return result;
}

/* As a function that stands in a class or a module: by its name. */
static PyObject *
call_reduce(PyObject *self, PyObject *Py_UNUSED(nothing))
{
    return PyObject_GetAttr(self, s_qualname);
}

static PyMethodDef call_methods[] = {
    {"packed", (PyCFunction)(void (*)(void))call_packed, METH_FASTCALL,
     "packed([first, ]args, kwargs): the call, from a function that was given these."},
    {"__reduce__", call_reduce, METH_NOARGS, "Its name: it is pickled as the function it is."},
    {NULL}
};

/* As a function in a class: a method of its instances. */
static PyObject *
method_of(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(owner))
{
    return instance == NULL || instance == Py_None ? more(self) : PyMethod_New(self, instance);
}

static PyGetSetDef dict_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL}
};

static PyObject *
call_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *hook, *name, *original, *method = NULL;
    int what;
    if (!PyArg_ParseTuple(args, "O!iUO|U", &HookType, &hook, &what, &name, &original, &method)) {
        return NULL;
    }
    if (what < FORWARD || what > OPTIMIZER_STEP) {
        PyErr_SetString(PyExc_ValueError, "what is 0 (forward), 1 (backward) or 2 (a step)");
        return NULL;
    }
    Call *self = (Call *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->vectorcall = (vectorcallfunc)call_vectorcall;
        self->what = what;
        self->hook = (Hook *)more(hook);
        self->name = more(name);
        self->original = more(original);
        Py_XINCREF(method);
        self->method = method;
    }
    return (PyObject *)self;
}

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._fast.RecordedCall",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL
        | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_doc = "RecordedCall(hook, what, name, original[, method]): calls original in a scope.",
    .tp_traverse = (traverseproc)call_traverse,
    .tp_clear = (inquiry)call_clear,
    .tp_dealloc = (destructor)call_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Call, vectorcall),
    .tp_descr_get = method_of,
    .tp_dictoffset = offsetof(Call, dict),
    .tp_getset = dict_getset,
    .tp_members = call_members,
    .tp_methods = call_methods,
    .tp_new = call_new,
};

static PyObject *
inside_forward(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    return PyBool_FromLong(here.depth);
}

static PyObject *
is_stepping(PyObject *Py_UNUSED(module), PyObject *optimizer)
{
    return PyBool_FromLong(here.stepping == (void *)optimizer);
}

static PyObject *
if_not_stepping(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count < 2) {
        PyErr_SetString(PyExc_TypeError, "if_not_stepping takes what to call and an optimizer");
        return NULL;
    }
    if (here.stepping == (void *)args[1]) {
        Py_RETURN_NONE;
    }
    return PyObject_Vectorcall(args[0], args + 1, (size_t)count - 1, NULL);
}

static PyObject *
in_compiled_code(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    Py_RETURN_FALSE;
}

static PyObject *
module_gone(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(reference))
{
    modules_gone++;
    Py_RETURN_NONE;
}

/* --- a pass over a data source ----------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    char explicit;
    int state;
    unsigned long thread; /* whose loops' attributes `mine` are; 0: nobody's yet */
    Py_ssize_t count;
    PyObject *loops, *recorder, *kind, *stage, *step, *epoch, *place, *mine;
} Pass;

#define EACH_PASS_OBJECT(DO)                                                                       \
    DO(self->loops); DO(self->recorder); DO(self->kind); DO(self->stage); DO(self->step);          \
    DO(self->epoch); DO(self->place); DO(self->mine)

#define OBJECT(name, field) {name, T_OBJECT, offsetof(Pass, field), 0, NULL}
static PyMemberDef pass_members[] = {
    {"explicit", T_BOOL, offsetof(Pass, explicit), 0, NULL},
    {"state", T_INT, offsetof(Pass, state), 0, NULL},
    {"count", T_PYSSIZET, offsetof(Pass, count), 0, NULL},
    OBJECT("_loops", loops),
    OBJECT("recorder", recorder),
    OBJECT("kind", kind),
    OBJECT("stage", stage),
    OBJECT("step", step),
    OBJECT("epoch", epoch),
    OBJECT("_place", place),
    {NULL}
};
#undef OBJECT

static int
pass_traverse(Pass *self, visitproc visit, void *arg)
{
    EACH_PASS_OBJECT(Py_VISIT);
    return 0;
}

static int
pass_clear(Pass *self)
{
    EACH_PASS_OBJECT(Py_CLEAR);
    return 0;
}
#undef EACH_PASS_OBJECT

static void
pass_dealloc(Pass *self)
{
    PyObject_GC_UnTrack(self);
    pass_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Whether `scope` is an open scope and the current one. -1: error */
static int
is_current(PyObject *scope)
{
    PyObject *context;
    if (!is_a(scope, &ScopeType, &seen_scope) || ((Scope *)scope)->state != OPEN) {
        return 0;
    }
    if (PyContextVar_Get(C.variable, NULL, &context) < 0) {
        return -1;
    }
    int answer = context != NULL && ((Scope *)scope)->ctx == context;
    Py_XDECREF(context);
    return answer;
}

/* Takes the next number out of `where[key]`, the first being 0: new reference. */
static PyObject *
take_number(PyObject *where, PyObject *key)
{
    PyObject *number = PyDict_GetItemWithError(where, key), *next = NULL;
    if (number != NULL) {
        Py_INCREF(number);
    } else if (PyErr_Occurred() || (number = PyLong_FromLong(0)) == NULL) {
        return NULL;
    }
    PyObject *one = PyLong_FromLong(1);
    next = one == NULL ? NULL : PyNumber_Add(number, one);
    Py_XDECREF(one);
    if (next == NULL || PyDict_SetItem(where, key, next) < 0) {
        Py_CLEAR(number);
    }
    Py_XDECREF(next);
    return number;
}

/* As take_number, out of the attributes of an object that keeps them in its dict. */
static PyObject *
take_attribute(PyObject *object, PyObject *key)
{
    PyObject *number = NULL, *attributes = PyObject_GenericGetDict(object, NULL);
    if (attributes != NULL) {
        number = take_number(attributes, key);
        Py_DECREF(attributes);
    }
    return number;
}

/* The attributes of this thread's loops, kept by the pass: borrowed; NULL: error. To ask for them is
   to look for the thread, in a dozen places; in a forked child nothing goes the short way. */
static PyObject *
mine_of(Pass *pass)
{
    if (here.thread == 0) {
        here.thread = ++threads_seen;
    }
    if (pass->mine == NULL || pass->thread != here.thread) {
        PyObject *local = pass->loops == NULL ? NULL : PyObject_GetAttr(pass->loops, s_here);
        PyObject *mine = local == NULL ? NULL : PyObject_GetAttr(local, s_dict);
        Py_XDECREF(local);
        if (mine == NULL) {
            if (!PyErr_Occurred()) {
                PyErr_SetObject(PyExc_AttributeError, s_here);
            }
            return NULL;
        }
        if (!PyDict_CheckExact(mine)) {
            PyErr_SetString(PyExc_TypeError, "the attributes of a thread are a dict");
            Py_DECREF(mine);
            return NULL;
        }
        pass->thread = here.thread;
        put(&pass->mine, mine); /* last: with the one it lets go of another thread may come in */
        return mine;            /* which its thread keeps */
    }
    return pass->mine;
}

/* What `name` is for this thread's loops, whose attributes are `mine`: borrowed. */
static PyObject *
of_thread(PyObject *mine, PyObject *name)
{
    PyObject *found = PyDict_GetItemWithError(mine, name);
    if (found == NULL && !PyErr_Occurred()) {
        PyErr_SetObject(PyExc_AttributeError, name);
    }
    return found;
}

static PyObject *
add_data_load(Scope *step, PyObject *start, PyObject *end)
{
    PyObject *args[] = {s_data_load, start, end};
    PyObject *added = scope_add_here(step, args, 3);
    if (added != Py_False) {
        return added;
    }
    Py_DECREF(added);
    return PyObject_CallMethodObjArgs((PyObject *)step, s_add_closed, s_data_load, start, end, NULL);
}

/* Pass.fetched for a pass that is under way, in its place. 1: done, 0: not the short way, nothing
   has happened, -1: error. */
static int
fetched_here(Pass *self, PyObject *start, PyObject *end)
{
    Recorder *rec = usable(self->recorder);
    PyObject *index = NULL, *iteration = NULL, *attrs = NULL, *step = NULL, *counters = NULL,
        *done = NULL;
    int result = -1, training;

    if (rec == NULL || rec->busy || self->state != OPEN || self->place == NULL
        || self->kind == NULL || self->loops == NULL || self->stage == NULL) {
        return 0;
    }
    int current = is_current(self->place);
    if (current <= 0) {
        return current;
    }
    training = self->stage != s_evaluation
        && (self->stage == Py_None || PyUnicode_Compare(self->stage, s_evaluation) != 0);
    Py_INCREF(self);
    Py_INCREF(rec);
    if (!training) {
        index = PyLong_FromSsize_t(self->count);
        iteration = more(Py_None);
    } else {
        PyObject *mine = mine_of(self);
        PyObject *owner = mine == NULL ? NULL : of_thread(mine, s_owner);
        if (owner == NULL) {
            goto done;
        }
        if (owner != (PyObject *)self || self->epoch == NULL
            || !is_a(self->epoch, &ScopeType, &seen_scope)
            || ((Scope *)self->epoch)->state != OPEN) {
            result = 0;
            goto done;
        }
        if ((counters = PyObject_GetAttr(self->epoch, s_counters)) == NULL) {
            goto done;
        }
        if (!PyDict_CheckExact(counters)) {
            result = 0;
            goto done;
        }
        if ((index = take_number(counters, s_step)) != NULL) {
            iteration = take_attribute(self->loops, s_iteration);
        }
    }
    if (index == NULL || iteration == NULL || (attrs = PyDict_New()) == NULL) {
        goto done;
    }
    double reserve = (double)rec->headroom;
    self->count++;
    step = new_scope(self->kind, (PyObject *)rec, s_step, index, attrs);
    if (step == NULL || !is_a(step, &ScopeType, &seen_scope)) {
        goto done;
    }
    int opened = open_here((Scope *)step, start, iteration == Py_None ? NULL : iteration, reserve);
    if (opened < 0) {
        goto done;
    }
    if (opened == 0) {
        PyObject *found = PyObject_CallMethodObjArgs((PyObject *)self, s_open_slowly, step, start,
                                                     iteration, NULL);
        if (found == NULL) {
            goto done;
        }
        Py_SETREF(step, found);
    }
    put(&self->step, more(step));
    if (step != Py_None && is_a(step, &ScopeType, &seen_scope)) {
        done = add_data_load((Scope *)step, start, end);
    } else {
        done = add_data_load((Scope *)self->place, start, end);
    }
    result = done == NULL ? -1 : 1;
done:
    Py_XDECREF(done);
    Py_XDECREF(step);
    Py_XDECREF(attrs);
    Py_XDECREF(iteration);
    Py_XDECREF(index);
    Py_XDECREF(counters);
    Py_DECREF(rec);
    Py_DECREF(self);
    return result;
}

static PyObject *
pass_fetched_here(Pass *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "fetched_here takes start_ns and end_ns");
        return NULL;
    }
    int done = fetched_here(self, args[0], args[1]);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyMethodDef pass_methods[] = {
    {"fetched_here", (PyCFunction)(void (*)(void))pass_fetched_here, METH_FASTCALL,
     "A fetch of a pass under way has returned: the short way; says whether that was it."},
    {NULL}
};

static PyTypeObject PassType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._fast.PassCore",
    .tp_basicsize = sizeof(Pass),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "What a fetch reads of its pass.",
    .tp_traverse = (traverseproc)pass_traverse,
    .tp_clear = (inquiry)pass_clear,
    .tp_dealloc = (destructor)pass_dealloc,
    .tp_members = pass_members,
    .tp_methods = pass_methods,
    .tp_new = PyType_GenericNew,
};

/* --- a fetch of a hooked iterator -------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Hook *hook;
    PyObject *key, *original, *slowly, *ended, *dict;
} Fetch;

static int
fetch_traverse(Fetch *self, visitproc visit, void *arg)
{
    Py_VISIT(self->hook);
    Py_VISIT(self->key);
    Py_VISIT(self->original);
    Py_VISIT(self->slowly);
    Py_VISIT(self->ended);
    Py_VISIT(self->dict);
    return 0;
}

static int
fetch_clear(Fetch *self)
{
    Py_CLEAR(self->hook);
    Py_CLEAR(self->key);
    Py_CLEAR(self->original);
    Py_CLEAR(self->slowly);
    Py_CLEAR(self->ended);
    Py_CLEAR(self->dict);
    return 0;
}

static void
fetch_dealloc(Fetch *self)
{
    PyObject_GC_UnTrack(self);
    fetch_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* The pass of the iterator if the fetch may go the short way, new reference; else NULL, without
   error. `*mine` are the attributes of the thread's loops, new reference too. */
static Pass *
pass_of(Fetch *self, PyObject *iterator, PyObject **mine)
{
    Hook *hook = self->hook;
    Recorder *rec = hook == NULL || !hook->active ? NULL : usable(hook->rec);
    PyObject *dict = NULL, *fetching;
    Pass *pass = NULL;
    if (rec == NULL || rec->busy || self->key == NULL
        || (dict = PyObject_GenericGetDict(iterator, NULL)) == NULL || !PyDict_CheckExact(dict)) {
        goto done;
    }
    PyObject *found = PyDict_GetItemWithError(dict, self->key);
    if (found == NULL || !PyObject_TypeCheck(found, &PassType)) {
        goto done;
    }
    Pass *candidate = (Pass *)found;
    if (candidate->state != OPEN || candidate->explicit || candidate->recorder != (PyObject *)rec
        || (*mine = mine_of(candidate)) == NULL
        || (fetching = of_thread(*mine, s_fetching)) == NULL) {
        *mine = NULL;
        goto done;
    }
    Py_INCREF(*mine);
    if (PyLong_CheckExact(fetching) && PyLong_AsLong(fetching) == 0) {
        pass = (Pass *)more(found);
    }
done:
    PyErr_Clear(); /* the general way will meet it again, and say so */
    Py_XDECREF(dict);
    return pass;
}

static int
set_fetching(PyObject *mine, long number)
{
    PyObject *value = PyLong_FromLong(number);
    int result = value == NULL ? -1 : PyDict_SetItem(mine, s_fetching, value);
    Py_XDECREF(value);
    return result;
}

static PyObject *
fetch_vectorcall(Fetch *self, PyObject *const *args, size_t given, PyObject *names)
{
    PyObject *mine = NULL, *start = NULL, *end = NULL, *item = NULL, *done = NULL;
    PyObject *type = NULL, *error = NULL, *traceback = NULL;
    long long now;
    if (PyVectorcall_NARGS(given) != 1 || names != NULL || self->slowly == NULL
        || self->original == NULL || self->ended == NULL) {
        PyErr_SetString(PyExc_TypeError, "a fetch takes its iterator");
        return NULL;
    }
    Pass *pass = pass_of(self, args[0], &mine);
    if (pass == NULL) {
        Py_XDECREF(mine);
        return PyObject_Vectorcall(self->slowly, args, given, NULL);
    }
    PyObject *rec = more(pass->recorder);
    Clock *clock = (Clock *)more(((Recorder *)rec)->clock);
    long long offset = clock->offset_ns; /* the clock may be set during the fetch */
    PyObject *step = pass->step;
    pass->step = more(Py_None);
    if (step != NULL && is_a(step, &ScopeType, &seen_scope) && ((Scope *)step)->state == OPEN) {
        PyObject *how[] = {Py_None, Py_None, Py_None};
        done = scope_exit((Scope *)step, how, 3);
        Py_CLEAR(done);
    }
    Py_XDECREF(step);
    int timed = !PyErr_Occurred() && monotonic(clock, &now) == 0
        && (start = PyLong_FromLongLong(now + offset)) != NULL && set_fetching(mine, 1) == 0;
    if (!timed && swallow_for(rec, s_data_load) < 0) {
        goto done;
    }
    item = PyObject_Vectorcall(self->original, args, 1, NULL);
    if (!timed) {
        goto done;
    }
    if (item == NULL) {
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback != NULL) {
            PyException_SetTraceback(error, traceback);
        }
    }
    if (set_fetching(mine, 0) == 0 && monotonic(clock, &now) == 0
        && (end = PyLong_FromLongLong(now + offset)) != NULL) {
        if (item == NULL) {
            done = PyObject_CallFunctionObjArgs(self->ended, (PyObject *)pass, start, end, error,
                                                NULL);
        } else {
            int recorded = fetched_here(pass, start, end);
            done = recorded == 0
                ? PyObject_CallMethodObjArgs((PyObject *)pass, s_fetched, start, end, NULL)
                : recorded < 0 ? NULL : more(Py_None);
        }
    }
    if (PyErr_Occurred() && swallow_for(rec, s_data_load) < 0) {
        Py_CLEAR(item);
    } else if (error != NULL) {
        PyErr_Restore(type, error, traceback);
        type = error = traceback = NULL;
    }
done:
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_XDECREF(done);
    Py_XDECREF(end);
    Py_XDECREF(start);
    Py_DECREF(clock);
    Py_DECREF(rec);
    Py_XDECREF(mine);
    Py_DECREF(pass);
    return item;
}

static PyObject *
fetch_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *hook, *key, *original, *slowly, *ended;
    if (!PyArg_ParseTuple(args, "O!UOOO", &HookType, &hook, &key, &original, &slowly, &ended)) {
        return NULL;
    }
    Fetch *self = (Fetch *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->vectorcall = (vectorcallfunc)fetch_vectorcall;
        self->hook = (Hook *)more(hook);
        self->key = more(key);
        self->original = more(original);
        self->slowly = more(slowly);
        self->ended = more(ended);
    }
    return (PyObject *)self;
}

static PyTypeObject FetchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._fast.RecordedFetch",
    .tp_basicsize = sizeof(Fetch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL
        | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_doc = "RecordedFetch(hook, key, original, slowly, ended): original, told to its pass.",
    .tp_traverse = (traverseproc)fetch_traverse,
    .tp_clear = (inquiry)fetch_clear,
    .tp_dealloc = (destructor)fetch_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Fetch, vectorcall),
    .tp_descr_get = method_of,
    .tp_dictoffset = offsetof(Fetch, dict),
    .tp_getset = dict_getset,
    .tp_new = fetch_new,
};

/* Adds what is above to the module; -1 with an error set. */
static int
add_hooks(PyObject *made)
{
    static const struct { PyObject **where; const char *text; } names[] = {
        {&s_training, "training"}, {&s_name, "__name__"},
        {&s_optimizer, "optimizer"}, {&s_run, "run"}, {&s_note, "note"}, {&s_here, "here"},
        {&s_fetching, "fetching"}, {&s_owner, "owner"}, {&s_dict, "__dict__"},
        {&s_fetched, "fetched"}, {&s_counters, "counters"}, {&s_iteration, "iteration"},
        {&s_step, "step"}, {&s_data_load, "data_load"},
        {&s_add_closed, "add_closed"}, {&s_open_slowly, "open_slowly"},
        {&s_evaluation, "evaluation"}, {&s_mode, "mode"}, {&s_train, "train"}, {&s_eval, "eval"},
        {&s_qualname, "__qualname__"},
    };
    static const struct { const char *name; PyTypeObject *type; } types[] = {
        {"HookCore", &HookType}, {"RecordedCall", &CallType}, {"PassCore", &PassType},
        {"RecordedFetch", &FetchType},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        if ((*names[i].where = PyUnicode_InternFromString(names[i].text)) == NULL) {
            return -1;
        }
    }
    for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++) {
        if (PyType_Ready(types[i].type) < 0
            || PyModule_AddObjectRef(made, types[i].name, (PyObject *)types[i].type) < 0) {
            return -1;
        }
    }
    return 0;
}

#define HOOK_FUNCTIONS                                                                             \
    {"inside_forward", inside_forward, METH_NOARGS,                                                \
     "Whether this thread is inside a recorded forward."},                                         \
    {"is_stepping", is_stepping, METH_O,                                                           \
     "Whether the innermost recorded optimizer step of this thread is this optimizer's."},         \
    {"if_not_stepping", (PyCFunction)(void (*)(void))if_not_stepping, METH_FASTCALL,               \
     "if_not_stepping(call, optimizer, *args): call(optimizer, *args) unless is_stepping()."},     \
    {"in_compiled_code", in_compiled_code, METH_NOARGS,                                            \
     "False; code that is compiled has a stand-in for it that is true."},                          \
    {"module_gone", module_gone, METH_O, "A module that was told of is no more."}
