/* Part of _record.c: the rules for gradient norms, layer by layer: what Layers in
 * training_record/rules.py does, to the last bit. Both use the functions of the same libm, and this
 * file must be compiled without fused multiply-adds.
 */

enum { NOTHING, NO_GRADIENT, VANISHING, EXPLODING, CONDITIONS };

typedef struct {
    double mean, variance;
    long long count, repeats;
    int alarm, pending, near;
    PyObject *exact[CONDITIONS]; /* what its events say beside numbers, by condition */
} Layer;

typedef struct {
    PyObject_HEAD
    PyObject *expected, *sigma_pair, *places; /* the class of what is found; name to number */
    Layer *layers;
    Py_ssize_t size, room;
    double sigma, floor, min_decades, near_size;
    long long warmup, confirmations;
} Layers;

static PyObject *conditions[CONDITIONS], *word_layer, *word_diagnosis, *word_norm, *word_baseline,
    *word_sigma, *word_alarm, *word_cleared;

static int
know_words(void)
{
    if (word_cleared != NULL)
        return SURE;
    conditions[NO_GRADIENT] = PyUnicode_InternFromString("no_gradient");
    conditions[VANISHING] = PyUnicode_InternFromString("vanishing");
    conditions[EXPLODING] = PyUnicode_InternFromString("exploding");
    word_layer = PyUnicode_InternFromString("layer");
    word_diagnosis = PyUnicode_InternFromString("diagnosis");
    word_norm = PyUnicode_InternFromString("grad_norm");
    word_baseline = PyUnicode_InternFromString("baseline");
    word_sigma = PyUnicode_InternFromString("sigma");
    word_alarm = PyUnicode_InternFromString("alarm");
    word_cleared = PyUnicode_InternFromString("alarm_cleared");
    return PyErr_Occurred() ? FAILED : SURE;
}

static PyObject *
pair_of(PyObject *name, PyObject *value)
{
    PyObject *pair = value == NULL ? NULL : PyTuple_Pack(2, name, value);
    Py_XDECREF(value);
    return pair;
}

/* Appends an event that the numbers call for. */
static int
add_found(
    Layers *self, PyObject *found, PyObject *step, PyObject *name, PyObject *norm, Layer *layer,
    int is_alarm)
{
    PyObject **exact = &layer->exact[layer->alarm];
    if (*exact == NULL)
        *exact = Py_BuildValue(
            "((OO)(OO))", word_layer, name, word_diagnosis, conditions[layer->alarm]);
    PyTypeObject *type = (PyTypeObject *)self->expected;
    PyObject *measured = pair_of(word_norm, Py_NewRef(norm));
    PyObject *baseline = pair_of(word_baseline, PyFloat_FromDouble(pow(10.0, layer->mean)));
    PyObject *floats = NULL, *made = NULL;
    if (measured != NULL && baseline != NULL && *exact != NULL)
        floats = is_alarm ? PyTuple_Pack(3, measured, baseline, self->sigma_pair)
                          : PyTuple_Pack(2, measured, baseline);
    if (floats != NULL) /* a NamedTuple, without the detour over its own __new__ */
        made = type->tp_alloc(type, 5);
    int result = FAILED;
    if (made != NULL) {
        PyTuple_SET_ITEM(made, 0, Py_NewRef(step));
        PyTuple_SET_ITEM(made, 1, Py_NewRef(is_alarm ? word_alarm : word_cleared));
        PyTuple_SET_ITEM(made, 2, Py_NewRef(*exact));
        PyTuple_SET_ITEM(made, 3, Py_NewRef(floats));
        PyTuple_SET_ITEM(made, 4, Py_NewRef(layer->near ? Py_True : Py_False));
        result = PyList_Append(found, made);
    }
    Py_XDECREF(measured);
    Py_XDECREF(baseline);
    Py_XDECREF(floats);
    Py_XDECREF(made);
    return result < 0 ? FAILED : SURE;
}

static Layer *
layer_named(Layers *self, PyObject *name)
{
    PyObject *place = PyDict_GetItemWithError(self->places, name);
    if (place != NULL)
        return &self->layers[PyLong_AsSsize_t(place)];
    if (PyErr_Occurred())
        return NULL;
    if (self->size == self->room) {
        Py_ssize_t room = self->room * 2 + 64;
        Layer *layers = PyMem_Realloc(self->layers, room * sizeof *layers);
        if (layers == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        self->layers = layers;
        self->room = room;
    }
    place = PyLong_FromSsize_t(self->size);
    if (place == NULL || PyDict_SetItem(self->places, name, place) < 0) {
        Py_XDECREF(place);
        return NULL;
    }
    Py_DECREF(place);
    Layer *layer = &self->layers[self->size++];
    memset(layer, 0, sizeof *layer);
    return layer;
}

static int
condition_of(const Layers *self, Layer *layer, double norm, double size, double margin)
{
    double mean = layer->mean, low = mean - margin, high = mean + margin;
    if (fabs(size - low) <= self->near_size || fabs(size - high) <= self->near_size)
        layer->near = 1;
    if (norm == 0) {
        if (fabs(mean + 29.0) <= self->near_size)
            layer->near = 1;
        if (mean > -29.0)
            return NO_GRADIENT;
    }
    return size < low ? VANISHING : size > high ? EXPLODING : NOTHING;
}

static int
check_layer(Layers *self, PyObject *step, PyObject *name, PyObject *given, PyObject *found)
{
    double norm = PyFloat_AsDouble(given);
    Layer *layer = norm == -1.0 && PyErr_Occurred() ? NULL : layer_named(self, name);
    if (layer == NULL)
        return FAILED;
    double size = log10(norm + 1e-30);
    if (layer->count >= self->warmup) {
        double margin = self->sigma * (sqrt(layer->variance) + 1e-6);
        if (margin < self->min_decades)
            margin = self->min_decades;
        int condition = condition_of(self, layer, norm, size, margin);
        if (condition != NOTHING) {
            layer->repeats = condition == layer->pending ? layer->repeats + 1 : 1;
            layer->pending = condition;
            if (layer->repeats < self->confirmations || layer->alarm == condition)
                return SURE;
            layer->alarm = condition;
            return add_found(self, found, step, name, given, layer, 1);
        }
        layer->pending = NOTHING;
        layer->repeats = 0;
        if (layer->alarm != NOTHING) {
            if (add_found(self, found, step, name, given, layer, 0) != SURE)
                return FAILED;
            layer->alarm = NOTHING;
        }
    }
    double rate = 1.0 / (double)(layer->count + 1);
    if (rate < self->floor)
        rate = self->floor;
    double distance = size - layer->mean;
    layer->mean = layer->mean + rate * distance;
    layer->variance = (1.0 - rate) * (layer->variance + rate * distance * distance);
    layer->count++;
    return SURE;
}

static PyObject *
layers_check(Layers *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyList_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "check(step, grad, found)");
        return NULL;
    }
    /* A copy: nobody changes it meanwhile, and it holds on to names and norms. */
    PyObject *grad = PyDict_New(), *name, *norm;
    if (grad == NULL || PyDict_Update(grad, args[1]) < 0) {
        Py_XDECREF(grad);
        return NULL;
    }
    Py_ssize_t at = 0;
    int sure = SURE;
    while (sure == SURE && PyDict_Next(grad, &at, &name, &norm))
        sure = check_layer(self, args[0], name, norm, args[2]);
    Py_DECREF(grad);
    return sure == SURE ? Py_NewRef(Py_None) : NULL;
}

static PyObject *
layers_near(Layers *self, PyObject *name)
{
    PyObject *place = PyDict_GetItemWithError(self->places, name);
    if (place == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    return PyBool_FromLong(self->layers[PyLong_AsSsize_t(place)].near);
}

static void
layers_dealloc(Layers *self)
{
    for (Py_ssize_t i = 0; i < self->size; i++)
        for (int j = 0; j < CONDITIONS; j++)
            Py_XDECREF(self->layers[i].exact[j]);
    PyMem_Free(self->layers);
    Py_XDECREF(self->expected);
    Py_XDECREF(self->sigma_pair);
    Py_XDECREF(self->places);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
layers_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *expected, *sigma;
    double floor, min_decades, near_size;
    long long warmup, confirmations;
    if (!PyArg_ParseTuple(
            args, "O!OLddLd", &PyType_Type, &expected, &sigma, &warmup, &floor, &min_decades,
            &confirmations, &near_size))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)expected, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "what is found is a tuple");
        return NULL;
    }
    double sigma_read = PyFloat_AsDouble(sigma);
    if (sigma_read == -1.0 && PyErr_Occurred())
        return NULL;
    Layers *self = (Layers *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->expected = Py_NewRef(expected);
    if (know_words() == SURE)
        self->sigma_pair = PyTuple_Pack(2, word_sigma, sigma);
    self->places = PyDict_New();
    self->sigma = sigma_read;
    self->warmup = warmup;
    self->floor = floor;
    self->min_decades = min_decades;
    self->confirmations = confirmations;
    self->near_size = near_size;
    if (self->places == NULL || self->sigma_pair == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef layers_methods[] = {
    {"check", (PyCFunction)(void (*)(void))layers_check, METH_FASTCALL,
     "check(step, grad, found): look at the norms of a check; events are appended to `found`."},
    {"near", (PyCFunction)layers_near, METH_O,
     "near(layer): whether a decision about it was nearly the other one."},
    {NULL}};

static PyTypeObject LayersType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cirron_otel._record.Layers",
    .tp_basicsize = sizeof(Layers),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = layers_new,
    .tp_dealloc = (destructor)layers_dealloc,
    .tp_methods = layers_methods,
};
