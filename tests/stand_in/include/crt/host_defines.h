// What the CUDA runtime's headers want of a compiler that is not NVIDIA's; the package that they come in lacks it.
#pragma once

#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDACB
