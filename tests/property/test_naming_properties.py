"""Every name is built and parsed back without loss."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.artifacts import naming

ranks = st.integers(0, 200_000)
words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
filenames = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,20}", fullmatch=True)


@given(rank=ranks)
def test_manifest_and_pulse_names_give_their_rank_back(rank: int) -> None:
    assert naming.parse_manifest_name(naming.manifest_name(rank)) == rank
    assert naming.parse_pulse_name(naming.pulse_name(rank)) == rank


@given(rank=ranks)
def test_the_path_of_curves_gives_its_rank_back_and_tensorboard_reads_it(rank: int) -> None:
    assert naming.parse_curves_path(naming.curves_path(rank)) == rank
    assert ".tfevents." in naming.curves_path(rank)


@given(window=st.integers(0, 5000), rank=ranks, collector=words)
def test_a_series_path_gives_its_parts_back(window: int, rank: int, collector: str) -> None:
    assert naming.parse_series_path(naming.series_path(window, rank, collector)) == (window, rank, collector)


@given(
    stage=st.sampled_from(["fit", "validate", "test", "predict"]), filename=filenames, rank=ranks, strategy=words,
    function=words, time_ns=st.integers(0, 2**62),
)  # fmt: skip
def test_a_trace_name_gives_its_parts_back(**parts: object) -> None:
    name = naming.TraceName(**parts)  # type: ignore[arg-type]
    assert naming.TraceName.parse(str(name)) == name


@given(rank=ranks, function=words, number=st.integers(1, 10**9), edge=st.sampled_from(["start", "end"]))
def test_a_snapshot_name_gives_its_parts_back(**parts: object) -> None:
    name = naming.SnapshotName(**parts)  # type: ignore[arg-type]
    assert naming.SnapshotName.parse(str(name)) == name


@given(rank=ranks, form=st.sampled_from(["yaml", "pickle"]))
def test_the_names_of_memory_at_functions_give_their_rank_back(rank: int, form: naming.StatsFormat) -> None:
    assert naming.parse_memory_stats_name(naming.memory_stats_name(rank, form)) == (rank, form)
    assert naming.parse_functions_name(naming.functions_name(rank)) == rank
    assert naming.parse_fsdp_stats_name(naming.fsdp_stats_name(rank)) == rank


@given(rank=ranks, function=words, number=st.integers(1, 10**9))
def test_the_names_of_memory_reports_give_their_parts_back(rank: int, function: str, number: int) -> None:
    parts = (rank, function, number)
    assert naming.parse_fsdp_log_name(naming.fsdp_log_name(*parts)) == parts
    assert naming.parse_module_log_name(naming.module_log_name(*parts)) == parts


@given(rank=ranks, function=words, number=st.integers(1, 10**9))
def test_no_name_is_taken_for_another_kinds(rank: int, function: str, number: int) -> None:
    parsers = {
        naming.memory_stats_name(rank): naming.parse_memory_stats_name,
        naming.functions_name(rank): naming.parse_functions_name,
        naming.fsdp_stats_name(rank): naming.parse_fsdp_stats_name,
        naming.fsdp_log_name(rank, function, number): naming.parse_fsdp_log_name,
        naming.module_log_name(rank, function, number): naming.parse_module_log_name,
    }
    for name, own in parsers.items():
        assert [parse for parse in parsers.values() if parse(name) is not None] == [own]


@given(name=words, run=st.integers(1, 500))
def test_a_numbered_name_gives_its_parts_back(name: str, run: int) -> None:
    assert naming.parse_numbered(naming.numbered(name, run)) == (name, run)


@given(text=st.text(max_size=60))
def test_any_other_text_is_no_name_of_ours_or_is_built_again_unchanged(text: str) -> None:
    rank = naming.parse_manifest_name(text)
    assert rank is None or int(text.split("rank")[1].split(".", maxsplit=1)[0]) == rank
    trace = naming.TraceName.parse(text)
    assert trace is None or str(trace).removesuffix(".gz") == text.removesuffix(".gz")


@given(rank=ranks)
def test_the_names_of_an_out_of_memory_event_give_their_rank_back(rank: int) -> None:
    assert naming.parse_oom_name(naming.oom_name(rank)) == rank
    assert naming.parse_oom_snapshot_name(naming.oom_snapshot_name(rank)) == rank
    assert naming.parse_oom_name(naming.oom_snapshot_name(rank)) is None
    assert naming.SnapshotName.parse(naming.oom_snapshot_name(rank)) is None
