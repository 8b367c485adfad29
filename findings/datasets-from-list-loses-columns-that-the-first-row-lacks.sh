#!/usr/bin/env bash
# datasets 5.2.0, pyarrow 25.0.1: columns that the first row lacks are lost, without a word.
#
# Three ways to make a table of rows take the columns of the first row alone: Dataset.from_list,
# Dataset.from_generator and pyarrow's Table.from_pylist. A later row's system prompt, its tools or its weight are gone,
# and a model is trained without them. The same rows as a file of JSON Lines keep all columns, with None where a row
# has no value; an IterableDataset keeps them too.
#
# Seen: two rows, of which the second alone has "system". Fails if a way keeps that column, or a file loses it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q datasets==5.2.0 pyarrow==25.0.1
cd "$work"
cat > columns.py <<'P'
import json
from pathlib import Path

import pyarrow
from datasets import Dataset, IterableDataset, load_dataset

rows = [{"prompt": "Hello"}, {"prompt": "Hello", "system": "Answer in French."}]
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def generate():
    yield from rows


found = {
    "Dataset.from_list": Dataset.from_list(rows).column_names,
    "Dataset.from_generator": Dataset.from_generator(generate, cache_dir="cache").column_names,
    "Table.from_pylist": pyarrow.Table.from_pylist(rows).column_names,
    "IterableDataset.from_generator": [*[*IterableDataset.from_generator(generate)][1]],
    "load_dataset": load_dataset("json", data_files="rows.jsonl", cache_dir="cache", split="train").column_names,
}
for name, columns in found.items():
    print(name, columns)
losing = [name for name, columns in found.items() if "system" not in columns]
assert losing == ["Dataset.from_list", "Dataset.from_generator", "Table.from_pylist"], losing
P
HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 "$work/env/bin/python" columns.py
