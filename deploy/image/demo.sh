#!/bin/sh
# demo.sh: the demo's model and conversations into /models, and the bucket of HIDDENQ_OUT into the demo's store.
set -eu
umask 0022

/opt/hiddenq/bin/python /usr/local/share/hiddenq/demo.py /models
# safetensors makes files that their owner alone can read; the roles are other users.
chmod -R a+rX /models
/opt/hiddenq/bin/python - <<'PYTHON'
import os

import boto3

bucket = os.environ["HIDDENQ_OUT"].removeprefix("s3://").partition("/")[0]
store = boto3.client("s3", endpoint_url=os.environ["HIDDENQ_ENDPOINT_URL"])
if bucket not in [found["Name"] for found in store.list_buckets()["Buckets"]]:
    store.create_bucket(Bucket=bucket)
PYTHON
