"""Verify a run: every kept row exactly once, every byte as recorded, every value as planned.

Consumes a run's location, produces a `VerifyReport`; what it says rests on `run.json` and the token parts, which were
written before the first shard. It never writes.

    tokens.py     token parts and batch list, read once
    plan.py       run.json, batches, rejects, index, manifest      shard.py      one shard in one pass
    values.py     stored words as numbers                          norms.py      samples against each other (`deep`)
    recompute.py  samples from the model again                     verify.py     the order of it all
    report.py     findings and what to do about them               reading.py    an object's bytes, once
"""

from hiddenq.reader.checks.report import Finding, Recomputed, VerifyReport
from hiddenq.reader.checks.verify import verify

__all__ = ["Finding", "Recomputed", "VerifyReport", "verify"]
