"""Fetch llama.cpp's converter and build its library, into build/handover: what `make handover` runs.

Both come from the source package of llama-cpp-python (77 MB), which has all of llama.cpp; cmake, ninja and
sentencepiece are installed beside it, not into the environment. The build takes three minutes of a core; without a C++
compiler only the converter is there, and the tests that generate with llama.cpp skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE = "llama_cpp_python==0.3.36"
HOME = Path(__file__).parents[2] / "build" / "handover"
OPTIONS = ["CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=ON"]
# For any CPU of the kind, and only the library.
OPTIONS += [
    f"{name}=OFF"
    for name in (
        "GGML_NATIVE",
        "GGML_OPENMP",
        "LLAMA_CURL",
        "LLAMA_OPENSSL",
        "LLAMA_BUILD_TESTS",
        "LLAMA_BUILD_SERVER",
        "LLAMA_BUILD_UI",
        "LLAMA_BUILD_APP",
        "LLAMA_BUILD_MTMD",
    )
]


def fetch() -> None:
    """Put llama.cpp's source, the bindings and the tools into `HOME`."""
    part, tools = HOME / "part", HOME / "tools"
    part.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    packages = ["cmake", "ninja", "sentencepiece", "scikit-build-core"]
    subprocess.run([*pip, "install", "--target", str(tools), *packages], check=True)
    # pip asks the package's build backend for its metadata before it keeps the source; nothing is built.
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(part)]
    environment = {**os.environ, "PYTHONPATH": str(tools), "PATH": f"{tools / 'bin'}:{os.environ['PATH']}"}
    subprocess.run([*pip, "download", *options, PACKAGE], check=True, env=environment)
    (archive,) = part.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(part, filter="data")
    (source,) = (path for path in part.iterdir() if path.is_dir())
    shutil.move(source / "llama_cpp", HOME / "llama_cpp")
    shutil.move(source / "vendor" / "llama.cpp", HOME / "llama.cpp")
    shutil.rmtree(part)


def build() -> None:
    """Build libllama into `HOME`/lib."""
    tools, made = HOME / "tools", HOME / "make"
    cmake = [str(tools / "bin" / "cmake")]
    environment = {"PYTHONPATH": str(tools), "PATH": f"{tools / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
    configure = [*cmake, "-G", "Ninja", "-S", str(HOME / "llama.cpp"), "-B", str(made), *(f"-D{o}" for o in OPTIONS)]
    subprocess.run(configure, check=True, env=environment)
    subprocess.run([*cmake, "--build", str(made), "--target", "llama"], check=True, env=environment)
    (HOME / "lib").symlink_to(Path("make", "bin"))  # relative, so that the folder can be moved


if __name__ == "__main__":
    if not (HOME / "llama.cpp").is_dir():
        shutil.rmtree(HOME, ignore_errors=True)
        fetch()
    if shutil.which("c++") is None:
        print("no C++ compiler: llama.cpp's converter is there, its library is not built")
    elif not (HOME / "lib").is_dir():
        build()
