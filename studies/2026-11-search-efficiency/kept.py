"""The records that several scripts of this study start from."""

import json
from pathlib import Path

import pyarrow.parquet as pq

from kvsearch.policy import Policy

RECORDS = Path(__file__).with_name("records")


def surrogate_runs() -> set[str]:
    """The runs that the surrogate and the predictions were made from, without later ones."""
    return set(json.loads((RECORDS / "surrogate.json").read_text())["runs"])


def kept_policies() -> dict[str, Policy]:
    """Every policy of the records by its fingerprint."""
    rows = pq.read_table(RECORDS / "policies.parquet").to_pylist()
    return {r["key"]: Policy.build(json.loads(r["policy"])) for r in rows}
