// The module of all files before this one (__init__.py).

PyDoc_STRVAR(setup_doc, "setup(capsule, Tensor, Parameter, variable, look): call it once, before anything else.");
static PyObject *setup(PyObject *self, PyObject *args) {
  PyObject *capsule, *tensor, *parameter, *variable, *python;
  if (!PyArg_ParseTuple(args, "OOOSO", &capsule, &tensor, &parameter, &variable, &python)) return NULL;
  const Exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!found) return NULL;
  if (found->major != 1 || !found->describe)
    return PyErr_Format(PyExc_ImportError, "expected version 1 of DLPack, got %u", (unsigned)found->major);
  exchange = found;  // never freed, since C modules are not freed either
  plain[0] = Py_NewRef(tensor);
  plain[1] = Py_NewRef(parameter);
  environment = Py_NewRef(variable);
  look = Py_NewRef(python);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"setup", setup, METH_VARARGS, setup_doc},
                                {"key", (PyCFunction)(void (*)(void))make_key, METH_FASTCALL, key_doc},
                                {"frame", make_frame, METH_VARARGS, frame_doc},
                                {"facts", facts, METH_VARARGS, facts_doc},
                                {"places", places, METH_VARARGS, places_doc},
                                {"copy", copy, METH_O, copy_doc},
                                {"done", done, METH_O, done_doc},
                                {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, launch_doc},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "flash_delta_known", NULL, -1, methods, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit_flash_delta_known(void) {
  requires_grad = PyUnicode_InternFromString("requires_grad");
  data_ptr = PyUnicode_InternFromString("data_ptr");
  dtype_name = PyUnicode_InternFromString("dtype");
  offset_name = PyUnicode_InternFromString("offset");
  start_name = PyUnicode_InternFromString("start");
  name_name = PyUnicode_InternFromString("name");
  value_name = PyUnicode_InternFromString("value");
  one = PyUnicode_InternFromString("1");
  if (!requires_grad || !data_ptr || !dtype_name || !offset_name || !start_name || !name_name || !value_name || !one)
    return NULL;
  return PyModule_Create(&definition);
}
