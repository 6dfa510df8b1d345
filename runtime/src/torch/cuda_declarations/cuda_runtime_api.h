// The few declarations of the CUDA runtime that libtorch's own headers mention, so that the allocator's interface can be
// read where no CUDA toolkit is installed. Nothing here is called: pointers and enumerations have the sizes that the C
// interface gives them, and that is all that matters to a table of virtual functions.
#pragma once

#include <stddef.h>

extern "C" {

enum cudaError { cudaSuccess = 0 };
typedef enum cudaError cudaError_t;
typedef struct CUstream_st* cudaStream_t;

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2
};

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4
};

// Weak: a program that has no CUDA runtime to link with still links.
__attribute__((weak)) cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);
__attribute__((weak)) cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind,
                                                  cudaStream_t stream);
__attribute__((weak)) cudaError_t cudaStreamSynchronize(cudaStream_t stream);
__attribute__((weak)) cudaError_t cudaGetLastError(void);
__attribute__((weak)) const char* cudaGetErrorString(cudaError_t error);
__attribute__((weak)) cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority);
__attribute__((weak)) cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
__attribute__((weak)) cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode);
__attribute__((weak)) cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status);

}  // extern "C"

namespace c10::cuda {
__attribute__((weak)) void c10_cuda_check_implementation(const int err, const char* file, const char* function,
                                                         const unsigned line, const bool include_device_assertions);
}
