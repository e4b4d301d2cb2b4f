#!/bin/sh
# small.sh WIKITEXT SOTU MODEL [POLICY ...]: the search parts at 1/16 of 2048 tokens; records that are there are kept.
cd "$(dirname "$0")" || exit 1
wikitext=$1 sotu=$2 model=$3
shift 3
python measure.py --wikitext "$wikitext" --sotu "$sotu" --model "$model" --context 2048 --budget 128 --part search \
    --texts built-in wikitext-2 sotu-2 --records records/2048-128 --only full "$@"
