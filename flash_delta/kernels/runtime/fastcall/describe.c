// Describes a tensor to the copy engine. Sizes and strides are in Python's order, the driver wants the last axis first.
typedef int Encode(void *map, int dtype, unsigned rank, void *address, const uint64_t *shape, const uint64_t *strides,
                   const unsigned *box, const unsigned *steps, int interleave, int swizzle, int promotion, int fill);
enum { AXES = 5, PROMOTED = 2 };  // the most axes; CU_TENSOR_MAP_L2_PROMOTION_L2_128B
typedef struct { unsigned dtype, bytes, swizzle, rank, box[AXES]; } Tiles;  // as a kernel wants them (cuda_driver.py)

// Writes the descriptor of a tensor at `address`, which must not be 0.
static int write_map(Encode *encode, void *map, const Tiles *t, PyObject *shape, PyObject *strides, uint64_t address) {
  static const unsigned steps[AXES] = {1, 1, 1, 1, 1};
  uint64_t sizes[AXES], bytes[AXES];
  if (t->rank != PyTuple_Size(shape) || t->rank != PyTuple_Size(strides)) {
    PyErr_Format(PyExc_ValueError, "expected sizes and strides of %u axes, got %R, %R", t->rank, shape, strides);
    return 0;
  }
  for (unsigned i = 0; i < t->rank; i++) {
    sizes[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(shape, t->rank - 1 - i));
    bytes[i] = t->bytes * PyLong_AsUnsignedLongLong(PyTuple_GetItem(strides, t->rank - 1 - i));
  }
  if (PyErr_Occurred()) return 0;
  const int status = encode(map, (int)t->dtype, t->rank, (void *)(uintptr_t)address, sizes, bytes + 1, t->box, steps, 0,
                            (int)t->swizzle, PROMOTED, 0);
  if (!status) return 1;
  PyErr_Format(PyExc_RuntimeError, "CUDA could not describe a tensor of %R with strides %R: error %d", shape, strides,
               status);
  return 0;
}
