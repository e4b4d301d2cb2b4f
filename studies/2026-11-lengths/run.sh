#!/bin/sh
# run.sh WIKITEXT SOTU MODEL: what the table here is made of; records that are there are kept.
cd "$(dirname "$0")" || exit 1
points="mean+k5v4+heads0.5 mean+k5v4+heads0.75 h2o+k5v4+heads0.75+recent64 h2o+k5v4+heads1+recent64 h2o+k4v3+heads0.75"
for case in 2048/8 2048/16 2048/32 4096/8 4096/16; do
  tokens=${case%/*} part=${case#*/}
  python ../2026-11-text-and-facts/measure.py --wikitext "$1" --sotu "$2" --model "$3" --part report --texts wikitext-2 \
      --context "$tokens" --budget $((tokens / part)) --records "records/$tokens-$part" \
      --only full $points kvzip+k5v4 kvzip+k5v4+refit h2o window+int4
done
