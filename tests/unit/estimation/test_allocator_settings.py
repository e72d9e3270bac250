from __future__ import annotations

import sys

import pytest

from lightning_memprof.errors import ConfigError
from lightning_memprof.estimation.allocator_settings import AllocatorSettings, environment_settings, parse_settings
from lightning_memprof.units import MIB


@pytest.mark.parametrize("text", ["", " ", ",", "expandable_segments:False"])
def test_no_settings_are_the_defaults(text):
    assert parse_settings(text) == AllocatorSettings()
    assert parse_settings(text).max_split_size == sys.maxsize


def test_every_setting_of_the_model_is_parsed():
    found = parse_settings("max_split_size_mb:40, garbage_collection_threshold:0.5,expandable_segments:True")
    assert found == AllocatorSettings(max_split_size=40 * MIB, expandable_segments=True)


def test_the_variable_of_cuda_comes_before_the_general_one():
    general = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert environment_settings({}) == AllocatorSettings()
    assert environment_settings(general).max_split_size == 64 * MIB
    assert environment_settings(general | {"PYTORCH_CUDA_ALLOC_CONF": ""}) == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_split_size_mb:19", "max_split_size_mb is '19'; it must be a number of at least 20"),
        ("max_split_size_mb:many", "max_split_size_mb is 'many'"),
        ("max_split_size_mb", "max_split_size_mb is ''"),
        ("expandable_segments:true", "expandable_segments is 'true'; it must be True or False"),
        ("roundup_power2_divisions:[64:8,>:1]", "roundup_power2_divisions is not simulated"),
        ("max_non_split_rounding_mb:30", "max_non_split_rounding_mb is not simulated"),
        ("large_segment_size_mb:24", "large_segment_size_mb is not simulated"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(text, named):
    with pytest.raises(ConfigError) as caught:
        parse_settings(text)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
