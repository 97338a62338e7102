#!/bin/sh
# The coordinator's SuperLink, with TLS and only for registered silos: ./superlink.sh keys HOST PORT
set -eu
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec flower-superlink --host "$2" --port "$3" --enable-supernode-auth \
    --ssl-ca-certfile "$1/ca.crt" --ssl-certfile "$1/server.crt" --ssl-keyfile "$1/server.key" \
    --disable-runtime-dependency-installation
