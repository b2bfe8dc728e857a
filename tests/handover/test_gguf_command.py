"""`kumi convert --to gguf`: kumi's part, with a stand-in for llama.cpp's converter; the real one in test_converter."""

import pytest
from tiny_exports import model_folder

from kumi.cli import main

# Writes its arguments and whether the folder is a Hugging Face folder.
STAND_IN = """
import pathlib, sys
folder, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1])
out.write_text(f"{(folder / 'config.json').is_file()} {sys.argv[-1]}")
"""
FAILS = "raise NotImplementedError('Architecture X not supported!')"


@pytest.fixture
def llama_cpp(tmp_path):
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(STAND_IN)
    (folder / "conversion").mkdir()
    (folder / "conversion" / "base.py").write_text("class TextModel:\n    get_vocab_base_pre = None\n")
    return folder


def test_a_folder_becomes_a_file_by_the_converter_of_the_user(tmp_path, llama_cpp, capsys):
    source = model_folder(tmp_path / "saved", "llama")
    words = ["convert", str(source), str(tmp_path / "m.gguf"), "--to", "gguf", "--llama-cpp", str(llama_cpp)]
    assert main([*words, "--outtype", "q8_0"]) == 0
    assert (tmp_path / "m.gguf").read_text() == "True q8_0"
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err
    (llama_cpp / "convert_hf_to_gguf.py").write_text(FAILS)
    words[2] = str(tmp_path / "other.gguf")
    assert main(words) == 2
    assert "refuses it: NotImplementedError: Architecture X not supported!" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.cpp", "m.Modelfile", "m.gguf", "saved"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "gguf"], "need each other"),
        (["--to", "hf", "--llama-cpp", "x"], "need each other"),
        (["--to", "gguf", "--llama-cpp", "nowhere"], "has no convert_hf_to_gguf.py"),
        (["--to", "gguf", "--llama-cpp", "x", "--dtype", "float32"], "--dtype has no effect"),
        (["--to", "gguf", "--llama-cpp", "x", "--outtype", "q4"], "--outtype q4 is unknown"),
    ],
)
def test_wrong_flags_are_refused(tmp_path, capsys, flags, message):
    source = model_folder(tmp_path / "saved", "llama")
    assert main(["convert", str(source), str(tmp_path / "m.gguf"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
