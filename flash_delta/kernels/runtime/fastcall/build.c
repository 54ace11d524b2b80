// Builds a frame. Letters give the types of a kernel's parameters: those of Python's `struct` for numbers, P for a
// pointer, M for a descriptor, followed by its numbers as two tuples, x for a constant, which is no parameter. The
// items of a tuple are in parentheses.
typedef struct {
  Frame *frame;
  int64_t count;       // of the call's tensors
  uint64_t *constant;  // the next free place for a constant,
  void **parameter;    // a parameter,
  unsigned char *map;  // a descriptor
  Config *config;      // the config of the first launch
  Encode *encode;
  uint64_t address;    // of any tensor, for descriptors until the launch
  const Tiles *tiles;  // those of the next descriptor of the kernel
} Builder;

// The number of the word that will hold an address, or -1 with an exception. `place`: the number of a tensor, and the
// offset in it, in bytes.
static int64_t word_of(const Builder *b, PyObject *place) {
  Frame *f = b->frame;
  Inner at;
  if (!PyTuple_Check(place)) return PyErr_Format(PyExc_TypeError, "expected a pointer's place, got %R", place), -1;
  if (!PyArg_ParseTuple(place, "LK", &at.word, &at.offset)) return -1;
  if (at.word < 0 || at.word >= b->count)
    return PyErr_Format(PyExc_ValueError, "expected the number of a tensor of the call, got %R", place), -1;
  if (!at.offset) return at.word;
  f->inner[f->inners] = at;
  return f->tensors + f->spare + f->inners++;
}

static int put_pointer(Builder *b, PyObject *value) {
  const int64_t word = word_of(b, value);
  if (word < 0) return 0;
  *b->parameter++ = b->frame->words + word;
  return 1;
}


static int put_number(Builder *b, char kind, PyObject *value) {
  const int is_signed = kind >= 'a', lower = kind | 32;
  const int bits = lower == 'b' ? 8 : lower == 'h' ? 16 : lower == 'i' ? 32 : lower == 'q' ? 64 : 0;
  int64_t number = 0;
  if (kind == 'f') {
    const float real = (float)PyFloat_AsDouble(value);
    memcpy(&number, &real, sizeof real);
  } else if (kind == 'd') {
    const double real = PyFloat_AsDouble(value);
    memcpy(&number, &real, sizeof real);
  } else if (bits) {
    number = is_signed ? PyLong_AsLongLong(value) : (int64_t)PyLong_AsUnsignedLongLong(value);
    const int64_t above = is_signed ? number >> (bits - 1) : bits == 64 ? 0 : (int64_t)((uint64_t)number >> bits);
    if (!PyErr_Occurred() && above != 0 && !(is_signed && above == -1))
      PyErr_Format(PyExc_OverflowError, "expected a number of %d bits, got %R", bits, value);
  } else {
    PyErr_Format(PyExc_ValueError, "expected a kind of parameters, got %c", kind);
  }
  if (PyErr_Occurred()) return 0;
  *b->constant = (uint64_t)number;
  *b->parameter++ = b->constant++;
  return 1;
}

static int refuse(const char *how_many, PyObject *value) {
  PyErr_Format(PyExc_ValueError, "expected %s parameters, got %R", how_many, value);
  return 0;
}

static int put_value(Builder *b, const char **letters, PyObject *value);
static int put_tuple(Builder *b, const char **letters, PyObject *values);

// `value`: the tensor's place, sizes and strides. Kernels take the descriptor, and then also these numbers.
static int put_map(Builder *b, const char **letters, PyObject *value) {
  PyObject *place, *shape, *strides;
  Moved *m = b->frame->moved + b->frame->moves;
  if (!PyArg_ParseTuple(value, "OO!O!", &place, &PyTuple_Type, &shape, &PyTuple_Type, &strides)) return 0;
  if (!write_map(b->encode, b->map, b->tiles++, shape, strides, m->address = b->address)) return 0;
  if ((m->word = word_of(b, place)) < 0) return 0;
  *b->parameter++ = m->map = b->map;
  b->map += MAP;
  b->frame->moves++;
  return put_tuple(b, letters, shape) && put_tuple(b, letters, strides);
}

static int put_tuple(Builder *b, const char **letters, PyObject *values) {
  if (!PyTuple_Check(values)) {
    PyErr_Format(PyExc_TypeError, "expected a tuple of parameters, got %R", values);
    return 0;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(values); i++)
    if (!put_value(b, letters, PyTuple_GetItem(values, i))) return 0;
  if (*(*letters)++ == ')') return 1;
  return refuse("more", values);
}

static int put_value(Builder *b, const char **letters, PyObject *value) {
  const char kind = *(*letters)++;
  switch (kind) {
    case 'x': return 1;
    case '(': return put_tuple(b, letters, value);
    case 'P': return put_pointer(b, value);
    case 'M': return put_map(b, letters, value);
    case '\0':
    case ')': return refuse("fewer", value);
    default: return put_number(b, kind, value);
  }
}

// The `BoundStep` of cuda_driver.py. There the kernel is a separate tuple.
typedef struct {
  unsigned grid[3];
  const char *name;
  void *function;
  unsigned threads, shared, scratch;
  int overlaps;
  const char *letters;
  const Tiles *tiles;
  Py_ssize_t described;  // bytes
  PyObject *values;
} Step;

static int read_step(PyObject *from, Step *s) {
  return PyArg_ParseTuple(from, "(sKIIpIyy#)(III)O", &s->name, &s->function, &s->threads, &s->shared,
                          &s->overlaps, &s->scratch, &s->letters, &s->tiles, &s->described, s->grid, s->grid + 1,
                          s->grid + 2, &s->values);
}

static int put_launch(Builder *b, const Step *s) {
  Frame *f = b->frame;
  Launch *l = f->launches + f->count++;
  const char *letters = s->letters + 1;  // after the parenthesis around all
  *l->config = (Config){{s->grid[0], s->grid[1], s->grid[2]}, {s->threads, 1, 1}, s->shared, NULL, &overlapping,
                        (unsigned)s->overlaps};
  l->function = s->function;
  l->parameters = b->parameter;
  b->tiles = s->tiles;
  if (!put_tuple(b, &letters, s->values)) return 0;
  void *const scratch = f->words + f->tensors + f->spare - 1, *const none = b->constant++;  // this constant is 0
  *b->parameter++ = s->scratch ? scratch : none;
  *b->parameter++ = none;  // for profilers
  return 1;
}

// How many items of every kind launches need.
typedef struct { size_t pointers, maps, numbers, launches; } Counts;

static int count_values(PyObject *steps, Counts *counts) {
  Step s;
  for (Py_ssize_t i = 0; i < PyTuple_Size(steps); i++) {
    if (!read_step(PyTuple_GetItem(steps, i), &s)) return 0;
    for (const char *letter = s.letters; *letter; letter++) {
      counts->pointers += *letter == 'P';
      counts->maps += *letter == 'M';
      counts->numbers += *letter != 'P' && *letter != 'M' && *letter != 'x' && *letter != '(' && *letter != ')';
    }
    counts->launches++;
  }
  return 1;
}

static void *take(char **at, size_t number, size_t bytes) {
  void *taken = *at;
  *at += number * bytes;
  return taken;
}

// Divides the memory among all arrays. Called first with address 0, it counts the bytes.
static size_t lay_out(char *start, const Counts *n, Builder *b, Frame *f) {
  char *at = start;
  const size_t words = (size_t)(f->tensors + f->spare), inner = n->pointers + n->maps;
  take(&at, 1, sizeof(Frame));
  f->words = take(&at, words + inner, sizeof *f->words);
  f->places = take(&at, (size_t)f->spare, sizeof *f->places);
  f->inner = take(&at, inner, sizeof *f->inner);
  f->moved = take(&at, n->maps, sizeof *f->moved);
  f->launches = take(&at, n->launches, sizeof *f->launches);
  f->parameters = b->parameter = take(&at, inner + n->numbers + 2 * n->launches, sizeof *b->parameter);
  b->constant = take(&at, n->numbers + n->launches, sizeof *b->constant);
  b->config = take(&at, n->launches, sizeof *b->config);
  at = start + (at - start + ALIGNED - 1) / ALIGNED * ALIGNED;
  b->map = take(&at, n->maps, MAP);
  return (size_t)(at - start);
}

static int fill(Builder *b, PyObject *steps, PyObject *places) {
  Frame *f = b->frame;
  Step s;
  for (Py_ssize_t i = 0; i < f->spare; i++) f->places[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(places, i));
  for (Py_ssize_t i = 0; i < PyTuple_Size(steps); i++) {
    f->launches[i].config = b->config + i;
    if (!read_step(PyTuple_GetItem(steps, i), &s) || !put_launch(b, &s)) return 0;
  }
  f->values = b->parameter - f->parameters;
  return !PyErr_Occurred();
}

PyDoc_STRVAR(frame_doc, "frame(launch, replace, encode, steps, tensors, places, scratch, address) -> bytearray, for\n"
                        "`launch`.\n\nlaunch, replace, encode: the driver's functions.  steps: each launch, as\n"
                        "cuda_driver.BoundStep.  tensors: how many the call has; the last ones may be in spare\n"
                        "memory, at `places`.  scratch: whether the last place is scratch memory, which is no tensor.\n"
                        "address: any that the driver describes.");
static PyObject *make_frame(PyObject *self, PyObject *args) {
  PyObject *steps, *places, *made;
  Frame f = {0};
  Builder b = {0};
  Counts counts = {0};
  int scratch;
  long long tensors;
  if (!PyArg_ParseTuple(args, "KKKO!LO!pK", &f.launch, &f.replace, &b.encode, &PyTuple_Type, &steps, &tensors,
                        &PyTuple_Type, &places, &scratch, &b.address))
    return NULL;
  b.count = tensors;
  f.spare = PyTuple_Size(places);
  f.tensors = b.count + scratch - f.spare;
  if (f.tensors < 0) return PyErr_Format(PyExc_ValueError, "frame: expected a tensor for every place");
  if (!count_values(steps, &counts)) return NULL;
  const size_t bytes = lay_out(NULL, &counts, &b, &f);
  if (!(made = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)bytes + ALIGNED))) return NULL;
  b.frame = frame_of(made);
  memset(b.frame, 0, bytes);
  lay_out((char *)b.frame, &counts, &b, &f);
  f.bytes = (int64_t)bytes;
  *b.frame = f;
  if (!fill(&b, steps, places)) Py_CLEAR(made);
  return made;
}
