#!/bin/sh
# Makes sure that there is a libtorch to build with: the user's, where LIBTORCH names one, or else ours in
# .libtorch/, fetched on the first call. Run it from the root of the repository.
set -eu

version=2.11.0

# Prints the version of the libtorch in $1, as its Python package, its archive or its headers tell it.
version_of() {
    if [ -f "$1/version.py" ]; then
        sed -n "s/^__version__ = '\([0-9.]*\).*/\1/p" "$1/version.py"
    elif [ -f "$1/build-version" ]; then
        sed 's/+.*//' "$1/build-version"
    else
        cat "$1/include/torch/headeronly/version.h" "$1/include/torch/csrc/api/include/torch/version.h" 2>/dev/null |
            sed -n 's/^#define TORCH_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' | head -n 3 | paste -s -d . -
    fi
}

refuse() {
    echo "LIBTORCH=$LIBTORCH $1" >&2
    echo "Plimsoll needs libtorch $version. Unset LIBTORCH to have make fetch it into .libtorch/." >&2
    exit 1
}

if [ -z "${LIBTORCH:-}" ]; then
    # Enough to build and run without a GPU. The two CUDA packages are what libtorch's libraries name.
    exec sh runtime/fetch.sh .libtorch --no-deps \
        "torch==$version" nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85
fi

case $LIBTORCH in
    /*) ;;
    *) refuse "is not an absolute path." ;;
esac
[ -d "$LIBTORCH/lib" ] || refuse "holds no libtorch: there is no folder lib in it."
found=$(version_of "$LIBTORCH")
[ "$found" = "$version" ] || refuse "holds libtorch ${found:-of an unknown version}."
