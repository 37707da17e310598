#!/usr/bin/env bash
# On a GPU host without a network, in the checkout's root, with what `tools/heads/offline.sh` packed:
#   bash tools/heads/device.sh train      answers and a head; a quick look at tokens a round (some 9 minutes)
#   bash tools/heads/device.sh retrain    the same answers, other settings: MINUTES=5 MORE="--draft-vocabulary 8192"
#   bash tools/heads/device.sh measure    tokens a round by task, speeds, the same as an Orin (some 5 minutes)
# With two GPUs both answer, and parts of `measure` run side by side; GPUS=1: the first alone. A part ends with its seconds and stops no other.
# BACKEND=numpy tries all of it without a GPU, with a small model in place of SmolLM2 ($WORK/SmolLM2-135M-Instruct.Q4_1.gguf).
set -uo pipefail
begin=$(date +%s); OUT=${OUT:-/tmp/out}; W=${WORK:-/tmp/h35}; SITE=${SITE:-/tmp/site0}; FOLDER=${FOLDER:-.head35}; mkdir -p "$OUT" $W/json $W/logs
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false EDGELLM_CACHE_DIR=$W/cache PYTHONPATH=$SITE${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
export CUDA_DEVICE_MAX_CONNECTIONS=32
elapsed() { echo $(($(date +%s) - begin)); }
part() { # part NAME SECONDS COMMAND...: its seconds, of what is left of all; its output in the folder of logs
  local name=$1 seconds=$(($2 * ${SLOWER:-1})) left=$((LIMIT - $(elapsed))) from; from=$(elapsed); shift 2
  [ "$left" -lt 8 ] && { echo "== $name: no time left"; return 1; }
  [ "$seconds" -gt "$left" ] && seconds=$left
  timeout -s INT -k 5 "$seconds" bash -c '"$@"' _ "$@" >$W/logs/"$name.txt" 2>&1; local code=$?
  echo "== $name: ended with $code after $(($(elapsed) - from)) of $seconds s, at $(elapsed) s"
  [ $code = 0 ] || grep -vE "^seconds|^Loading" $W/logs/"$name.txt" | tail -n 4; return $code
}
if [ ! -e $SITE/.ready ]; then
  mkdir -p $SITE && python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target $SITE "$FOLDER"/wheels/*.whl &&
    python3 -m pip install -q --no-index --no-deps --no-build-isolation -e . && touch $SITE/.ready || exit 1
fi
gpus=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l)}; export BACKEND=${BACKEND:-tensorrt}; first=0; second=$((gpus > 1 ? 1 : 0)); echo "== installed at $(elapsed) s, $gpus GPUs"
MODEL=$W/SmolLM2-135M-Instruct.Q4_1.gguf; HEAD=$W/head; PROMPTS=$FOLDER/prompts
[ -e $MODEL ] || { cat $W/part.* | xz -dc >$MODEL.part && mv $MODEL.part $MODEL; } || { echo "a load is missing: $(ls $W)"; exit 1; }
sha256sum $MODEL # b179c952…10db53
[ -e $W/base ] || python3 -c "from pathlib import Path; from tools.bench.published_quality import as_checkpoint
as_checkpoint(Path('$MODEL'), Path('$W/base'), False)" # the file's values in float16
if [ ! -e $HEAD ] && [ -e $W/head.safetensors.00 ]; then
  mkdir -p $HEAD && cat $W/head.safetensors.0* >$HEAD/model.safetensors && cp "$FOLDER"/head/*.json $HEAD/
fi
[ ! -e $W/llama.00 ] || [ -e $W/llama ] || { mkdir $W/llama && cat $W/llama.0* | tar xJ -C $W/llama; }
echo "== a base at $(elapsed) s"
built() { # built MODEL ENGINES [options]: engines of all plans
  python3 -m edgellm build "$1" "$2" --draft $HEAD --draft-top-k 10 --draft-steps 6 --verify-tree-size 60 --kv-capacity 1024 --weights link --no-try --force "${@:3}"
}
bench() { # bench NAME SECONDS GPU ENGINES CONFIGURATIONS PROMPTS TOKENS [options]; with AS as another device
  local name=$1 seconds=$2 gpu=$3; [ -e "$4" ] || { echo "== $name: no engines"; return; }
  part "$name" "$seconds" env CUDA_VISIBLE_DEVICES="$gpu" python3 ${AS:-} -m edgellm bench "$4" --configurations "$5" --prompts "$6" --max-tokens "$7" \
    --backend "$BACKEND" --repeat 1 --seed 7 --output $W/json/"$name.json" "${@:8}"
}
figures() {
  compgen -G "$W/json/*.json" >/dev/null && python3 - $W/json/*.json <<'P'
import json, sys
for file in sys.argv[1:]:
    for each in json.load(open(file))["configurations"]:
        length, outputs, tasks = each.get("mean_acceptance_length", 1), each["outputs"], each["tasks"]
        print(f"{file.split('/')[-1][:-5]:24} {each['name']:14} {each['tokens_per_second']:8.1f} tokens/s {each['ratio'] or 1:6.3f} {length:6.3f} a round, {outputs['equal']} of {outputs['compared']} equal",
              *(f"{task} {of['mean_acceptance_length']:.2f}" for task, of in tasks.items() if len(tasks) > 1 and "mean_acceptance_length" in of))
P
}
learned() { # what comes back of a head that was trained: seven files at most, with answers and figures
  split -b 15000000 -d -a 2 $HEAD/model.safetensors "$OUT/head.safetensors." && cp $HEAD/config.json $HEAD/training.json $W/logs/
  grep -E "answers|engines|draft_vocab|held-out" $W/logs/train.txt; grep "^seconds" $W/logs/train.txt | awk 'NR % 4 == 1' | tail -n 12
}
train() { python3 -m tools.heads.train_eagle3 "$@" --backend "$BACKEND" --train-minutes 1.6 --batch-tokens 16384 --steps 5 --draft-vocabulary 16384 ${MORE:-}; }
look() { part build 20 built $W/base $W/all && bench quick "$1" $first $W/all chain:3,tree:10/4/16 "$PROMPTS/mt_bench.jsonl" "$2"; }
export -f built train; export HEAD MORE
many_tokens=${TOKENS:-128} few_tokens=$((${TOKENS:-128} / 2)) # of an answer
case $1 in
train)
  LIMIT=${LIMIT:-585} ENGINES=${ENGINES:-4}
  # All kernels are compiled here, and engines that do not answer side by side here do not either later.
  part try 60 python3 -c "
from pathlib import Path
from tools.heads.answers import Share, answer_side_by_side, build_engines
from tools.heads.settings import Asking
asking = Asking(answer_minutes=0.1, answer_tokens=64, own_prompts=0.2)
build_engines(Path('$W/base'), Path('$W/try'), asking)
answer_side_by_side(Path('$W/try'), '$BACKEND', None, set(), [Share(['What is the moon?'] * 512, asking, Path(f'$W/try-{n}.jsonl')) for n in range($ENGINES)])" ||
    ENGINES=1
  grep answers: $W/logs/try.txt
  part train 480 train $W/base $HEAD --work $W/work --prompts "$FOLDER/prompts.jsonl.xz" --held-out "$PROMPTS"/*.jsonl --processes $((3 * (second + 1))) \
    --engines "$ENGINES" --gpus $(seq 0 $second) --answer-count ${COUNT:-45000} --answer-minutes ${ANSWERS:-3.6} --minutes ${MINUTES:-6.5} &&
    { learned; look 60 $few_tokens; }
  [ -e $W/work/answers.jsonl ] && head -n 30000 $W/work/answers.jsonl | xz -3 -T0 >"$OUT/answers.jsonl.xz" ;;
retrain)
  LIMIT=${LIMIT:-585}; answers=$W/work/answers.jsonl; [ -e $answers ] || { answers=$W/answers.jsonl; xz -dc $W/answers.jsonl.xz >$answers; }
  part train 480 train $W/base $HEAD --work $W/work --answers $answers --minutes ${MINUTES:-5} && { learned; look 80 $many_tokens; } ;;
measure) # 20 of the prompts for speeds; what is worth most comes first
  LIMIT=${LIMIT:-280}; awk 'NR % 4 == 1' "$PROMPTS/mt_bench.jsonl" >$W/few.jsonl; many=chain:3,chain:5,tree:10/4/16,tree:10/6/60; two=chain:3,tree:10/4/16
  for model in base:$W/base file:$MODEL; do for draft in as-published int8 int4; do
    name=${model%%:*}-$draft; part "build-$name" 100 built "${model#*:}" "$W/$name" --draft-weights $draft &
  done; done; wait; echo "== built at $(elapsed) s"
  # Tokens a round depend on no time, so these share a GPU; speeds have one alone.
  bench mt-greedy 110 $first $W/base-as-published $many "$PROMPTS/mt_bench.jsonl" $many_tokens --temperature 0 &
  bench mt-0.7 110 $second $W/base-as-published $many "$PROMPTS/mt_bench.jsonl" $many_tokens --temperature 0.7 &
  bench humaneval 110 $first $W/base-as-published $two "$PROMPTS/humaneval.jsonl" $few_tokens --temperature 0 &
  bench gsm8k 110 $second $W/base-as-published $two "$PROMPTS/gsm8k.jsonl" $few_tokens --temperature 0 &
  wait; figures
  speeds() { for name in file-int4 base-as-published file-as-published file-int8 base-int4 base-int8; do
    bench "$1-$name" 40 "$2" $W/$name $two $W/few.jsonl "$3" --temperature 0; done; }
  [ ! -e $W/llama/llama-bench ] || { part llama 25 env CUDA_VISIBLE_DEVICES=0 LD_LIBRARY_PATH=$W/llama${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} $W/llama/llama-bench -m $MODEL -p 128 -n 128 -fa 1 -ngl 99 -r 3 -o md
    tail -n 6 $W/logs/llama.txt; }
  if [ "$second" = 1 ]; then speeds whole 0 $many_tokens & AS="tools/bench/as_device.py orin" speeds orin 1 $few_tokens; wait
  else speeds whole 0 $many_tokens; AS="tools/bench/as_device.py orin" speeds orin 0 $few_tokens; fi ;;
esac
figures; tar cJf "$OUT/small.tar.xz" -C $W json logs; ls -la "$OUT"; echo "== done at $(elapsed) s"
