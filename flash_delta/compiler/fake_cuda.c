// Stands for NVIDIA's driver where there is none: writes down what is launched. A "function" is an array of numbers:
// how many parameters a kernel has, then the bytes of each.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct { unsigned id; char padding[4]; unsigned char value[64]; } Attribute;
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  unsigned count;
} Config;

unsigned char written[1 << 16];
size_t used;
int failing;  // status of the next launch
void *context;                  // the last that was made current
static _Thread_local void *current;

static void put(const void *from, size_t bytes) {
  if (bytes <= sizeof written - used) memcpy(written + used, from, bytes);
  used = (used + bytes) % sizeof written;
}

int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
  int status = failing;
  failing = 0;
  if (status) return status;
  put(config, 28);  // and no padding
  put(&config->stream, 8);
  put(&config->count, 4);
  for (unsigned i = 0; i < config->count; i++) {
    put(&config->attributes[i].id, 4);
    put(config->attributes[i].value, 4);
  }
  const uint64_t *sizes = function;
  for (uint64_t i = 0; i < sizes[0]; i++) put(parameters[i], sizes[i + 1]);
  return extra != 0;
}

int cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address, const uint64_t *shape,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  if (!current) return 201;  // CUDA_ERROR_INVALID_CONTEXT
  uint64_t rest = 5381;
  memset(map, 0, 128);
  for (unsigned i = 0; i < rank; i++) {
    rest = rest * 33 + shape[i] + 7 * box[i] + 5 * steps[i];
    if (i + 1 < rank) rest = rest * 33 + strides[i];
  }
  map[0] = (uint64_t)address;
  map[2] = rest;
  map[3] = type + 100 * rank + 1000 * interleave + 10000 * swizzle + 100000 * promotion + 1000000 * fill;
  return 0;
}

int cuTensorMapReplaceAddress(uint64_t *map, void *address) {
  map[0] = (uint64_t)address;
  return 0;
}

int cuGetErrorString(int status, const char **text) {
  *text = "all is fake";
  return 0;
}
int cuPointerGetAttribute(void **value, int attribute, void *address) {
  *value = address;
  return 0;
}
int cuCtxGetCurrent(void **found) {
  *found = current;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **primary, int device) {
  *primary = (void *)(size_t)(16 + device);
  return 0;
}
int cuCtxSetCurrent(void *chosen) {
  current = context = chosen;
  return 0;
}

// A kernel of any code has no parameters. Code that begins with a question mark is refused.
static const uint64_t no_parameters[] = {0};
int cuModuleLoadData(void **module, const char *code) {
  *module = (void *)code;
  return *code == '?' ? 200 : 0;  // CUDA_ERROR_INVALID_IMAGE
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)no_parameters;
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute ? 0 : 1024;  // threads
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = 232448;  // bytes of shared memory
  return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int preferred) { return 0; }
int cuCtxGetDevice(int *device) { return *device = 0; }

int cuDriverGetVersion(int *version) {
  *version = 13020;
  return 0;
}

// What Triton's module names and no test calls.
#define UNUSED(name) int name(void) { return 1; }
UNUSED(cuCtxGetLimit) UNUSED(cuCtxSetLimit) UNUSED(cuDeviceGet) UNUSED(cuModuleUnload)
UNUSED(cuOccupancyMaxActiveClusters) UNUSED(cuStreamIsCapturing)
UNUSED(cuInit) UNUSED(cuDeviceGetCount) UNUSED(cuTensorMapEncodeIm2col)
