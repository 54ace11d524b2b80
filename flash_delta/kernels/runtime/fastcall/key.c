// The host's work for a call, in C: the key under which the call is remembered, and its launches.
//
// Tensors are read through DLPack's exchange API of torch.Tensor, which torch keeps stable. It takes some tens of
// nanoseconds to get a tensor's data pointer, sizes and strides, and nothing is owned here. Everything that the driver
// needs for a call's launches is in one bytearray (`Frame`). So Python's garbage collector has nothing to visit.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000  // one build is for Python 3.10 and all later ones
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Types of DLPack (dlpack.h, major version 1). torch has this header, but kernels are compiled without it.
typedef struct { uint8_t code, bits; uint16_t lanes; } Dtype;
typedef struct { int32_t type, index; } Device;
typedef struct {
  void *data;
  Device device;
  int32_t axes;
  Dtype dtype;
  int64_t *sizes, *strides;
  uint64_t offset;
} Described;
typedef struct {
  uint32_t major, minor;
  void *older, *allocate, *export, *import;
  int (*describe)(void *tensor, Described *out);  // 0, or -1 with an exception set
  void *stream;
} Exchange;

static const Exchange *exchange;
static PyObject *plain[2];     // torch.Tensor and Parameter; a subclass may have no memory, or another tensor's
static PyObject *environment;  // bytes, the name of the variable that names a backend
static PyObject *look;         // the Python function for keys
static PyObject *requires_grad, *data_ptr;  // names

// A key while it is made. Longer keys are made in Python.
typedef struct { size_t used; unsigned char bytes[4096]; } Key;

static int put(Key *key, const void *from, size_t size) {
  if (size > sizeof key->bytes - key->used) return 0;
  memcpy(key->bytes + key->used, from, size);
  key->used += size;
  return 1;
}

static int is_plain(PyObject *t) {
  PyObject *type = (PyObject *)Py_TYPE(t);
  return type == plain[0] || type == plain[1];
}

// As torch does, ignores strides of empty tensors and of axes of size 1.
static int is_contiguous(const Described *d) {
  int64_t expected = 1;
  int side_by_side = 1;
  for (int32_t i = d->axes - 1; i >= 0; i--) {
    if (d->sizes[i] == 0) return 1;
    if (d->sizes[i] != 1 && d->strides[i] != expected) side_by_side = 0;
    expected *= d->sizes[i];
  }
  return side_by_side;
}

// `signature` of __init__.py, as bytes. Since a dtype is not 0, no tensor begins like None.
static int put_tensor(Key *key, const Described *d) {
  const size_t row = sizeof(int64_t) * (size_t)d->axes;
  const int contiguous = is_contiguous(d);
  const uint32_t rest = (uint32_t)d->axes << 8 | (uint32_t)((uintptr_t)d->data & 15) << 1 | (uint32_t)contiguous;
  return put(key, &d->dtype, sizeof d->dtype) && put(key, &d->device, sizeof d->device) && put(key, &rest, sizeof rest)
         && put(key, d->sizes, row) && (contiguous || put(key, d->strides, row));
}

// 1 if the tensor is in the key. 0 if Python has to make the key: the tensor is not plain, or DLPack cannot describe it
// (it is sparse, on device "meta", or wrapped by a transform). -1 with any other exception.
static int put_argument(Key *key, PyObject *t, int *wants_gradient) {
  static const uint32_t none = 0;
  Described d;
  if (t == Py_None) return put(key, &none, sizeof none);
  if (!is_plain(t)) return 0;
  if (exchange->describe(t, &d)) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return 0;
  }
  if (*wants_gradient == 0) {  // no tensor needed a gradient so far, and it would matter
    PyObject *wants = PyObject_GetAttr(t, requires_grad);
    if (!wants) return -1;
    *wants_gradient = wants == Py_True;
    Py_DECREF(wants);
  }
  return put_tensor(key, &d);
}

static int put_environment(Key *key) {
  const char *wish = getenv(PyBytes_AsString(environment));
  return !wish || put(key, wish, strlen(wish));
}

static PyObject *make_key_in_python(PyObject *const *args, Py_ssize_t count) {
  PyObject *given = PyTuple_New(count), *key = NULL;
  for (Py_ssize_t i = 0; given && i < count; i++) PyTuple_SetItem(given, i, Py_NewRef(args[i]));
  if (given) key = PyObject_CallObject(look, given);
  Py_XDECREF(given);
  return key;
}

PyDoc_STRVAR(key_doc, "key(gradients, *groups): as fastcall.look, which it calls if a tensor is not plain.");
static PyObject *make_key(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Key key;
  key.used = 1;  // the first byte: whether autograd has to record the call
  if (count < 1) return PyErr_Format(PyExc_TypeError, "key: expected gradients and groups of tensors");
  int wants_gradient = args[0] == Py_True ? 0 : -1;
  for (Py_ssize_t g = 1; g < count; g++) {
    if (!PyTuple_Check(args[g])) return PyErr_Format(PyExc_TypeError, "key: expected tuples, got %R", args[g]);
    for (Py_ssize_t i = 0; i < PyTuple_Size(args[g]); i++) {
      int known = put_argument(&key, PyTuple_GetItem(args[g], i), &wants_gradient);
      if (known < 0) return NULL;
      if (!known) return make_key_in_python(args, count);
    }
  }
  if (!put_environment(&key)) return make_key_in_python(args, count);
  key.bytes[0] = wants_gradient == 1;
  return PyBytes_FromStringAndSize((const char *)key.bytes, (Py_ssize_t)key.used);
}

// 1, or 0 with an exception.
static int address_of(PyObject *t, uint64_t *address) {
  Described d;
  *address = 0;
  if (t == Py_None) return 1;
  if (is_plain(t)) {
    if (exchange->describe(t, &d)) return 0;
    *address = (uint64_t)(uintptr_t)d.data + d.offset;
    return 1;
  }
  PyObject *number = PyObject_CallMethodObjArgs(t, data_ptr, NULL);
  if (!number) return 0;
  *address = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return !PyErr_Occurred();
}
