#!/usr/bin/env bash
# duckdb 1.4.1 and pyarrow 22.0.0: a JSON column of Parquet reads as text that is still JSON.
#
# DuckDB writes a column of type JSON with Parquet's logical type JSON. pyarrow reads it as extension<arrow.json>, and
# to_pylist() gives the JSON source: a string comes with its quotes and escapes, so that "a\nb" is eight characters.
# Casting the column to string keeps them too. A loader that takes every text-like column for text trains on the quotes.
#
# Fails if the type, or either value, changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q duckdb==1.4.1 pyarrow==22.0.0
cd "$work"
"$work/env/bin/python" - <<'P'
import duckdb, json, pyarrow as pa, pyarrow.parquet as pq

duckdb.sql(r"""copy (select '"a\nb"'::json as body, 'a' as plain) to 'rows.parquet' (format parquet)""")
table = pq.read_table("rows.parquet")
value = table.column("body").to_pylist()[0]
cast = table.column("body").cast(pa.string()).to_pylist()[0]
print(table.schema.field("body").type, repr(value), repr(cast), len(value))
assert str(table.schema.field("body").type) == "extension<arrow.json>"
assert value == cast == r'"a\nb"' and json.loads(value) == "a\nb"
P
# Seen: extension<arrow.json> '"a\\nb"' '"a\\nb"' 6
echo "seen as described"
