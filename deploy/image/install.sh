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

compile=--compile
[ "$slim" = yes ] && compile=--no-compile
/opt/pip/bin/pip --python /opt/hiddenq/bin/python install --quiet $compile \
    --find-links /wheels --constraint constraints.txt ".[$extras]" "$@"

site=$(/opt/hiddenq/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cd "$site"
rm -rf hiddenq producer gpu_worker uploader
[ "$slim" = yes ] || exit 0

# What no role without torch ever opens: tests, headers, model code that needs torch, unused Arrow and AWS services.
find . -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
rm -rf pyarrow/include pyarrow/src pyarrow/libarrow_flight* pyarrow/libarrow_substrait* pyarrow/_flight* pyarrow/_substrait*
find . -path '*/transformers/models/*' \( -name 'modeling_*.py' -o -name 'modular_*.py' -o -name 'convert_*.py' \
    -o -name 'image_processing_*.py' -o -name 'video_processing_*.py' \) -delete
if [ -d botocore/data ]; then
    find botocore/data -mindepth 1 -maxdepth 1 -type d \
        ! -name s3 ! -name sts ! -name sso ! -name sso-oidc ! -name signin -exec rm -rf {} +
fi
