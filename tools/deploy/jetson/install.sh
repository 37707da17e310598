#!/usr/bin/env bash
# Installs the wheel that lies beside this script; fails where there is none, and build.sh goes on.
set -ex

if [ "$FORCE_BUILD" == "on" ]; then
    echo "the wheel is to be built"
    exit 1
fi

cd "$(dirname "$0")"
wheel=$(ls -t edgellm-*.whl | head -n 1)
[ -n "$wheel" ]
uv pip install "$(pwd)/${wheel}[${EDGELLM_EXTRA}]"
