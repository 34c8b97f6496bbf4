"""What to do about what is damaged or missing, in the same words wherever the reader says it.

Invariant: each asks for the whole command, since `hiddenq run` goes on with a location only under the settings that it
began with.
"""

from __future__ import annotations

RUN_AGAIN = "give the same `hiddenq run` command as before again"
MEND_BY_RUN = f"delete the object and {RUN_AGAIN}: only its batch is made anew"
ADD_HEAD = "give the same `hiddenq run` command as before again, with --target-head added: nothing is extracted anew"
MEND_HEAD = f"delete target_head.safetensors and {ADD_HEAD}"
