"""What `posttrain impact` says of a synthetic store."""

import json

from flows.reports.impact import impact_text
from lineage.graph.impact import impact
from lineage.graph.index import Index


def answer(store, ref: str) -> dict:
    with Index(store.root) as index:
        return json.loads(json.dumps(impact(ref, index).to_dict()))


def text(store, ref: str) -> str:
    with Index(store.root) as index:
        return impact_text(impact(ref, index))
