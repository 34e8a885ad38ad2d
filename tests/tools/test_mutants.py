"""The list of mutants fits the code: each names text that occurs once, and tests that exist."""

from collections import Counter
from typing import Final

import pytest

from mutants.mutants import ENDED, MUTANTS, REPO, Mutant, find, read_texts

TEXTS: Final = read_texts(REPO)
A_FILE: Final = REPO / "nixl_kv/a.py"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_of_the_code(mutant: Mutant) -> None:
    path = find(mutant, TEXTS)
    changed = TEXTS[path].replace(mutant.old, mutant.new)
    assert changed != TEXTS[path]
    compile(changed, path, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_nearest_to_a_mutant_exist(mutant: Mutant) -> None:
    assert mutant.paths
    assert [name for name in mutant.paths if not (REPO / name).exists()] == []


def test_each_mutant_has_a_name_of_its_own() -> None:
    counts = Counter((*(mutant.name for mutant in MUTANTS), *ENDED))
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    ("text", "found"), [("x = 1", "nowhere"), ("return False\nreturn False", r"a\.py \(2\)")]
)
def test_text_that_is_absent_or_ambiguous_is_refused(text: str, found: str) -> None:
    mutant = Mutant("never", "return False", "return True", "tools/test_mutants", "nothing")
    with pytest.raises(ValueError, match=f"mutant never: .* found: .*{found}"):
        find(mutant, {A_FILE: text})
