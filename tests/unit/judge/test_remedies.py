from __future__ import annotations

import ast
import re
from pathlib import Path

import lightning_memprof
from lightning_memprof.judge import remedies
from lightning_memprof.judge.remedies import Remedy, applicable

HELD = {name: value for name, value in vars(remedies).items() if isinstance(value, Remedy)}


def test_each_name_is_of_one_remedy_and_its_id() -> None:
    tree = ast.parse(Path(remedies.__file__).read_text(encoding="utf-8"))
    names = [
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert [name.lower() for name in names] == [remedy.id for remedy in HELD.values()]


def test_each_remedy_is_one_of_a_finding() -> None:
    package = Path(lightning_memprof.__file__).parent
    trees = [ast.parse(module.read_text(encoding="utf-8")) for module in package.rglob("*.py")]
    used = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "do"
    }
    assert HELD.keys() - used == set()


def test_a_loop_without_a_trainer_gets_no_advice_for_one() -> None:
    lightning = re.compile(r"Trainer\(|MemProfilerCallback|on_train_\w+|setup\(\)|configure_\w+\(\)|ModelCheckpoint")
    found = {name: held.in_program({"other program"}).text for name, held in HELD.items()}
    # It offers both.
    del found["RECORD_RUN"]
    assert [name for name, text in found.items() if lightning.search(text)] == []


def test_a_remedy_applies_where_all_that_it_needs_holds() -> None:
    choices = [Remedy(id=str(i), text="", needs=needs) for i, needs in enumerate((
        frozenset[remedies.Need](), frozenset[remedies.Need]({"training"}),
        frozenset[remedies.Need]({"training", "eager"}),
    ))]  # fmt: skip
    assert [each.id for each in applicable({"training", "lightning"}, *choices)] == ["0", "1"]


def test_a_program_without_a_trainer_gets_its_own_text_and_no_change_to_try() -> None:
    found = Remedy(id="later", text="Trainer({n})", in_torch="torch({n})", change="n={n}").filled(n=2)
    (inside,), (other,) = applicable({"lightning"}, found), applicable({"other program"}, found)
    assert (inside.id, inside.text, inside.change) == ("later", "Trainer(2)", "n=2")
    assert (other.id, other.text, other.change) == ("later", "torch(2)", "")
