#!/usr/bin/env bash
# Builds the wheel of a repository, and installs it.
set -ex

if [ -z "$EDGELLM_REPOSITORY" ]; then
    echo "no edgellm-*.whl beside the Dockerfile, and no EDGELLM_REPOSITORY to build one of"
    exit 1
fi

git clone --depth=1 --branch="$EDGELLM_BRANCH" "$EDGELLM_REPOSITORY" /opt/edgellm
pip3 wheel --no-deps --wheel-dir /opt/wheels /opt/edgellm
rm -rf /opt/edgellm

cd /opt/wheels
uv pip install "$(ls -d "$(pwd)"/edgellm-*.whl)[${EDGELLM_EXTRA}]"
