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


@given(name=words, run=st.integers(1, 500))
def test_a_numbered_name_gives_its_parts_back(name: str, run: int) -> None:
    assert naming.parse_numbered(naming.numbered(name, run)) == (name, run)


@given(text=st.text(max_size=60))
def test_any_other_text_is_no_name_of_ours_or_is_built_again_unchanged(text: str) -> None:
    rank = naming.parse_manifest_name(text)
    assert rank is None or int(text.split("rank")[1].split(".", maxsplit=1)[0]) == rank
    trace = naming.TraceName.parse(text)
    assert trace is None or str(trace).removesuffix(".gz") == text.removesuffix(".gz")


def test_the_names_that_other_tools_read_stay() -> None:
    assert naming.curves_directory(3) == "tb/rank3"
    assert naming.regions_name(3) == "snapshots.rank00003.jsonl"
    assert naming.system_name(70_000) == "system.rank70000.jsonl"
    assert naming.functions_name(3) == "functions.rank00003.jsonl"
    assert naming.memory_stats_name(3) == "rank_3_memory_stats.yaml"
    assert naming.memory_stats_name(3, "pickle") == "rank_3_memory_stats.pickle"
    assert naming.fsdp_log_name(3, "training_step", 5) == "fsdp_mem_rank_3_training_step_5.log"
    assert naming.oom_name(3) == "oom.rank00003.json"
    assert naming.oom_snapshot_name(3) == "cuda_oom_rank_3.pickle"
    assert naming.SnapshotName.parse(naming.oom_snapshot_name(3)) is None
