"""The script of the README runs as it stands, only smaller."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from helpers import json_lines, polyreme

README = Path(__file__).parents[2] / "README.md"
SMALLER = {
    "seq_len=256": "seq_len=32",
    "layers=4, hidden=256": "layers=1, hidden=32",
    "300": "3",
    "warmup=20": "warmup=1",
}


def test_script(corpus, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (script,) = [block for block in blocks if "import polyreme" in block]  # others are parts of scripts
    for large, small in SMALLER.items():
        assert large in script
        script = script.replace(large, small)
    (tmp_path / "script.py").write_text(script)
    shutil.copy(corpus, tmp_path / "corpus.bin")
    done = polyreme("run", "-n", 2, "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in json_lines(done.stdout)] == [1, 2, 3]
