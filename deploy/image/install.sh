#!/bin/sh
# install.sh EXTRAS [--slim] [pip arguments]: the dependencies of hiddenq[EXTRAS], without hiddenq, into /opt/hiddenq.
#
# Each package is what constraints.txt says; wheels in /wheels win over the registry's. Stub packages stand in for our
# code, so that this layer changes only with pyproject.toml and constraints.txt.
set -eu

extras=$1
shift
slim=no
if [ "${1:-}" = --slim ]; then
    slim=yes
    shift
fi

for package in hiddenq producer gpu_worker uploader; do
    mkdir -p "$package" && touch "$package/__init__.py"
done
touch README.md LICENSE

compile=--compile
[ "$slim" = yes ] && compile=--no-compile
/opt/pip/bin/pip --python /opt/hiddenq/bin/python install --quiet $compile \
    --find-links /wheels --constraint constraints.txt ".[$extras]" "$@"

site=$(/opt/hiddenq/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cd "$site"
rm -rf hiddenq producer gpu_worker uploader
[ "$slim" = yes ] || exit 0

# What no role without torch ever opens: tests, headers, symbols, model code that needs torch, and the parts of Arrow and
# of AWS's descriptions that are for other services.
find . -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
find . -path '*/transformers/models/*' ! -path '*/models/auto/*' \( -name 'modeling_*.py' -o -name 'modular_*.py' -o -name 'convert_*.py' \
    -o -name 'image_processing_*.py' -o -name 'video_processing_*.py' \) -delete
if [ -d pyarrow ]; then
    rm -rf pyarrow/include pyarrow/src pyarrow/*flight* pyarrow/_substrait* pyarrow/libarrow_s3* pyarrow/_s3fs*
    rm -f pyarrow/libarrow_python.so pyarrow/libarrow_python.so.*.*
    /opt/hiddenq/bin/python -c 'import pyarrow.compute, pyarrow.dataset, pyarrow.ipc, pyarrow.parquet'
fi
if [ -d botocore/data ]; then
    find botocore/data -mindepth 1 -maxdepth 1 -type d \
        ! -name s3 ! -name sts ! -name sso ! -name sso-oidc ! -name signin -exec rm -rf {} +
fi
# Libraries in *.libs were patched when their wheel was made and must stay as they are.
find . -name '*.so*' -type f ! -path '*.libs/*' -exec strip --strip-unneeded {} +
