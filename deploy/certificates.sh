#!/bin/sh
# A certificate authority for the federation and a certificate for its coordinator, in the folder $1, for the
# host names and addresses that follow: ./certificates.sh keys coordinator.example.org 192.0.2.7
set -eu
folder=$1; shift
names=""
for host in "$@"; do
    case $host in
        *[!0-9.]*) names="$names,DNS:$host" ;;
        *) names="$names,IP:$host" ;;
    esac
done
umask 077
mkdir -p "$folder"
curve="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
# shellcheck disable=SC2086 # $curve is several words on purpose
openssl req -x509 $curve -days 730 -subj "/CN=Isthmus federation" \
    -keyout "$folder/ca.key" -out "$folder/ca.crt"
# shellcheck disable=SC2086
openssl req $curve -subj "/CN=coordinator" -keyout "$folder/server.key" -out "$folder/server.csr"
echo "subjectAltName=${names#,}" > "$folder/server.names"
openssl x509 -req -days 365 -in "$folder/server.csr" -extfile "$folder/server.names" \
    -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial -out "$folder/server.crt"
rm "$folder/server.csr" "$folder/server.names"
echo "hand $folder/ca.crt to every silo; keep the other files here" >&2
