"""Where results go."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_memprof import ConfigError, OutputOptions


def test_a_policy_that_does_not_exist_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"OutputOptions\(on_error='explode'\): must be 'warn' or 'raise'"):
        OutputOptions(on_error="explode")  # type: ignore[arg-type]


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"OutputOptions\(dirpath=3\): must be a path or a URL"):
        OutputOptions(dirpath=3)  # type: ignore[arg-type]


def test_a_url_whose_package_is_not_there_is_refused_before_the_training() -> None:
    with pytest.raises(ConfigError, match="nowhere://b/x: Protocol not known: nowhere; install fsspec's package"):
        OutputOptions(dirpath="nowhere://b/x")


def test_a_url_that_a_path_has_mangled_is_refused() -> None:
    with pytest.raises(ConfigError, match="a Path drops one '/' of a URL; give the URL as a string"):
        OutputOptions(dirpath=Path("s3://bucket/runs"))


@pytest.mark.parametrize(
    "dirpath", ["memory://bucket/runs", "file:///tmp/runs", "runs", Path("C:/runs"), Path("/a:/b")]
)
def test_urls_and_directories_are_taken(dirpath: str | Path) -> None:
    assert OutputOptions(dirpath=dirpath).dirpath == dirpath


def test_looking_at_a_url_asks_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", refuse)
    assert OutputOptions(dirpath="s3://bucket/runs").dirpath == "s3://bucket/runs"
