#!/bin/sh
# Makes nvpool/wire/v1/*_pb2.py from proto/nvpool/v1/*.proto. Run after changing a .proto; a test sees when it was forgotten.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$python" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" proto/nvpool/v1/*.proto
"$python" -m grpc_tools.protoc -I proto --grpc_python_out="$out" proto/nvpool/v1/wire.proto
sed -i 's/from nvpool\.v1 import/from nvpool.wire.v1 import/' "$out"/nvpool/v1/*.py*
cp "$out"/nvpool/v1/*_pb2*.py* "${1:-nvpool/wire/v1}/"
