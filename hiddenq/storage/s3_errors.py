"""What an error of botocore means for us.

Invariant: every error becomes one of our classes by its code and HTTP status alone, and a text never holds a header, a
key or a token. What concerns the store as a whole and may pass (throttling, 5xx, timeouts, a token that ended, no room)
is `StoreAway`: wait, keep the file, charge nobody. What another try would not change is `StoreRefused`, with a hint.
"""

from __future__ import annotations

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError

from hiddenq.contracts.errors import (
    HiddenqError,
    ObjectMissing,
    ObjectTooLarge,
    StoreAway,
    StoreRefused,
    TransientError,
    UsageError,
    words_of,
)

AWAY = {
    "SlowDown": "the store asks to slow down",
    "SlowDownRead": "the store asks to slow down",
    "SlowDownWrite": "the store asks to slow down",
    "ServiceUnavailable": "the store is unavailable",
    "InternalError": "the store failed inside",
    "RequestTimeout": "the store got no whole request in time",
    "RequestTimeoutException": "the store got no whole request in time",
    "Throttling": "the store asks to slow down",
    "ThrottlingException": "the store asks to slow down",
    "ThrottledException": "the store asks to slow down",
    "RequestThrottled": "the store asks to slow down",
    "RequestLimitExceeded": "the store asks to slow down",
    "TooManyRequests": "the store asks to slow down",
    "TooManyRequestsException": "the store asks to slow down",
    "BandwidthLimitExceeded": "the store's bandwidth is used up",
    "PriorRequestNotComplete": "the store is busy with this object",
    "OperationAborted": "the store is busy with this object",
    "ExpiredToken": "the credentials have ended; renew them (they are looked up again at each try)",
    "ExpiredTokenException": "the credentials have ended; renew them (they are looked up again at each try)",
    "TokenRefreshRequired": "the credentials have ended; renew them (they are looked up again at each try)",
    "RequestExpired": "the credentials have ended; renew them (they are looked up again at each try)",
    "QuotaExceeded": "the bucket is full; make room",
    "QuotaExceededException": "the bucket is full; make room",
    "InsufficientCapacity": "the store is full; make room",
    "InsufficientStorage": "the store is full; make room",
    "XMinioStorageFull": "the store is full; make room",
    "XMinioAdminBucketQuotaExceeded": "the bucket is full; make room",
    "XMinioServerNotInitialized": "the store is starting",
}
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
DAMAGED_ON_THE_WAY = frozenset(
    {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "IncompleteBody"}
)
"""The bytes that arrived are not those announced. Bytes are checked before they leave, so the file is innocent."""
TOO_LARGE = frozenset({"EntityTooLarge", "MaxMessageLengthExceeded", "RequestEntityTooLarge"})

_REGION = "wrong region"
_CREDENTIALS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or --profile) for this endpoint"
REFUSED = {
    "NoSuchBucket": "no such bucket; create it, or check its name and --endpoint-url",
    "InvalidBucketName": "not a bucket's name",
    "AccessDenied": "permission denied; it takes s3:ListBucket, s3:ListBucketMultipartUploads, s3:GetObject, "
    "s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload under this prefix",
    "AllAccessDisabled": "the bucket is locked by its owner",
    "AccountProblem": "the account is locked",
    "InvalidAccessKeyId": f"the access key is unknown; {_CREDENTIALS}",
    "SignatureDoesNotMatch": f"the secret key is wrong; {_CREDENTIALS}",
    "InvalidToken": f"the session token is wrong; {_CREDENTIALS}",
    "UnrecognizedClientException": f"the access key is unknown; {_CREDENTIALS}",
    "RequestTimeTooSkewed": "this host's clock is wrong; set it by NTP",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    "Redirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "InvalidStorageClass": "--storage-class is unknown to this store; leave it out",
    "InvalidEncryptionAlgorithmError": "--sse is unknown to this store; leave it out",
    "KMS.DisabledException": "the KMS key is disabled",
    "KMS.NotFoundException": "no such KMS key; check --sse-kms-key-id",
    "InvalidObjectState": "the object is archived; restore it first",
    "SecondLevelDomainForbidden": "the store wants the bucket in the host name; use --addressing-style virtual",
    "PathStyleDomainForbidden": "the store wants the bucket in the host name; use --addressing-style virtual",
    "NotImplemented": "the store does not know a header that was sent; try --checksums metadata",
    "InvalidArgument": "the store does not take an argument; try --checksums metadata or --addressing-style virtual",
    "InvalidRequest": "the store does not take the request; try --checksums metadata or --addressing-style virtual",
}
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
_BY_STATUS = {"301": "PermanentRedirect", "307": "TemporaryRedirect", "403": "AccessDenied"}
"""HEAD has no body, so its errors carry a status in place of a code."""

_NETWORK: tuple[type[Exception], ...] = (
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    boto.FlexibleChecksumError,
    boto.CredentialRetrievalError,
    boto.MetadataRetrievalError,
    boto.TokenRetrievalError,
    boto.SSOError,
)
_SETTINGS: tuple[type[Exception], ...] = (
    boto.ProfileNotFound,
    boto.ConfigParseError,
    boto.ConfigNotFound,
    boto.InvalidRegionError,
    boto.ParamValidationError,
)


def code_of(error: ClientError) -> str:
    """The error's code, or the code that its status stands for."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return _BY_STATUS.get(code, code)


def refusal_code(error: BaseException) -> str:
    """The store's own code behind one of our errors; "" if it was none of the store's."""
    return code_of(error.__cause__) if isinstance(error.__cause__, ClientError) else ""


def arrived_damaged(error: BaseException) -> bool:
    """Whether the store refused bytes that are not those announced."""
    return refusal_code(error) in DAMAGED_ON_THE_WAY


def translate(error: Exception, where: str) -> HiddenqError:
    """Our error for one of botocore's; `where` names bucket and key."""
    if isinstance(error, ClientError):
        return _translate_answer(error, where)
    kind = type(error).__name__
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return StoreRefused(f"{where}: the server's certificate is not trusted; set AWS_CA_BUNDLE, or mend its clock")
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return StoreRefused(f"{where}: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if isinstance(error, (*_SETTINGS, ValueError)):
        return UsageError(f"{where}: {words_of(error)}")
    if isinstance(error, (*_NETWORK, OSError)):
        return StoreAway(f"{where}: {_NETWORK_TEXTS.get(kind, f'no answer ({kind})')}")
    if isinstance(error, BotoCoreError):
        return StoreRefused(f"{where}: {words_of(error)}")
    return StoreAway(f"{where}: {kind}")


_NETWORK_TEXTS = {
    "EndpointConnectionError": "can't be reached; check --endpoint-url if this lasts",
    "ConnectTimeoutError": "no connection in time",
    "ReadTimeoutError": "no answer in time",
    "ConnectionClosedError": "the connection was closed",
}


def _translate_answer(error: ClientError, where: str) -> HiddenqError:
    code = code_of(error)
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    if code in AWAY:
        return StoreAway(f"{where}: {AWAY[code]} ({code})")
    if code in DAMAGED_ON_THE_WAY:
        return StoreAway(f"{where}: the bytes arrived damaged ({code}); sent again")
    if code == "NoSuchUpload":
        return TransientError(f"{where}: the multipart upload is gone; begun again")
    if code in _MISSING:
        return ObjectMissing(f"{where}: no such object")
    if (status >= 500 and code != "NotImplemented") or status == 429:
        return StoreAway(f"{where}: the store answers {status} ({code})")
    if code in TOO_LARGE or status == 413:
        return ObjectTooLarge(f"{where}: the store takes no object of this size; lower --max-shard-bytes ({code})")
    hint = REFUSED.get(code)
    if hint == _REGION:
        region = str(metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region", "")) or error.response.get(
            "Error", {}
        ).get("Region", "")
        hint = f"the bucket is in another region; set --region{f' {region}' if region else ''}"
    return StoreRefused(f"{where}: {hint or f'the store answers {status}'} ({code or status})")
