"""What a fair page says about each training of this folder."""

from __future__ import annotations

from typing import Final

from scoring import Expected

WAITS: Final = r"input-bound|waits? for (data|batch|the (next )?batch|its data)|data (wait|load)|dataloader"
DATASET: Final = r"__getitem__|\bdata ?set\b|\bfetch"

EXPECTED: Final[tuple[Expected, ...]] = (
    Expected(
        name="raw_texts",
        script="data.py",
        cause=(r"collat|\btogether\b|tokeni[sz]|Vocabulary|\bencod(e|es|ing)\b",),
        near=(WAITS,),
        fix=(r"collat|\btogether\b|tokeni[sz]|Vocabulary|\bencod(e|es|ing)\b|preprocess|once|offline|in advance",),
        near_fix=(r"workers",),
    ),
    Expected(
        name="scattered_files",
        script="data.py",
        cause=(
            rf"{DATASET}|Recordings|np\.load|numpy\.load",
            r"\b(open|read)\w* .*files?|(small|many) files|decod|pars(e|ing)",
        ),
        near=(WAITS,),
        fix=(
            r"__getitem__|Recordings|np\.load|memory.?map|memmap|mmap|one file|fewer files|larger files|shard|cach",
            r"preprocess|precomput|once|offline|decod",
        ),
        near_fix=(r"num_workers|workers|data ?set",),
    ),
    Expected(
        name="locked_archive",
        script="data.py",
        cause=(
            r"\block(s|ed)?\b|acquire|serial|one at a time|take turns",
            rf"({DATASET}|Spectra|Archive).*(wait|block|sleep|idle|off the CPU|no CPU|slow|takes)",
            rf"workers? .*(wait|block|sleep|idle).*({DATASET}|Spectra|Archive|read)",
        ),
        near=(WAITS,),
        fix=(
            r"\block(s|ed)?\b|own (handle|file|reader|archive)|worker_init_fn|each worker|per worker",
            r"Archive|__getitem__",
        ),
        near_fix=(r"data ?set|\bread",),
    ),
    Expected(
        name="lone_worker",
        script="data.py",
        cause=(
            r"\b(one|1|single|only|too few|num_workers ?= ?1)\b.*workers?",
            r"workers? .*(too few|cannot keep up|not keep up|falls? behind|slower|wait|busy|saturated)",
            rf"({DATASET}|Thumbnails|RemoteStore).*(wait|block|sleep|idle|slow|takes)",
        ),
        near=(WAITS,),
        fix=(r"num_workers ?= ?([2-9]|\d\d)|(more|raise|increase).*workers|workers.*(raise|increase)",),
        near_fix=(r"prefetch|workers|cach|batch(ed|es)? (read|request)|__getitem__|__getitems__|asynchron",),
    ),
)
