/* Writing and verifying training records: training_record/compiled.py chooses this where it was built.
 *
 * What is here takes lines that are beyond doubt, a file's every line as a rule; any other it
 * leaves to the code in Python, whose verdicts and messages it has none of its own to add to.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#include "_record_numbers.h"
#include "_record_text.h"
#include "_record_values.h"
#include "_record_sha.h"
#include "_record_line.h"
#include "_record_walk.h"
#include "_record_layers.h"
#include "_record_encode.h"

typedef struct {
    PyObject_HEAD
    Known known;
} Reader;

static void
reader_dealloc(Reader *self)
{
    forget(&self->known);
    Py_TYPE(self)->tp_free(self);
}

/* The object on each line of a block, None for a line that is not spelled as json spells. */
static PyObject *
reader_values(Reader *self, PyObject *block)
{
    if (!PyBytes_Check(block)) {
        PyErr_SetString(PyExc_TypeError, "values(bytes)");
        return NULL;
    }
    const char *at = PyBytes_AS_STRING(block), *end = at + PyBytes_GET_SIZE(block);
    PyObject *values = PyList_New(0);
    while (at < end && values != NULL) {
        const char *to = memchr(at, '\n', end - at);
        if (to == NULL)
            break;
        PyObject *value = NULL;
        Text text = {at, to, STYLE_OPEN, 0};
        int sure = kind_of(&text) == IS_OBJECT ? make_object(&text, &self->known, 0, &value) : UNSURE;
        if (sure == SURE && text.at != to)
            sure = UNSURE;
        if (sure == FAILED || PyList_Append(values, sure == SURE ? value : Py_None) < 0)
            Py_CLEAR(values);
        Py_XDECREF(value);
        at = to + 1;
    }
    return values;
}

static PyMethodDef reader_methods[] = {
    {"values", (PyCFunction)reader_values, METH_O,
     "values(block): the object on each whole line, None where json would write it otherwise."},
    {NULL}};

static PyTypeObject ReaderType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._record.Reader",
    .tp_basicsize = sizeof(Reader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)reader_dealloc,
    .tp_methods = reader_methods,
};

static PyMethodDef functions[] = {
    {"encode", encode, METH_O,
     "encode(body): the canonical text of plain data, None where the dict holds more than that."},
    {"diary_line", (PyCFunction)(void (*)(void))diary_line, METH_FASTCALL,
     "diary_line(prev, body): hash and text of a line of plain data, None for more than that."},
    {"use_sha", use_sha, METH_O, "use_sha(wanted): for tests; whether to use the instructions."},
    {"hash_hex", hash_hex, METH_O,
     "hash_hex(text): SHA-256 in hex, None where the processor has no instructions for it."},
    {NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_record", "Training records, written and verified quickly.", -1, functions,
};

PyMODINIT_FUNC
PyInit__record(void)
{
    know_characters();
    quick_sha = has_sha();
    PyObject *made = PyModule_Create(&module);
    if (made != NULL
        && (PyModule_AddType(made, &ReaderType) < 0 || PyModule_AddType(made, &WalkType) < 0
            || PyModule_AddType(made, &LayersType) < 0))
        Py_CLEAR(made);
    return made;
}
