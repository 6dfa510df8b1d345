// The CUDA driver's calls that libtorch and our copy engine make, of the device in device.h.

#include "device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

// Both have the same numbers for what happens here.
CUresult as_driver(cudaError_t error) { return static_cast<CUresult>(error); }

// The same of what our copy engine alone asks for, and no device does while a graph is captured.
CUresult outside_of_graphs(cudaError_t error) {
  if (stand_in::captures_any()) stand_in::refuse("something was copied, marked or waited for while a graph was captured");
  return as_driver(error);
}

template <class Value>
CUresult gives(Value* where, Value value) {
  *where = value;
  return CUDA_SUCCESS;
}

void* at(CUdeviceptr start) { return reinterpret_cast<void*>(start); }

// Memory that is mapped later is a file of no name, and its handle the file's descriptor.
int file_of(CUmemGenericAllocationHandle handle) { return static_cast<int>(handle); }

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1); }
int device_of(CUcontext context) { return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1; }

CUresult mapped(void* result) { return result == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return gives(version, CUDA_VERSION); }
CUresult cuDeviceGetCount(int* count) { return gives(count, stand_in::devices()); }
CUresult cuDeviceGet(CUdevice* found, int ordinal) {
  *found = ordinal;
  return ordinal >= 0 && ordinal < stand_in::devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char* text, int size, CUdevice) {
  std::snprintf(text, size, "%s", stand_in::device_name().c_str());
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) { return gives(bytes, stand_in::total_bytes()); }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { return gives(value, 0); }
// A device's only context is called by its number, from one.
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return gives(context, context_of(device)); }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  return gives(active, 1);
}
CUresult cuCtxSetCurrent(CUcontext context) {
  return stand_in::set_current_device(device_of(context)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return gives(context, context_of(stand_in::current_device())); }
CUresult cuGetErrorName(CUresult, const char** text) { return gives(text, "an error of the stand-in device"); }
CUresult cuGetErrorString(CUresult, const char** text) { return gives(text, "an error of the stand-in device"); }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr) {
  return gives(static_cast<void**>(value), static_cast<void*>(nullptr));
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return as_driver(cudaStreamCreateWithPriority(stream, flags, 0)); }
CUresult cuStreamDestroy_v2(CUstream stream) { return as_driver(cudaStreamDestroy(stream)); }
CUresult cuStreamSynchronize(CUstream stream) { return outside_of_graphs(cudaStreamSynchronize(stream)); }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return outside_of_graphs(cudaStreamWaitEvent(stream, event, flags));
}
CUresult cuEventCreate(CUevent* event, unsigned flags) { return as_driver(cudaEventCreateWithFlags(event, flags)); }
CUresult cuEventDestroy_v2(CUevent event) { return as_driver(cudaEventDestroy(event)); }
CUresult cuEventRecord(CUevent event, CUstream stream) { return outside_of_graphs(cudaEventRecord(event, stream)); }
CUresult cuEventQuery(CUevent event) { return outside_of_graphs(cudaEventQuery(event)); }
CUresult cuEventSynchronize(CUevent event) { return outside_of_graphs(cudaEventSynchronize(event)); }
CUresult cuEventElapsedTime_v2(float* ms, CUevent from, CUevent to) { return as_driver(cudaEventElapsedTime(ms, from, to)); }
CUresult cuMemHostAlloc(void** start, size_t bytes, unsigned flags) { return as_driver(cudaHostAlloc(start, bytes, flags)); }
CUresult cuMemFreeHost(void* start) { return as_driver(cudaFreeHost(start)); }
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return outside_of_graphs(cudaMemcpyAsync(to, at(from), bytes, cudaMemcpyDeviceToHost, stream));
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return outside_of_graphs(cudaMemcpyAsync(at(to), from, bytes, cudaMemcpyHostToDevice, stream));
}

// The one kernel that our copy engine has: it does nothing.
CUresult cuModuleLoadData(CUmodule* module, const void*) { return gives(module, CUmodule{}); }
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  if (std::strcmp(name, "rest")) stand_in::refuse("a kernel that this device does not have");
  return gives(function, CUfunction{});
}
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream stream, void**, void**) {
  stand_in::rest(reinterpret_cast<stand_in::Stream*>(stream));
  return CUDA_SUCCESS;
}

// Expandable segments: addresses are reserved, and memory is mapped there bit by bit.
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return gives(bytes, size_t{2} << 20);
}
CUresult cuMemAddressReserve(CUdeviceptr* start, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  stand_in::add_range(reserved, bytes);
  return gives(start, reinterpret_cast<CUdeviceptr>(reserved));
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
  stand_in::remove_range(at(start));
  munmap(at(start), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* made, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
  if (!stand_in::take_bytes(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  int file = memfd_create("stand-in", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) stand_in::refuse("the host has no memory left");
  return gives(made, static_cast<CUmemGenericAllocationHandle>(file));
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  stand_in::give_bytes(static_cast<size_t>(lseek(file_of(handle), 0, SEEK_END)));
  close(file_of(handle));
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  return mapped(mmap(at(start), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_of(handle), static_cast<off_t>(offset)));
}
CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc*, size_t) {
  if (mprotect(at(start), bytes, PROT_READ | PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
  stand_in::spoil(at(start), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
  stand_in::finish_all();
  return mapped(mmap(at(start), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0));
}

}  // extern "C"
