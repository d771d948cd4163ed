/* Part of _fast.c: ci.mark. scope_core.py says what a plain number does, line by line; everything
 * else is left to the function in scopes.py.
 */

/* A plain number on the current scope. 1: recorded, 0: not the short way, nothing has happened, -1:
   error */
static int
number_here(PyObject *recorder, PyObject *name, PyObject *value)
{
    PyObject *context = NULL, *id = NULL, *kind;
    long long now;
    int result = -1;

    Recorder *rec = usable(recorder);
    if (rec == NULL || rec->detour || !PyUnicode_CheckExact(name) || !PyUnicode_IS_ASCII(name)
        || PyUnicode_GET_LENGTH(name) > 64) {
        return 0;
    }
    if (PyFloat_CheckExact(value)) {
        kind = s_float;
    } else if (PyLong_CheckExact(value)) {
        kind = s_int;
    } else {
        return 0;
    }
    if (!is_simple(value)) {
        return 0;
    }
    if (PyContextVar_Get(C.variable, NULL, &context) < 0) {
        return -1;
    }
    PyObject *found = context == NULL || !PyDict_Check(context)
        ? NULL : PyDict_GetItemWithError(context, C.scope_key);
    Scope *scope = (Scope *)found;
    if (found == NULL || !is_a(found, &ScopeType, &seen_scope) || scope->state != OPEN
        || scope->rec != recorder || scope->marks == NULL || scope->id == NULL
        || scope->iteration == NULL || !PyUnicode_CheckExact(scope->id)
        || !(scope->iteration == C.unset || is_number(scope->iteration))) {
        Py_XDECREF(context);
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(scope);
    Py_INCREF(rec); /* what is called below may do anything */
    if (monotonic((Clock *)rec->clock, &now) < 0) {
        goto done;
    }
    now += ((Clock *)rec->clock)->offset_ns;
    if (rec->shows_marks) {
        now = now > scope->last_ns ? now : scope->last_ns + 1;
        id = id_from_time(scope->id, now);
    } else {
        id = new_mark_id(rec);
    }
    if (id != NULL) {
        scope->last_ns = now;
        result = write_mark(rec, scope, id, name, kind, value, C.no_attrs, now, rec->shows_marks);
    }
done:
    Py_XDECREF(id);
    Py_DECREF(rec);
    Py_DECREF(scope);
    Py_DECREF(context);
    return result < 0 ? -1 : 1;
}

static PyObject *
record_number(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "record_number takes a recorder, a name and a value");
        return NULL;
    }
    int recorded = number_here(args[0], args[1], args[2]);
    return recorded < 0 ? NULL : PyBool_FromLong(recorded);
}

/* ci.mark: the function in Python that does all of it, and the namespace the recorder lies in. */
static PyObject *mark_slowly, *recorders, *s_current, *s_mark;

static PyObject *
mark(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    if (count == 2 && names == NULL) {
        PyObject *rec = PyDict_GetItemWithError(recorders, s_current);
        if (rec != NULL && rec != Py_None) {
            Py_INCREF(rec);
            int recorded = number_here(rec, args[0], args[1]);
            if (recorded < 0) {
                recorded = swallow_for(rec, s_mark) < 0 ? -1 : 1;
            }
            Py_DECREF(rec);
            if (recorded) {
                return recorded < 0 ? NULL : more(Py_None);
            }
        }
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    return PyObject_Vectorcall(mark_slowly, args, (size_t)count, names);
}

static PyMethodDef mark_definition = {
    "mark", (PyCFunction)(void (*)(void))mark, METH_FASTCALL | METH_KEYWORDS, NULL,
};

/* A function as `general`, in name, text and where it is from, that takes the short way first. */
static PyObject *
make_mark(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *general, *namespace, *made = NULL;
    const char *signature;
    if (!PyArg_ParseTuple(args, "OO!s", &general, &PyDict_Type, &namespace, &signature)) {
        return NULL;
    }
    PyObject *doc = PyObject_GetAttrString(general, "__doc__");
    PyObject *home = PyObject_GetAttrString(general, "__module__");
    PyObject *text = doc == NULL || home == NULL
        ? NULL : PyUnicode_FromFormat("mark%s\n--\n\n%U", signature, doc);
    const char *bytes = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    char *kept = bytes == NULL ? NULL : PyMem_RawMalloc(strlen(bytes) + 1);
    if (kept != NULL) {
        strcpy(kept, bytes);
        mark_definition.ml_doc = kept; /* who holds an older function may still ask for its text */
        put(&mark_slowly, more(general));
        put(&recorders, more(namespace));
        made = PyCFunction_NewEx(&mark_definition, NULL, home);
    } else if (!PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    Py_XDECREF(text);
    Py_XDECREF(home);
    Py_XDECREF(doc);
    return made;
}
