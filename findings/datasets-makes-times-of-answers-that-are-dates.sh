#!/usr/bin/env bash
# datasets 5.2.0, pyarrow 25.0.1: load_dataset("json") turns answers that are dates into times.
#
# The reader of JSON is pyarrow's. It takes a string like "2015-01-02" for a time as long as all strings of the column
# that it has seen so far look so. So a file of questions about dates loads with datetime objects for answers, which a
# template renders as "2015-01-02 00:00:00", and the zone of "2015-01-02T10:00Z" is lost. One answer of text among them
# keeps all as they are, if it stands in the first block of the file. If it comes in a later block (10 MB by default),
# the whole file is refused.
#
# Seen: files of dates, of one text among dates, and of a text after the first block. Fails if a type changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q datasets==5.2.0 pyarrow==25.0.1
cd "$work"
cat > dates.py <<'P'
import json
from pathlib import Path

from datasets import load_dataset


def load(name, answers):
    Path(f"{name}.jsonl").write_text("".join(json.dumps({"answer": answer}) + "\n" for answer in answers))
    rows = load_dataset("json", data_files=f"{name}.jsonl", cache_dir="cache", split="train")
    print(f"{name}: {rows.features['answer'].dtype}, the last is {rows[-1]['answer']}")
    return rows.features["answer"].dtype, str(rows[-1]["answer"])


assert load("dates", ["2015-01-01", "2015-01-02"]) == ("timestamp[s]", "2015-01-02 00:00:00")
assert load("zones", ["2015-01-01", "2015-01-02T10:00Z"]) == ("timestamp[s]", "2015-01-02 10:00:00")
assert load("years", ["2015", "2016"]) == ("string", "2016")
assert load("text", ["2015-01-01", "no date"]) == ("string", "no date")
try:
    load("late", ["2015-01-01"] * 900_000 + ["no date"])
except Exception as error:
    print(f"late: {error.__cause__}")
    assert "Failed to parse string: 'no date'" in str(error.__cause__), error.__cause__
else:
    raise AssertionError("a text after the first block is read")
P
HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 "$work/env/bin/python" dates.py
