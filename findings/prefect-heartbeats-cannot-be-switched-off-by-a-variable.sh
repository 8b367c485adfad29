#!/usr/bin/env bash
# prefect 3.8.8: PREFECT_FLOWS_HEARTBEAT_FREQUENCY is an optional number whose None switches heartbeats off, but no
# variable, profile or TOML file can say None; and a flow that does nothing ends a second late because of them.
#
# The default is 180 since heartbeats are on for every flow. Their thread sleeps a second at a time, and the end of a
# flow waits for it. An empty variable, `None`, `null` and 0 are refused. In Python, `temporary_settings` takes None,
# and the same flow then ends at once.
#
# Fails if the variable takes one of these values, or if the flow with heartbeats is not half a second slower.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HOME="$work" PREFECT_HOME="$work/prefect" PREFECT_LOGGING_LEVEL=CRITICAL PREFECT_SERVER_ANALYTICS_ENABLED=false
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "prefect==3.8.8" "fastapi==0.150.0"
for value in "" None null 0; do
  PREFECT_FLOWS_HEARTBEAT_FREQUENCY=$value "$work/venv/bin/python" -c "import prefect.settings as s; s.get_current_settings()" \
    2> "$work/said" && exit 1
  echo "'$value' is refused: $(grep -m 1 -o "Input should be.*\[" "$work/said")"
done
cat > "$work/flow.py" <<'P'
import time

from prefect import flow
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness


@flow
def nothing():
    pass


def seconds():
    start = time.monotonic()
    nothing()
    return time.monotonic() - start


with prefect_test_harness(server_startup_timeout=120):
    nothing()
    with_heartbeats = min(seconds() for _ in range(3))
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        without = min(seconds() for _ in range(3))
print(f"a flow that does nothing: {with_heartbeats:.2f} s with heartbeats, {without:.2f} s without")
assert with_heartbeats - without > 0.5
P
cd "$work"
venv/bin/python flow.py 2> /dev/null
# Seen: each value is refused; 1.10 s with heartbeats, 0.09 s without.
echo "seen as described"
