"""First contact: a wheel carries the recipes, `kumi init` writes one, and the shell completes."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kumi.cli import main
from kumi.cli.init import recipes
from kumi.config import load, load_plan, resolve

ROOT = Path(__file__).parents[1]


def test_the_recipes_are_the_examples(capsys):
    files = {str(file.relative_to(ROOT / "examples").with_suffix("")) for file in ROOT.glob("examples/**/*.toml")}
    machines = {"clusters/two-rtx-4090"}  # what a recipe names, no run file
    assert set(recipes()) == files - machines
    assert machines < files
    assert all(recipes().values())
    assert main(["init", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(recipes())


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipe_stands_on_its_own_in_an_empty_folder(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", name]) == 0
    assert capsys.readouterr().out.endswith(f"next: kumi {'plan' if name.startswith('plan/') else 'train'} run.toml\n")
    assert not [file for file in tmp_path.rglob("*.toml") if "examples/" in file.read_text()]
    config = load_plan("run.toml")
    if config.model.source is None:
        resolve(load("run.toml"))
    elif name not in ("lora", "reasoning"):  # which continue the quickstart's model, and that of "format"
        assert (tmp_path / config.model.source / "config.json").is_file()


def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/llama-3-8b").mkdir(parents=True)
    (tmp_path / "models/llama-3-8b/config.json").write_text("mine")
    (tmp_path / "dangling.toml").symlink_to("elsewhere")
    for words in (["plan/llama-3-8b"], ["--out", "dangling.toml"]):
        assert main(["init", *words]) == 2
        assert "exists and is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "models/llama-3-8b/config.json").read_text() == "mine"
    assert not (tmp_path / "run.toml").exists()
    assert not (tmp_path / "elsewhere").exists()


def test_an_unknown_recipe_is_refused_with_the_nearest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "quikstart"]) == 2
    refusal = "'quikstart' is not a recipe; did you mean 'quickstart'? use chat, dpo, format, lora, moe, "
    assert refusal in capsys.readouterr().err


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: in the repository a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, folder / "tree" / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree" / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "."]
    subprocess.run([*build, "./tree"], cwd=folder, check=True, env={**os.environ, "KUMI_HOME": ""})
    return next(folder.glob("*.whl"))


def test_a_wheel_carries_the_recipes(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    for words in (["init"], ["describe", "run.toml"], ["init", "plan/mixtral-8x7b", "--out", "planned.toml"]):
        subprocess.run(
            [sys.executable, "-P", "-m", "kumi", *words],
            cwd=tmp_path / "empty",
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        )
    assert (tmp_path / "empty" / "models" / "mixtral-8x7b" / "config.json").is_file()


def test_a_wheel_s_description_reads_outside_of_the_repository(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert text.startswith("# kumi")
    assert [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target] == []


def test_a_known_home_makes_links_absolute_and_gives_urls():
    spec = importlib.util.spec_from_file_location("kumi_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    text = "![a picture](docs/images/a.svg) [a page](docs/a.md) [elsewhere](https://x.org/) [here](#part)"
    assert setup.description(text, "https://h/o/kumi") == (
        "![a picture](https://h/o/kumi/raw/main/docs/images/a.svg) [a page](https://h/o/kumi/blob/main/docs/a.md) "
        "[elsewhere](https://x.org/) [here](#part)"
    )
    assert setup.description(text, "") == "*a picture* a page [elsewhere](https://x.org/) [here](#part)"
    assert setup.urls("https://h/o/kumi")["Issues"] == "https://h/o/kumi/issues"
    assert setup.urls("") == {}


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("kumi ", {"init", "plan", "train"}),
        ("kumi plan run.toml --tr", {"--trace", "--trainable"}),
        ("kumi convert a b --to ", {"hf", "kumi", "megatron"}),
        ("kumi init ", {"quickstart", "plan/llama-3-8b"}),
        ("kumi train run.toml optim.l", {"optim.lr="}),
        ("kumi train run.toml layout.offload=", {"states", "optimizer-nvme"}),
    ],
)
def test_the_shell_completes_without_torch(line, some, tmp_path):
    """Ask like argcomplete's shell function, which reads the answers from descriptor 8."""
    program = "import sys, kumi.cli\ntry:\n    kumi.cli.main()\nfinally:\n    assert 'torch' not in sys.modules"
    asked = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n=",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
    }
    program = [sys.executable, "-c", program]
    ended = subprocess.run(program, env={**os.environ, **asked}, capture_output=True, text=True)
    assert ended.stderr == ""
    answers = {word.strip() for word in (tmp_path / "answer").read_text().splitlines()}
    assert some <= answers
