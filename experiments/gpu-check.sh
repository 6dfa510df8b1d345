#!/bin/sh
# Checks Plimsoll on this machine's GPU, with the libtorch of its python3. Flags are those of `plimsoll gpu-check`.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
if ! found=$("$python" -c 'import torch; print(torch.__version__, torch.__path__[0])'); then
    echo "gpu-check: $python has no torch; PYTHON names one that has torch 2.11" >&2
    exit 1
fi
version=${found%% *}
folder=${found#* }
case $version in
2.11.*) ;;
*)
    echo "gpu-check: expected torch 2.11, $python has $version" >&2
    exit 1
    ;;
esac
# NVIDIA's libraries load some of their own by name alone, as cuDNN's attention does the compiler that it comes with.
for libraries in "$folder"/../nvidia/*/lib "$folder/lib"; do
    LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
done
export LD_LIBRARY_PATH
for policy in "$here"/configs/policies/*.policy; do
    set -- --policy "$policy" "$@"
done
exec "$here/plimsoll" gpu-check --python "$python" --package "$here/python" "$@"
