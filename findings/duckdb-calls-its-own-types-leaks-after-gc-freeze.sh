#!/usr/bin/env bash
# duckdb 2.0.0: a program that calls gc.freeze() at its end, to skip Python's last collection of garbage, prints some
# fifty lines on standard error that call objects of DuckDB's own module leaks. The exit code stays 0.
#
# The objects are types that the module itself keeps, so even a program that only imports it prints them. With
# gc.disable() instead nothing is printed: Python still collects at its end, but not what is frozen.
#
# Fails if nothing is printed after gc.freeze(), or if something is printed without it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "duckdb==2.0.0"
for call in "pass" "gc.disable()" "gc.freeze()"; do
  "$work/venv/bin/python" -c "import gc, duckdb; $call" 2> "$work/said"
  echo "$call: $(wc -l < "$work/said") lines, $(grep -c 'leaked instance' "$work/said" || true) objects"
done | tee "$work/seen"
grep -q "^pass: 0 lines" "$work/seen"
grep -q "^gc.disable(): 0 lines" "$work/seen"
grep -Eq "^gc.freeze\(\): [1-9][0-9]* lines, [1-9]" "$work/seen"
# Seen: 0, 0, and 47 lines, of which 20 name objects of the type _duckdb._sqltypes.DuckDBPyType.
echo "seen as described"
