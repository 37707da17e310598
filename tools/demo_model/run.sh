#!/bin/sh
# From open text to the shipped directory. Usage: tools/demo_model/run.sh SOURCES WORK TARGET   (MINUTES: training time)
set -eu
sources=$1 work=$2 target=$3
python -m tools.demo_model.prepare --sources "$sources" --work "$work"
python -m tools.demo_model.train --work "$work" --minutes "${MINUTES:-7.6}" --shards 1300
python -m tools.demo_model.export --work "$work" --to "$target" --check --record
python -m tools.demo_model.evaluate --model "$target"
python -m tools.demo_model.model_card --model "$target"
