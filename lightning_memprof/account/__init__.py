"""Who owns each nanosecond and each byte: ledgers whose lines sum to their whole."""

from __future__ import annotations
