"""Lines of bash that read secrets on a node, from a file that only its owner can use."""

from __future__ import annotations

import shlex

_SECRETS = """
# Secrets come from a file that only its owner can use, by lines NAME=value. Nothing here prints them.
secrets={file}
mode=$(stat -L -c %a -- "$secrets") || exit 2
case $mode in 600 | 400) ;; *) echo "$secrets has mode $mode; chmod 600 it" >&2; exit 2 ;; esac
number=0
while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    case $line in '' | '#'*) continue ;; esac
    [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || {{ echo "$secrets: line $number is not NAME=value" >&2; exit 2; }}
    export "$line"
done < "$secrets"
"""


def read_secrets(path: str) -> str:
    """Return lines that export the variables in the file `path`, or end the script with 2 if others can read it."""
    return _SECRETS.format(file=path_word(path))


def path_word(path: str) -> str:
    """Return `path` as a word of bash; ~/ is the home of whoever runs the script."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
