#!/bin/sh
# Puts the package into a folder, as an installation would: stage.sh EXTENSION FOLDER
# EXTENSION is lib_plimsoll.so as cargo has built it; FOLDER is then for PYTHONPATH.
set -eu
package=$2/plimsoll
mkdir -p "$package"
for file in "$(dirname "$0")"/plimsoll/*.py "$(dirname "$0")"/plimsoll/*.pyi "$(dirname "$0")"/plimsoll/py.typed; do
    cp "$file" "$package/"
done
# Beside it first: a job that has loaded the one that is there keeps it.
cp "$1" "$package/_plimsoll.new"
mv "$package/_plimsoll.new" "$package/_plimsoll.abi3.so"
