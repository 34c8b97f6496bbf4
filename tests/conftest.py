"""What holds for every test: none fails because the machine is slow.

Fixtures are shared by a property's examples: what an example changes there, it clears itself.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SUPPRESSED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("shared machine", deadline=None, suppress_health_check=SUPPRESSED)
settings.load_profile("shared machine")
