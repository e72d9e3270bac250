"""Ledgers: every nanosecond of a step, and every byte of a peak, has exactly one owner."""
