"""Names of other packages, for code and configurations written for them."""

from __future__ import annotations

import sys

from lightning_memprof.integration.registration import check_lightning

check_lightning(__name__, sys._getframe(1))  # noqa: SLF001 the importing frame has no public name
