#!/bin/sh
# Packs what a machine with a GPU needs to check everything: gpu-bundle.sh BUILT ARCHIVE, of what cargo has built in a folder
set -eu
built=$1
archive=$2
size_max=$((40 << 20))
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bundle=$work/plimsoll-gpu
mkdir "$bundle"
strip --strip-all -o "$bundle/plimsoll" "$built/plimsoll"
sh "$here/../runtime/python/stage.sh" "$built/lib_plimsoll.so" "$bundle/python"
strip --strip-unneeded "$bundle/python/plimsoll/_plimsoll.abi3.so"
install -m 755 "$here/gpu-check.sh" "$bundle/gpu-check"
cp -r "$here/../configs" "$here/../LICENSE-APACHE" "$here/../LICENSE-MIT" "$bundle/"
tar --create --xz --owner=0 --group=0 --file "$archive" --directory "$work" plimsoll-gpu
size=$(wc -c < "$archive")
if [ "$size" -gt "$size_max" ]; then
    echo "gpu-bundle: $archive has $size bytes, at most $size_max are allowed" >&2
    exit 1
fi
echo "$archive: $size bytes"
