/* A CUDA driver that runs nothing, and keeps what the last launch was given.

   `fake_next` tells the sizes of the parameters of the kernel that is loaded next. */
#include <stdint.h>
#include <string.h>

#include "cuda.h"

typedef struct {
  int count, sizes[512];
} Kernel;

static Kernel next, kernels[64];
static int loaded;
static unsigned char seen[1 << 16];
static long used;
static char busy; /* Python's lock is let go in a launch, so several may be here at once */
volatile int launches, fails;

void fake_next(int count, const int *sizes) {
  next.count = count;
  memcpy(next.sizes, sizes, count * sizeof(int));
}

long fake_seen(void *to) {
  memcpy(to, seen, used);
  return used;
}

static void see(const void *data, long size) {
  memcpy(seen + used, data, size);
  used += size;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  Kernel *kernel = (Kernel *)f;
  if (fails) return fails;
  while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) continue;
  launches++;
  used = 0;
  see(config, 7 * sizeof(int)); /* grid, threads, shared memory */
  see(&config->hStream, sizeof(CUstream));
  see(&config->numAttrs, sizeof(int));
  for (int n = 0; n < kernel->count; n++) see(params[n], kernel->sizes[n]);
  __atomic_clear(&busy, __ATOMIC_RELEASE);
  return 0;
}

CUresult cuFuncGetParamInfo(CUfunction f, size_t n, size_t *offset, size_t *size) {
  Kernel *kernel = (Kernel *)f;
  if (n >= (size_t)kernel->count) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0, *size = kernel->sizes[n];
  return 0;
}

/* The address, then all else that it is made of. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *shape, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  uint64_t *words = (uint64_t *)map;
  memset(map, 0, sizeof(CUtensorMap));
  words[0] = (uint64_t)address;
  words[1] = type | rank << 8 | swizzle << 16 | promotion << 24 | (uint64_t)fill << 32;
  for (cuuint32_t n = 0; n < rank; n++) {
    words[2 + n] = shape[n] * 1000003 + box[n];
    if (n + 1 < rank) words[8 + n] = strides[n];
  }
  return 0;
}

CUresult cuPointerGetAttribute(void *to, CUpointer_attribute which, CUdeviceptr address) {
  *(CUdeviceptr *)to = address;
  return 0;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  kernels[loaded] = next;
  *f = (CUfunction)&kernels[loaded++];
  return 0;
}

CUresult cuDeviceGetAttribute(int *to, CUdevice_attribute which, CUdevice device) {
  *to = which == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 65536;
  return 0;
}

CUresult cuFuncGetAttribute(int *to, CUfunction_attribute which, CUfunction f) {
  *to = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}

CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "as told", 0; }
CUresult cuDriverGetVersion(int *to) { return *to = 13000, 0; }
CUresult cuCtxGetCurrent(CUcontext *to) { return *to = (CUcontext)1, 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
CUresult cuCtxGetDevice(CUdevice *to) { return *to = 0, 0; }
CUresult cuCtxGetLimit(size_t *to, CUlimit limit) { return *to = 0, 0; }
CUresult cuCtxSetLimit(CUlimit limit, size_t to) { return 0; }
CUresult cuDeviceGet(CUdevice *to, int n) { return *to = 0, 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *to, CUdevice device) { return *to = (CUcontext)1, 0; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int to) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache to) { return 0; }
CUresult cuModuleLoadData(CUmodule *to, const void *image) { return *to = (CUmodule)1, 0; }
CUresult cuModuleUnload(CUmodule module) { return 0; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *to) { return *to = 0, 0; }
