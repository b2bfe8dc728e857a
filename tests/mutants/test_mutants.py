"""The mutants of `mutants.toml` still apply to the source; `make mutants` runs them."""

from __future__ import annotations

import ast

from apply_mutants import ROOT, mutants


def test_every_mistake_is_one_change_that_python_reads_and_names_tests_that_are_there():
    listed = mutants()
    assert len({mutant.name for mutant in listed}) == len(listed) >= 24
    for mutant in listed:
        ast.parse(mutant.mutated())
        assert mutant.old != mutant.new
        assert all((ROOT / test).exists() for test in mutant.tests)
