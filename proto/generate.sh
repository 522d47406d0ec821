#!/bin/sh
# Makes nvpool/rpc/v1/*_pb2*.py from proto/nvpool/v1/*.proto, and nvpool/bridge/v1 from proto/csi. Run after changing a .proto; a
# test sees when it was forgotten.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
into=${1:-nvpool}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$python" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" proto/nvpool/v1/*.proto proto/csi/v1/csi.proto
"$python" -m grpc_tools.protoc -I proto --grpc_python_out="$out" proto/nvpool/v1/wire.proto
sed -i 's/from nvpool\.v1 import/from nvpool.rpc.v1 import/' "$out"/nvpool/v1/*.py*
mkdir -p "$into/rpc/v1" "$into/bridge/v1"
cp "$out"/nvpool/v1/*_pb2*.py* "$into/rpc/v1/"
cp "$out"/csi/v1/*_pb2*.py* "$into/bridge/v1/"
