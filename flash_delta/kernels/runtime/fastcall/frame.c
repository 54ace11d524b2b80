// A call's launches on NVIDIA's driver. All memory that a Frame points to follows it.
typedef struct { unsigned id; char padding[4]; int value[16]; } Attribute;  // CUlaunchAttribute
typedef struct {                                                            // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void *stream;
  const Attribute *attributes;
  unsigned count;
} Config;
typedef struct { int64_t word; uint64_t offset; } Inner;              // an address at an offset from the one in `word`
typedef struct { int64_t word; uint64_t address; void *map; } Moved;  // a descriptor, and the address that it has now
typedef struct { Config *config; void *function; void **parameters; } Launch;
typedef struct {
  int (*launch)(const Config *, void *function, void **parameters, void **extra);  // cuLaunchKernelEx
  int (*replace)(void *map, void *address);                                        // cuTensorMapReplaceAddress
  uint64_t *words;  // addresses of tensors, of places in spare memory, and inner ones
  uint64_t *places;
  Inner *inner;
  Moved *moved;
  Launch *launches;
  void **parameters;  // of all launches
  int64_t tensors, spare, inners, moves, count, values, bytes;
  int64_t done;  // if the driver refused a launch: its number, to continue there; -1: it refused a descriptor
} Frame;

enum { ALIGNED = 64, MAP = 128 };  // alignment and size of descriptors, in bytes
// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: it may start before the previous launch has ended.
static const Attribute overlapping = {6, {0}, {1}};

static Frame *frame_of(PyObject *bytes) {
  if (!PyByteArray_Check(bytes)) return (void *)PyErr_Format(PyExc_TypeError, "expected a frame, got %R", bytes);
  return (Frame *)(((uintptr_t)PyByteArray_AsString(bytes) + ALIGNED - 1) / ALIGNED * ALIGNED);
}

static int write_group(const Frame *f, PyObject *group, int64_t *written) {
  if (!PyTuple_Check(group)) {
    PyErr_Format(PyExc_TypeError, "launch: expected tuples of tensors, got %R", group);
    return 0;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(group); i++) {
    if (*written == f->tensors + f->spare) {
      PyErr_Format(PyExc_ValueError, "launch: expected %lld tensors, got more", (long long)*written);
      return 0;
    }
    if (!address_of(PyTuple_GetItem(group, i), f->words + (*written)++)) return 0;
  }
  return 1;
}

static int write_addresses(const Frame *f, PyObject *memory, PyObject *const *groups, Py_ssize_t count) {
  int64_t written = 0;
  for (Py_ssize_t g = 0; g < count; g++)
    if (!write_group(f, groups[g], &written)) return 0;
  if (memory != Py_None) {
    uint64_t start;
    if (!address_of(memory, &start)) return 0;
    for (int64_t i = 0; i < f->spare && written == f->tensors + i; i++) f->words[written++] = start + f->places[i];
  }
  if (written != f->tensors + f->spare) {
    PyErr_Format(PyExc_ValueError, "launch: expected %lld tensors, got %lld", (long long)(f->tensors + f->spare),
                 (long long)written);
    return 0;
  }
  for (int64_t i = 0; i < f->inners; i++) f->words[written + i] = f->words[f->inner[i].word] + f->inner[i].offset;
  return 1;
}

// Returns the driver's first error, or 0. It does not touch Python objects.
static int launch_all(Frame *f, void *stream) {
  int status = 0;
  const int64_t first = f->done < 0 ? 0 : f->done;
  f->done = -1;
  for (Moved *m = f->moved; m < f->moved + f->moves; m++) {
    const uint64_t address = f->words[m->word];
    if (address == m->address) continue;
    if ((status = f->replace(m->map, (void *)(uintptr_t)address))) return status;
    m->address = address;
  }
  for (f->done = first; f->done < f->count; f->done++) {
    const Launch *l = f->launches + f->done;
    l->config->stream = stream;
    if ((status = f->launch(l->config, l->function, l->parameters, NULL))) return status;
  }
  f->done = 0;
  return 0;
}

PyDoc_STRVAR(launch_doc, "launch(frame, stream, memory, *groups) -> int: the driver's status, 0 if all is launched.\n\n"
                         "frame: no other thread may use it.  memory: spare memory with the frame's places; None if\n"
                         "it has none. After an error the next call continues there.");
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  if (count < 3) return PyErr_Format(PyExc_TypeError, "launch: expected a frame, a stream, memory and groups");
  Frame *f = frame_of(args[0]);
  if (!f) return NULL;
  void *stream = PyLong_AsVoidPtr(args[1]);
  if (PyErr_Occurred() || !write_addresses(f, args[2], args + 3, count - 3)) return NULL;
  int status;
  Py_BEGIN_ALLOW_THREADS  // a launch waits if the queue is full, and emptying it may need another thread
  status = launch_all(f, stream);
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(status);
}

// Adjusts a pointer into a frame that was copied to an address ``by`` bytes higher.
#define MOVE(pointer) ((pointer) = (void *)((char *)(pointer) + by))

PyDoc_STRVAR(copy_doc, "copy(frame) -> bytearray: another frame for the same call. Another thread may be launching\n"
                       "the first one. It changes only addresses and the stream, which every launch writes again.");
static PyObject *copy(PyObject *self, PyObject *from) {
  const Frame *old = frame_of(from);
  if (!old) return NULL;
  PyObject *made = PyByteArray_FromStringAndSize(NULL, PyByteArray_Size(from));
  if (!made) return NULL;
  Frame *f = frame_of(made);
  memcpy(f, old, (size_t)old->bytes);
  const intptr_t by = (char *)f - (char *)old;
  MOVE(f->words), MOVE(f->places), MOVE(f->inner), MOVE(f->moved), MOVE(f->launches), MOVE(f->parameters);
  for (int64_t i = 0; i < f->count; i++) MOVE(f->launches[i].config), MOVE(f->launches[i].parameters);
  for (int64_t i = 0; i < f->values; i++) MOVE(f->parameters[i]);
  for (int64_t i = 0; i < f->moves; i++) MOVE(f->moved[i].map), f->moved[i].address = 0;
  f->done = 0;
  return made;
}

PyDoc_STRVAR(done_doc, "done(frame) -> int: the number of the launch that the driver refused; -1: a descriptor.");
static PyObject *done(PyObject *self, PyObject *frame) {
  const Frame *f = frame_of(frame);
  return f ? PyLong_FromLongLong(f->done) : NULL;
}
