#!/usr/bin/env bash
# mlflow 3.16.1 and 3.17.2 (also 3.17.2 and 3.18.0): a client that only reads an older SQLite database migrates it,
# unasked, and the older MLflow that still writes to it is refused from then on.
#
# The documentation, and the error that the older one gives, have the user run `mlflow db upgrade` after a backup. But
# the store first looks whether all tables of its own release are there, and if a release adds one it takes the database
# for an empty one and runs every migration. Where a release adds none, it refuses the older schema instead.
#
# Fails if the newer client leaves the schema as it is, or if the older one still opens the database afterwards.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 3.16.1 3.17.2; do
  python3 -m venv "$work/$version"
  "$work/$version/bin/pip" install -q "mlflow==$version"
done
cat > "$work/read.py" <<'P'
import sqlite3
import sys

import mlflow

file = sys.argv[1]
try:
    mlflow.MlflowClient(f"sqlite:///{file}").search_experiments()
    result = "opens it"
except mlflow.MlflowException as error:
    result = f"refuses it: {str(error)[:40]}"
with sqlite3.connect(file) as database:
    print(f"mlflow {mlflow.__version__} {result}; schema", database.execute("select * from alembic_version").fetchone()[0])
P
cd "$work"
for version in 3.16.1 3.17.2 3.16.1; do
  "$work/$version/bin/python" read.py "$work/mlflow.db" 2> /dev/null | tail -1 | tee -a seen
done
[ "$(sed -n '1s/.*schema //p' seen)" != "$(sed -n '2s/.*schema //p' seen)" ]
sed -n 2p seen | grep -q "3.17.2 opens it"
sed -n 3p seen | grep -q "3.16.1 refuses it: Detected out-of-date database schema"
# Seen: 3.17.2 opens it, and the schema changes from b7e2c1a4d9f3 to dc11669786a5; then 3.16.1 refuses it.
echo "seen as described"
