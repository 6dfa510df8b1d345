#!/bin/sh
# Installs Python packages into a folder, whole or not at all.
#
#     sh runtime/fetch.sh FOLDER PIP_ARGUMENT...
#
# The stamp in the folder is written last and says what was installed. With the right stamp a call does
# nothing; without it, as after an interruption, the folder is made anew.
set -eu

folder=$1
shift
stamp=$folder/.installed

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$*" ]; then
    exit 0
fi

echo "fetching into $folder: $*" >&2
rm -rf "$folder"
mkdir -p "$folder/.partial"
PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    python3 -m pip install --quiet --target "$folder/.partial" "$@"
mv "$folder"/.partial/* "$folder"
rmdir "$folder/.partial"
echo "$*" > "$stamp.new"
mv "$stamp.new" "$stamp"
