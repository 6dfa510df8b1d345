#!/bin/sh
# Makes the libraries that libtorch's CUDA half is linked with: libraries.sh LIBTORCH OUT
set -eu
export LC_ALL=C
libtorch=$1
out=$2
wanted=$out/wanted
for library in torch_cuda c10_cuda torch_cpu torch_nvshmem caffe2_nvrtc torch_python; do
    [ ! -f "$libtorch/lib/lib$library.so" ] || nm -D --undefined-only "$libtorch/lib/lib$library.so"
done | awk '{ print $NF }' | sort -u > "$wanted"
# What is looked up by name for expandable segments, and not called here.
printf '%s\n' cuMemExportToShareableHandle cuMemImportFromShareableHandle cuMemRetainAllocationHandle \
    cuMemGetAllocationPropertiesFromHandle cuMemsetD32Async cuStreamWriteValue32 >> "$wanted"

# The library $1 of version $2: of the functions that are wanted and begin with, or have a version like, $3, and of the objects
# that follow.
library() {
    name=$(basename "$1") path=$out/$1 version=$2 pattern=$3
    shift 3
    { [ $# -eq 0 ] || nm --defined-only "$@"; } | awk '$2 == "T" { print $3 }' | sort > "$out/there"
    echo "$version { global: *; };" > "$out/map"
    {
        printf '%s\n' '#include <stdio.h>' '#include <stdlib.h>' \
            '#define WANTED(name) void name(void) { fputs("the stand-in device: " #name " was called\n", stderr); abort(); }'
        # What is asked of a library that nobody calls. The answers are those of 2.11's own cuDNN; the first chooses attention's
        # kernels.
        [ "$name" != libcudnn.so.9 ] ||
            printf 'size_t %s(void) { return %s; }\n' cudnnGetVersion 91900 cudnnGetCudartVersion 13000
        grep -E "$pattern" "$wanted" | sed 's/@.*//' | grep -v -E '^cudnnGet(Cudart)?Version$' | sort -u |
            comm -23 - "$out/there" | sed 's/.*/WANTED(&)/'
    } | ${CXX:-c++} -shared -fPIC -w -x c - -x none "$@" -o "$path" -Wl,-soname,"$name" -Wl,--version-script,"$out/map"
}

for form in late paced; do
    mkdir -p "$out/$form"
    library $form/libcudart.so.13 libcudart.so.13 '@libcudart.so.13$|^cu[A-Z]' \
        "$out/device.o" "$out/order.o" "$out/$form.o" "$out/runtime.o" "$out/driver.o"
done
for name in libcublas.so.13 libcublasLt.so.13 libcudnn.so.9 libcufft.so.12 libcusparse.so.12 libcurand.so.10 libcufile.so.0; do
    library "$name" "$name" "@$name\$"
done
library libcusparseLt.so.0 libcusparseLt.so.0 '^cusparseLt'
library libnccl.so.2 libnccl.so.2 '^nccl'
library libnvshmem_host.so.3 NVSHMEM '^nvshmem'
# The driver's functions stand beside the runtime's, of whichever form has been loaded before.
${CXX:-c++} -shared -o "$out/libcuda.so.1" -Wl,-soname,libcuda.so.1 -Wl,--no-as-needed "$out/late/libcudart.so.13"
