"""What is taken out of a text before it is written, and which URLs are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.artifacts.secrets import has_password, masked, without_password
from recorded_rows import read_rows

AWKWARD = '  first line\'s\nsecond "line" \\ of/ü\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nothing to hide", "nothing to hide"),
        ("key sk-abcdefgh0 and sk-abcdefgh0-more", "key *** and ***"),
        ("short: 1234567", "short: 1234567"),
        ("aws /starts+as/a/path", "aws ***"),
        ("ftp://me:pw@host/x s3://bucket/a@b", "ftp://me:***@host/x s3://bucket/a@b"),
        ("https://u:p@ssword@h/x http://host:80/x", "https://u:***@h/x http://host:80/x"),
        ("https://u:pa/ssword@h and (https://u%3Apw@h)", "https://u:***@h and (https://u:***@h)"),
        ("https://ghp_0123@h ssh://git@h abfs://box@h/x", "https://***@h ssh://git@h abfs://box@h/x"),
        ("('/x?a=1;Token=b;c&X-Amz-Signature=d&design=e')", "('/x?a=1;Token=***&X-Amz-Signature=***&design=e')"),
    ],
)
def test_values_of_variables_that_hold_secrets_and_passwords_in_urls_are_taken_out(text: str, expected: str) -> None:
    variables = {
        "A_TOKEN": "sk-abcdefgh0", "B_SECRET": "sk-abcdefgh0-more", "C_PASSWORD": "1234567",
        "AWS_SECRET_ACCESS_KEY": "/starts+as/a/path", "PATH": "nothing",
    }  # fmt: skip
    assert masked(text, variables) == expected


def test_the_place_of_a_file_with_a_secret_is_none(tmp_path: Path) -> None:
    place = tmp_path / "token"
    variables = {"TOKEN_FILE": str(place)}
    assert masked(f"{place}: refused", variables) == "***: refused"
    place.touch()
    assert masked(f"{place}: refused", variables) == f"{place}: refused"


@pytest.mark.parametrize(
    "written",
    [
        str.strip,
        repr,
        ascii,
        lambda text: repr(text.strip().encode()),
        lambda text: repr(f"{text}' and \""),
        lambda text: str(KeyError(repr(KeyError(text)))),
        json.dumps,
        lambda text: json.dumps(text, ensure_ascii=False),
        quote,
        lambda text: quote(text, safe=""),
        lambda text: quote_plus(text, safe=""),
        lambda text: quote(text).replace("%C3%BC", "%c3%bc").replace("%0A", "%0a").replace("%5C", "%5c"),
        lambda text: text.replace("\n", "\n  | "),
    ],
)
def test_a_secret_is_taken_out_however_it_is_written(written: Callable[[str], str]) -> None:
    said = masked(f"Error: {written(AWKWARD)}", {"MY_TOKEN": AWKWARD})
    assert said.startswith("Error: ")
    assert "***" in said
    assert not any(word in said for word in ("first", "second", "line", "of/", "of%2"))


def test_bytes_that_are_no_text_hinder_nothing() -> None:
    value = b"\xff-not-utf-8".decode(errors="surrogateescape")
    assert masked(f"{value} {quote(b'%c-not-utf-8' % 255)}", {"MY_TOKEN": value}) == "*** ***"


@pytest.mark.parametrize("name", ["MYSQL_PWD", "GITHUB_PAT", "DB_AUTH", "Pat", "SMTP_PASS", "db_pwd2"])
def test_short_words_of_a_name_speak_of_a_secret(name: str) -> None:
    assert masked("of 12345678.", {name: "12345678"}) == "of ***."


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "PATH", "PYTHONPATH", "XAUTHORITY", "AUTHOR", "COMPASSES"])
def test_parts_of_other_words_do_not(name: str) -> None:
    assert masked("of 12345678.", {name: "12345678"}) == "of 12345678."


def test_the_variables_are_looked_through_once_for_all_texts_of_an_exception(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Counted(dict[str, str]):
        looked = 0

        def __iter__(self) -> Iterator[str]:
            Counted.looked += 1
            return super().__iter__()

    environment: Mapping[str, str] = Counted({"A_TOKEN": "sk-abcdefgh0"})
    monkeypatch.setattr("lightning_memprof.artifacts.secrets.os.environ", environment)
    writer = ManifestWriter(tmp_path / "manifest")
    writer.append("step", step=1, reason=None)
    assert Counted.looked == 0
    writer.append("error", message="sk-abcdefgh0!", traceback="at sk-abcdefgh0", reason="sk-abcdefgh0?")
    writer.close()
    assert Counted.looked == 1
    row = read_rows(writer.path)[0][1]
    assert (row["message"], row["traceback"], row["reason"]) == ("***!", "at ***", "***?")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory://u:HIDDEN@h/x", "memory://u:***@h/x"),
        ("memory://u:HID/DEN@h/x", "memory://u:***@h/x"),
        ("memory://u:HID@DEN@h/x", "memory://u:***@h/x"),
        ("memory://u%3AHIDDEN@h/x", "memory://***"),
        ("memory://u%3AHIDDEN%40h/x", "memory://***"),
        ("memory://u:HID%20DEN@h/x", "memory://***"),
        ("memory://u:HID DEN@h/x", "memory://***"),
        ("filecache::memory://u:HIDDEN@h/x", "filecache::memory://u:***@h/x"),
        ("memory://h/x?password=HIDDEN", "memory://h/x?password=***"),
        ("memory://h/x?a=1&sig=HIDDEN&b=2", "memory://h/x?a=1&sig=***&b=2"),
        ("memory://h/x?X-Amz-Signature=HIDDEN", "memory://h/x?X-Amz-Signature=***"),
        ("memory://h/x?a=1;api_key=HIDDEN", "memory://h/x?a=1;api_key=***"),
        ("memory://h/x#access_token=HIDDEN", "memory://h/x#access_token=***"),
        ("memory://h/x%3Fsecret%3DHIDDEN", "memory://***"),
    ],
)
def test_a_url_that_tells_a_password_is_known_and_shown_without_it(url: str, shown: str) -> None:
    assert has_password(url)
    assert without_password(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a@b", "s3://bucket/monkey/design=3?versionId=4", "abfs://box@account.dfs.core.windows.net/x",
        "hdfs://node:8020/user/me@example.org/runs", "zip://a.zip::s3://bucket/a@b", "sftp://me@host/x",
    ],
)  # fmt: skip
def test_a_url_without_a_password_is_not_taken_for_one_with_it(url: str) -> None:
    assert not has_password(url)
