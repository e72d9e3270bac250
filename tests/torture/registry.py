"""All faults, in the order of the table."""

from __future__ import annotations

import fault
import memory_faults
import process_faults
import recorder_faults
import storage_faults
import user_faults
import writer_faults


def faults() -> tuple[fault.Fault, ...]:
    """Give the rows of the matrix."""
    return (
        *user_faults.FAULTS,
        *process_faults.FAULTS,
        *memory_faults.FAULTS,
        *recorder_faults.FAULTS,
        *storage_faults.FAULTS,
        *writer_faults.FAULTS,
    )
