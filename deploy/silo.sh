#!/bin/sh
# A silo's SuperNode: ./silo.sh NAME KEY CA.CRT HOST:PORT DATA [LEDGER]
# It reads DATA and no other path. With PRIVATE (a folder of `isthmus sketch build`) and QUERIES in its
# environment it takes part in exchanges of features too; with MASKED=yes its models leave it under the masks
# of a secure sum only. NODE_PORT is for its own processes on this machine.
set -eu
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
config="silo=\"$1\" data=\"$5\""
if [ $# -gt 5 ]; then config="$config ledger=\"$6\""; fi
if [ -n "${PRIVATE:-}" ]; then config="$config folder=\"$PRIVATE\" queries=\"$QUERIES\""; fi
if [ -n "${MASKED:-}" ]; then config="$config masked-only=true"; fi
exec flower-supernode --superlink "$4" --root-certificates "$3" --auth-supernode-private-key "$2" \
    --node-config "$config" --host 127.0.0.1 --port "${NODE_PORT:-9094}"
