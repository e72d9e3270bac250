from __future__ import annotations

import sys

import pytest

from lightning_memprof.errors import ConfigError
from lightning_memprof.estimation.allocator_settings import AllocatorSettings, environment_settings, parse_settings
from lightning_memprof.units import KIB, MIB


@pytest.mark.parametrize("text", ["", " ", ",", "expandable_segments:False"])
def test_no_settings_are_the_defaults(text):
    assert parse_settings(text) == AllocatorSettings()
    assert parse_settings(text).max_split_size == sys.maxsize


def test_every_setting_is_parsed():
    found = parse_settings(
        "max_split_size_mb:40, max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,"
        "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True,large_segment_size_mb:24,"
        "per_process_memory_fraction:0.8"
    )
    assert found == AllocatorSettings(
        max_split_size=40 * MIB,
        max_non_split_rounding_size=30 * MIB,
        garbage_collection_threshold=0.5,
        roundup_power2_divisions=(8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1),
        expandable_segments=True,
        large_segment_size=24 * MIB,
        per_process_memory_fraction=0.8,
    )


def test_settings_without_a_model_are_listed():
    found = parse_settings("backend:native,max_split_size_mb:64,pinned_use_background_threads:True,list:[1,2]")
    assert found.ignored == ("backend:native", "pinned_use_background_threads:True", "list:[1,2]")
    assert found.max_split_size == 64 * MIB


def test_the_variable_of_cuda_comes_before_the_general_one():
    general = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert environment_settings({}) == AllocatorSettings()
    assert environment_settings(general).max_split_size == 64 * MIB
    assert environment_settings(general | {"PYTORCH_CUDA_ALLOC_CONF": ""}) == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("4", (4,) * 16),
        ("[4:2,16:8]", (2, 2, 2, 0, 8) + (0,) * 11),
        ("[4:2,16:8,>:1]", (2, 2, 2, 0, 8) + (1,) * 11),
        ("[>:8]", (0,) + (8,) * 15),
        ("[131072:2]", (2,) * 16),
    ],
)
def test_divisions_hold_up_to_their_bounds(text, divisions):
    assert parse_settings(f"roundup_power2_divisions:{text}").roundup_power2_divisions == divisions


def test_the_rounding_of_large_segments_follows_their_size():
    found = parse_settings("max_split_size_mb:64,large_segment_size_mb:40")
    assert found.max_non_split_rounding_size == 40 * MIB


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_split_size_mb:19", "max_split_size_mb is '19'; it must be at least 20"),
        ("max_split_size_mb:many", "max_split_size_mb is 'many'; it must be a number"),
        ("max_split_size_mb", "max_split_size_mb is ''"),
        ("max_split_size_mb:", "max_split_size_mb is ''"),
        ("max_non_split_rounding_mb:1", "at least 20"),
        ("large_segment_size_mb:10", "at least 11"),
        ("max_split_size_mb:20,large_segment_size_mb:24", "at least 24"),
        ("garbage_collection_threshold:1.5", "a number between 0 and 1"),
        ("garbage_collection_threshold:-1", "a number between 0 and 1"),
        ("per_process_memory_fraction:2", "per_process_memory_fraction is '2.0'; it must be a number between 0 and 1"),
        ("expandable_segments:true", "expandable_segments is 'true'; it must be True or False"),
        ("roundup_power2_divisions:3", "powers of 2"),
        ("roundup_power2_divisions:[64:x]", "powers of 2"),
        ("roundup_power2_divisions:[63:2]", "powers of 2"),
        ("roundup_power2_divisions:[64:2", "balanced brackets"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(text, named):
    with pytest.raises(ConfigError) as caught:
        parse_settings(text)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "nbytes", "size"),
    [
        ("", 1, 512),
        ("", 512, 512),
        ("", 513, 1024),
        ("", MIB + 1, MIB + 512),
        ("roundup_power2_divisions:4", 1200, 1536),  # at most 512 bytes per division: rounded as without
        ("roundup_power2_divisions:4", 2048, 2048),
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:4", 5 * KIB + 1, 6 * KIB),
        ("roundup_power2_divisions:4", 64 * MIB, 64 * MIB),
        ("roundup_power2_divisions:4", 64 * MIB + 1, 80 * MIB),
        ("roundup_power2_divisions:1", 64 * MIB + 1, 64 * MIB + 512),
        ("roundup_power2_divisions:[64:8,>:1]", 64 * MIB + 1, 72 * MIB),
        ("roundup_power2_divisions:[64:8,>:1]", 128 * MIB + 1, 128 * MIB + 512),
    ],
)
def test_a_request_is_rounded(text, nbytes, size):
    assert parse_settings(text).rounded(nbytes) == size
