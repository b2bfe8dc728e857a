from __future__ import annotations

import os
import sysconfig

import pytest

from kumi.data import DataPathError, Source, expand, would_read
from kumi.errors import ConfigError


@pytest.fixture
def tree(tmp_path):
    for name in ("a.txt", "b/c.jsonl", "b/d.py", "b/.hidden/e.txt", "b/__pycache__/f.txt", "lib/site-packages/g.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path


def names(tree, source):
    return [path.relative_to(tree).as_posix() for path in expand(source)]


def test_a_folder_gives_its_visible_files_sorted(tree):
    assert names(tree, Source(str(tree))) == ["a.txt", "b/c.jsonl", "b/d.py", "lib/site-packages/g.py"]


def test_globs_alternatives_and_excludes(tree):
    assert names(tree, Source(f"{tree}/**/*.py")) == ["b/d.py", "lib/site-packages/g.py"]
    exclude = ("**/site-packages/**", "**/__pycache__/**")
    assert names(tree, Source(f"{tree}/**/*.{{py,txt}}", exclude=exclude)) == ["a.txt", "b/d.py"]
    assert names(tree, Source(str(tree), exclude=("site-packages/*", "*.jsonl"))) == ["a.txt", "b/d.py"]
    assert names(tree, Source(f"{tree}/a.txt")) == ["a.txt"]


def test_the_standard_library_and_home(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree))
    assert names(tree, Source("~/a.txt")) == ["a.txt"]
    files = expand(Source("{stdlib}/json/*.py"))
    assert [path.name for path in files] == ["__init__.py", "decoder.py", "encoder.py", "scanner.py", "tool.py"]
    assert str(files[0]).startswith(sysconfig.get_paths()["stdlib"])


def test_what_names_nothing_is_refused_with_the_pattern(tree):
    with pytest.raises(DataPathError, match=r"nothing\*\.txt.*matches no file") as error:
        expand(Source(f"{tree}/nothing*.txt"))
    assert error.value.exit_code == 2
    with pytest.raises(DataPathError, match="removes all 1 files"):
        expand(Source(f"{tree}/a.txt", exclude=("*.txt",)))


def test_an_unknown_suffix_is_refused_unless_the_format_is_given(tree):
    (tree / "b/LICENSE").write_text("x")
    with pytest.raises(DataPathError, match=r"1 of 3 files have a suffix .*LICENSE.*set format"):
        expand(Source(f"{tree}/b"))
    assert names(tree, Source(f"{tree}/b", format="text")) == ["b/LICENSE", "b/c.jsonl", "b/d.py"]
    assert names(tree, Source(f"{tree}/b/*.py")) == ["b/d.py"]


@pytest.mark.parametrize("wrong", [{"format": "csv"}, {"weight": 0.0}, {"weight": float("nan")}])
def test_a_wrong_source_is_refused(wrong):
    with pytest.raises(ConfigError, match="data source 'x'"):
        Source("x", **wrong)


def test_links_to_folders_are_followed_and_read_once(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("a")
    (tmp_path / "data" / "loop").symlink_to(".")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "other")
    assert expand(Source(str(tmp_path / "data"))) == [tmp_path / "data" / "more" / "a.txt"]


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path.name), os.mkfifo]
)
def test_what_is_no_file_is_refused_and_never_opened(tmp_path, make):
    make(tmp_path / "a.txt")
    with pytest.raises(DataPathError, match=r"a\.txt is a broken link, a pipe or a device"):
        expand(Source(str(tmp_path)))
    (tmp_path / "b.txt").write_text("b")
    assert expand(Source(str(tmp_path), exclude=("a.txt",))) == [tmp_path / "b.txt"]


def test_a_name_that_is_not_unicode_is_refused(tmp_path):
    with open(os.fsencode(tmp_path) + b"/a\xff.txt", "w") as file:
        file.write("x")
    with pytest.raises(DataPathError, match="is not UTF-8; rename the file"):
        expand(Source(str(tmp_path)))


def test_whether_a_file_would_be_read(tmp_path):
    inside = tmp_path / "run" / "metrics.jsonl"
    assert would_read(Source(str(tmp_path)), inside)
    assert would_read(Source(f"{tmp_path}/**/*.jsonl"), inside)
    assert not would_read(Source(str(tmp_path), exclude=("run/**",)), inside)
    assert not would_read(Source(f"{tmp_path}/*.jsonl"), inside)
    assert not would_read(Source(str(tmp_path)), tmp_path / ".cache" / "metrics.jsonl")
