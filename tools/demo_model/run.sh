#!/bin/sh
# From open text to the shipped directory. Usage: tools/demo_model/run.sh SOURCES WORK TARGET
# MINUTES and DRAFT_MINUTES: training time of the model and of its draft head.
set -eu
sources=$1 work=$2 target=$3
results=$(dirname "$0")/results
python -m tools.demo_model.prepare --sources "$sources" --work "$work"
python -m tools.demo_model.train --work "$work" --minutes "${MINUTES:-7.6}" --shards 1300
python -m tools.demo_model.export --work "$work" --to "$target" --check --record
python -m tools.demo_model.evaluate --model "$target"
python -m tools.demo_model.train_draft --work "$work" --base "$target" --to "$target/draft" \
  --minutes "${DRAFT_MINUTES:-4}" --record "$results/draft_training.json"
python -m tools.demo_model.evaluate_draft --base "$target" --draft "$target/draft" \
  --results "$results/draft_acceptance.json"
python -m tools.demo_model.model_card --model "$target"
