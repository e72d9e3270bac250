"""The line that assigns a variable, for each way to assign one."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from lightning_memprof.capture.sources.assignments import Assignments, Place

SOURCE = """
CACHE: dict = {}
first, second = [], []

class Net:
    shared = []

    def __init__(self):
        self.early, self.pair = [], []
        self.typed: list = []
        self.register_buffer("buffer", None)
        self.add_state("state", default=[])
        setattr(self, "named", [])

    def reset(self):
        self.late = []

    class Inner:
        def __init__(self):
            self.deep = []

class Derived(Net):
    def reset(self):
        self.typed = None

def outer(given):
    kept = []
    def inner():
        kept.append(given)
    return inner

def stream():
    past = []
    while True:
        yield past

net = Net()
net.outside = []
"""
LINES = SOURCE.splitlines()


@pytest.fixture
def program(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    file = tmp_path / "program.py"
    file.write_text(SOURCE.replace("net = Net()\nnet.outside = []\n", ""))
    module = ModuleType("program")
    module.__file__ = str(file)
    exec(compile(file.read_text(), str(file), "exec"), vars(module))  # noqa: S102 the program of the test
    for kind in (module.Net, module.Net.Inner, module.Derived):
        kind.__module__ = "program"
    monkeypatch.setitem(sys.modules, "program", module)
    file.write_text(SOURCE)
    return module


def text_of(*places: Place) -> str | None:
    line, text = Assignments().first(places)
    if line is not None:
        assert text == LINES[int(line.rpartition(":")[2]) - 1].strip()
    return text


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        ("Net", "early", "self.early, self.pair = [], []"),
        ("Net", "pair", "self.early, self.pair = [], []"),
        ("Net", "typed", "self.typed: list = []"),
        ("Net", "buffer", 'self.register_buffer("buffer", None)'),
        ("Net", "state", 'self.add_state("state", default=[])'),
        ("Net", "named", 'setattr(self, "named", [])'),
        ("Net", "late", "self.late = []"),
        ("Net", "shared", "shared = []"),
        ("Net", "outside", "net.outside = []"),
        ("Derived", "late", "self.late = []"),
        ("Net", "nowhere", None),
    ],
)
def test_an_attribute_is_found_in_its_class_or_outside(program: Any, owner: str, name: str, text: str | None) -> None:
    assert text_of(Place.of_attribute(getattr(program, owner), name)) == text


def test_nested_classes_variables_closures_and_generators_are_found(program: Any) -> None:
    assert text_of(Place.of_attribute(program.Net.Inner, "deep")) == "self.deep = []"
    assert text_of(Place.of_global("program", "CACHE")) == "CACHE: dict = {}"
    assert text_of(Place.of_global("program", "second")) == "first, second = [], []"
    assert text_of(Place.of_closure(program.outer(0), "kept")) == "kept = []"
    assert text_of(Place.of_closure(program.outer(0), "given")) == "def outer(given):"
    assert text_of(Place.of_local(program.stream.__code__, "stream")) == "past = []"
    assert text_of(Place.of_function(program.outer)) == "def outer(given):"
    place = Place.of_class(program.Net)
    assert place is not None
    assert text_of(place) == "class Net:"


def test_the_programs_own_line_comes_before_a_librarys(program: Any) -> None:
    library = Place.of_attribute(Queue_of_library(), "queue")
    line, _ = Assignments().first([library])
    assert line is not None
    assert line.endswith("queue.py:36") or "queue.py:" in line
    assert text_of(library, Place.of_attribute(program.Net, "late")) == "self.late = []"


def Queue_of_library() -> type:  # noqa: N802 a class
    from queue import Queue

    return Queue


@dataclass
class Record:
    items: list[int] = field(default_factory=list)


def test_a_field_of_a_dataclass_is_found() -> None:
    line, text = Assignments().first([Place.of_attribute(Record, "items")])
    assert text == "items: list[int] = field(default_factory=list)"
    assert line is not None


@pytest.mark.parametrize("source", ["def broken(:", "\0", None])
def test_a_source_that_cannot_be_read_has_no_line(tmp_path: Any, source: str | None) -> None:
    file = tmp_path / "broken.py"
    if source is not None:
        file.write_text(source)
    place = Place(name="kept", scopes=((str(file), ()),))
    assert Assignments().first([place]) == (None, None)
