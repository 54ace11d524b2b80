// What a new call asks about the arguments of its steps (plan.py). In Python this would take most of its time.

#define NARROW (1LL << 31)  // numbers below it, and from minus it on, have 32 bits

static PyObject *dtype_name, *offset_name, *start_name, *name_name, *value_name, *one;  // strings

// Places in the tuple `kinds` of types, and in a Descriptor (plan.py).
enum { LAYOUT, MEMORY, CONSTEXPR, DESCRIPTOR };
enum { TENSOR, SHAPE, STRIDES, BOX, IN_SHARED_MEMORY };

static int is(PyObject *value, PyObject *kinds, Py_ssize_t kind) {
  return (PyObject *)Py_TYPE(value) == PyTuple_GetItem(kinds, kind);
}

static int is_layout(PyObject *value, PyObject *kinds) {
  return is(value, kinds, LAYOUT) || is(value, kinds, MEMORY);
}

// Appends an object that is owned here. NULL means that there was an error.
static int append(PyObject *list, PyObject *item) {
  const int status = item ? PyList_Append(list, item) : -1;
  Py_XDECREF(item);
  return status == 0;
}

static PyObject *fact_of_number(PyObject *value, int rule) {
  int above;
  const long long number = PyLong_AsLongLongAndOverflow(value, &above);
  if (number == 1 && rule & 1) return Py_NewRef(one);
  const int narrow = !above && -NARROW <= number && number < NARROW;
  return PyLong_FromLong(narrow + 2 * (rule & 2 && !above && number % 16 == 0));
}

static int put_facts_of_layout(PyObject *value, int rule, PyObject *seen) {
  PyObject *offset = PyObject_GetAttr(value, offset_name);
  const int aligned = offset && rule & 2 && PyLong_AsLong(offset) == 0;
  Py_XDECREF(offset);
  return offset && append(seen, PyObject_GetAttr(value, dtype_name)) && append(seen, PyBool_FromLong(aligned));
}

// The layout in shared memory is one of a few objects that live as long as their module.
static int put_facts_of_descriptor(PyObject *value, PyObject *seen) {
  return append(seen, PyObject_GetAttr(PyTuple_GetItem(value, TENSOR), dtype_name)) &&
         append(seen, Py_NewRef(PyTuple_GetItem(value, BOX))) &&
         append(seen, PyLong_FromVoidPtr(PyTuple_GetItem(value, IN_SHARED_MEMORY)));
}

static int put_facts(PyObject *value, int rule, PyObject *kinds, PyObject *seen) {
  if (PyLong_CheckExact(value)) return append(seen, fact_of_number(value, rule));
  if (is_layout(value, kinds)) return put_facts_of_layout(value, rule, seen);
  if (is(value, kinds, DESCRIPTOR)) return put_facts_of_descriptor(value, seen);
  if (is(value, kinds, CONSTEXPR)) return append(seen, PyObject_GetAttr(value, value_name));
  if (!PyTuple_CheckExact(value)) return append(seen, Py_NewRef(Py_TYPE(value)));
  const Py_ssize_t count = PyTuple_Size(value);
  if (!append(seen, PyLong_FromSsize_t(count))) return 0;
  for (Py_ssize_t i = 0; i < count; i++)
    if (!put_facts(PyTuple_GetItem(value, i), 3, kinds, seen)) return 0;  // whatever the kernel asks for
  return 1;
}

PyDoc_STRVAR(facts_doc, "facts(arguments, rules, kinds, seen): appends to the list `seen` what Triton compiles for.\n\n"
                        "rules: a byte for each parameter; bit 0: the value 1 matters, bit 1: multiples of 16 do.\n"
                        "kinds: the types (Layout, Memory, constexpr, Descriptor).");
static PyObject *facts(PyObject *self, PyObject *args) {
  PyObject *arguments, *kinds, *seen;
  const char *rules;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(args, "O!y#O!O!", &PyTuple_Type, &arguments, &rules, &count, &PyTuple_Type, &kinds,
                        &PyList_Type, &seen))
    return NULL;
  if (count < PyTuple_Size(arguments)) return PyErr_Format(PyExc_ValueError, "facts: expected more rules");
  for (Py_ssize_t i = 0; i < PyTuple_Size(arguments); i++)
    if (!put_facts(PyTuple_GetItem(arguments, i), rules[i], kinds, seen)) return NULL;
  Py_RETURN_NONE;
}

static PyObject *place_of(PyObject *layout, PyObject *words) {
  PyObject *name = PyObject_GetAttr(layout, name_name), *start = PyObject_GetAttr(layout, start_name);
  PyObject *word = name ? PyObject_GetItem(words, name) : NULL, *zero = PyLong_FromLong(0);
  PyObject *place = word && start && zero ? PyTuple_Pack(2, word, start == Py_None ? zero : start) : NULL;
  Py_XDECREF(name);
  Py_XDECREF(start);
  Py_XDECREF(word);
  Py_XDECREF(zero);
  return place;
}

static PyObject *with_place(PyObject *described, PyObject *words) {
  PyObject *place = place_of(PyTuple_GetItem(described, TENSOR), words);
  return place ? Py_BuildValue("NOO", place, PyTuple_GetItem(described, SHAPE), PyTuple_GetItem(described, STRIDES))
               : NULL;
}

static PyObject *with_places(PyObject *values, PyObject *words, PyObject *kinds) {
  const Py_ssize_t count = PyTuple_Size(values);
  PyObject *found = PyTuple_New(count);
  for (Py_ssize_t i = 0; found && i < count; i++) {
    PyObject *value = PyTuple_GetItem(values, i);
    PyObject *item = is_layout(value, kinds) ? place_of(value, words)
                     : is(value, kinds, DESCRIPTOR) ? with_place(value, words)
                     : PyTuple_CheckExact(value) ? with_places(value, words, kinds) : Py_NewRef(value);
    if (item) PyTuple_SetItem(found, i, item);
    else Py_CLEAR(found);
  }
  return found;
}

PyDoc_STRVAR(places_doc, "places(arguments, words, kinds) -> the arguments, with (number of a tensor, offset) for\n"
                         "each layout, and (that of its tensor, sizes, strides) for each descriptor.\n\n"
                         "words: the number of each name.  kinds: as of `facts`.");
static PyObject *places(PyObject *self, PyObject *args) {
  PyObject *arguments, *words, *kinds;
  if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &arguments, &PyDict_Type, &words, &PyTuple_Type, &kinds))
    return NULL;
  return with_places(arguments, words, kinds);
}
