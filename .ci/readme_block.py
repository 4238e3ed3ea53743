"""Print a command of the README: the one line in the code block behind ``<!-- ci: NAME -->``.

python .ci/readme_block.py run
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def readme_block(name: str, text: str | None = None) -> str:
    """The command behind ``<!-- ci: name -->``; an error where there is not exactly one."""
    if text is None:
        text = README.read_text(encoding="utf-8")
    comments = len(re.findall(rf"^<!-- ci: {re.escape(name)} -->$", text, re.MULTILINE))
    blocks = re.findall(rf"^<!-- ci: {re.escape(name)} -->\n```(?:bash|sh)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if comments != 1 or len(blocks) != 1:
        raise ValueError(
            f"{README.name}: {comments} comments '<!-- ci: {name} -->', {len(blocks)} of them right before a bash "
            "block; expected one"
        )
    lines = blocks[0].strip().splitlines()
    if len(lines) != 1:
        raise ValueError(f"{README.name}: the block behind '<!-- ci: {name} -->' has {len(lines)} lines; expected one")
    return lines[0]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} NAME")
    try:
        print(readme_block(sys.argv[1]))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
