from __future__ import annotations

from lightning_memprof.estimation.requests import StorageLog


def add(log: StorageLog, size: int, category: str) -> int:
    return log.add(size, category=category, dtype="torch.float32", module="net", operator="aten.mm.default")


def test_a_curve_has_the_categories_of_each_moment():
    log = StorageLog(granule=1)
    first = add(log, 10, "temporary")
    log.set_category(first, "gradient")
    other = add(log, 5, "temporary")
    log.requests.free(first)
    log.requests.free(other)
    assert log.curve(0, 4) == {"temporary": [10, 5, 5, 0], "gradient": [0, 10, 0, 0]}


def test_a_peak_is_the_first_moment_with_most_live_bytes_after_a_position():
    log = StorageLog(granule=512)
    log.requests.free(add(log, 513, "activation"))
    kept = add(log, 1, "parameter")
    assert (log.peak().live_bytes // 512, log.peak().position) == (2, 0)
    later = log.peak(first=2)
    assert later.numbers == (kept,)
    assert log.by(later, "category") == {("parameter",): 512}
