// The CUDA runtime's calls that libtorch makes, of the device in device.h.

#include "device.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <unordered_map>

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fails(cudaError_t error) { return last_error = error; }

stand_in::Stream* of(cudaStream_t stream) {
  // The default stream has two more names.
  if (stream == cudaStreamLegacy || stream == cudaStreamPerThread) return nullptr;
  return reinterpret_cast<stand_in::Stream*>(stream);
}
stand_in::Event* of(cudaEvent_t event) { return reinterpret_cast<stand_in::Event*>(event); }

template <class Value>
cudaError_t gives(Value* where, Value value) {
  *where = value;
  return cudaSuccess;
}

std::unordered_map<const void*, std::string>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, std::string>();
  return *names;
}

[[noreturn]] cudaError_t refuse_kernel(const void* kernel) {
  stand_in::refuse("the kernel " + kernel_names()[kernel] + " was to be launched");
}

}  // namespace

extern "C" {

// The device.
cudaError_t cudaGetDeviceCount(int* count) { return gives(count, stand_in::devices()); }
cudaError_t cudaGetDevice(int* ordinal) { return gives(ordinal, stand_in::current_device()); }
cudaError_t cudaSetDevice(int ordinal) {
  return stand_in::set_current_device(ordinal) ? cudaSuccess : fails(cudaErrorInvalidDevice);
}
cudaError_t cudaDriverGetVersion(int* version) { return gives(version, CUDART_VERSION); }
cudaError_t cudaRuntimeGetVersion(int* version) { return gives(version, CUDART_VERSION); }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return gives(can, 0); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return gives(value, 0); }
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  std::snprintf(text, size, "%s", "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  *found = {};
  std::snprintf(found->name, sizeof found->name, "%s", stand_in::device_name().c_str());
  found->totalGlobalMem = stand_in::total_bytes();
  found->major = stand_in::compute_capability();
  found->warpSize = 32;
  found->multiProcessorCount = 108;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  for (int axis = 0; axis < 3; ++axis) {
    found->maxThreadsDim[axis] = axis == 2 ? 64 : 1024;
    found->maxGridSize[axis] = axis == 0 ? 2147483647 : 65535;
  }
  found->sharedMemPerBlock = 48 << 10;
  found->sharedMemPerBlockOptin = 163 << 10;
  found->sharedMemPerMultiprocessor = 164 << 10;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->l2CacheSize = 40 << 20;
  found->textureAlignment = 512;
  found->unifiedAddressing = found->canMapHostMemory = found->concurrentKernels = 1;
  found->asyncEngineCount = 2;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ++stand_in::counts().waits;
  stand_in::finish_all();
  return cudaSuccess;
}

// Errors.
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError"; }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "refused by the stand-in device"; }

// Memory.
cudaError_t cudaMalloc(void** start, size_t bytes) {
  *start = stand_in::allocate(bytes);
  return *start ? cudaSuccess : fails(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* start) {
  if (start) stand_in::free(start);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  gives(free_bytes, stand_in::free_bytes());
  return gives(total_bytes, stand_in::total_bytes());
}
cudaError_t cudaHostAlloc(void** start, size_t bytes, unsigned) {
  *start = stand_in::allocate_page_locked(bytes);
  return *start ? cudaSuccess : fails(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void* start) {
  if (start) stand_in::free_page_locked(start);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* start, size_t bytes, unsigned) {
  stand_in::lock_pages(start, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* start) {
  stand_in::unlock_pages(start);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* start) {
  *found = {};
  found->type = stand_in::is_on_device(start)     ? cudaMemoryTypeDevice
                : stand_in::is_page_locked(start) ? cudaMemoryTypeHost
                                                  : cudaMemoryTypeUnregistered;
  found->device = std::max(stand_in::device_of(start), 0);
  found->devicePointer = found->hostPointer = const_cast<void*>(start);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  stand_in::copy(to, from, bytes, of(stream));
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  ++stand_in::counts().waits;
  stand_in::copy(to, from, bytes, nullptr);
  stand_in::finish(nullptr);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* start, int value, size_t bytes, cudaStream_t stream) {
  stand_in::fill(start, value, bytes, of(stream));
  return cudaSuccess;
}
cudaError_t cudaMemset(void* start, int value, size_t bytes) { return cudaMemsetAsync(start, value, bytes, nullptr); }

// Streams.
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  gives(least, 0);
  return gives(greatest, -5);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return gives(stream, reinterpret_cast<cudaStream_t>(stand_in::make_stream(!(flags & cudaStreamNonBlocking))));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  stand_in::destroy(of(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return stand_in::is_done(of(stream)) ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++stand_in::counts().waits;
  stand_in::finish(of(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  stand_in::wait_for(of(stream), of(event));
  return cudaSuccess;
}
// What is captured is done all the same, and comes to no graph.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return stand_in::begin_capture(of(stream)) ? cudaSuccess : fails(cudaErrorIllegalState);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  return stand_in::end_capture(of(stream)) ? cudaSuccess : fails(cudaErrorIllegalState);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return gives(status, stand_in::captures(of(stream)) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* number, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (number) *number = 1;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// Events.
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return gives(event, reinterpret_cast<cudaEvent_t>(stand_in::make_event())); }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  stand_in::record(of(event), of(stream));
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return stand_in::is_reached(of(event)) ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ++stand_in::counts().waits;
  stand_in::reach(of(event));
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = stand_in::between_ms(of(from), of(to));
  return std::isnan(*ms) ? cudaErrorNotReady : cudaSuccess;
}

// Kernels, which only have names here.
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernel_names()[kernel] = name;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t* found, const void* kernel) {
  return gives(found, reinterpret_cast<cudaKernel_t>(const_cast<void*>(kernel)));
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return refuse_kernel(kernel); }
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return refuse_kernel(kernel); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return refuse_kernel(kernel); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) { return gives(found, cudaFuncAttributes{}); }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

// The driver's functions, by name; the later of two versions has a suffix.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  *found = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*found) *found = dlsym(RTLD_DEFAULT, name);
  if (status) *status = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
